"""Stand-ins for the code of other projects that audit targets call: interfaces, and bytes moved.

Their signatures are those of vLLM 0.26.0 and LMCache 0.5.3.
"""
# ruff: noqa: ANN401, ARG002 # the signatures are not ours

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

PAGE_BYTES = 4096
NUM_PAGES = 8


class Passed:
    """An event that has passed, however it is made, recorded and waited for."""

    def __init__(self, *_: object, **__: object) -> None:
        self.waits: list[object] = []

    def record(self, stream: object = None) -> None: ...

    def wait(self, stream: object) -> None:
        self.waits.append(stream)

    def query(self) -> bool:
        return True


class Stream:
    cuda_stream = 77

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -5


def bytes_at(address: int, num_bytes: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)


def move(target: int, source: int, num_bytes: int) -> None:
    bytes_at(target, num_bytes).copy_(bytes_at(source, num_bytes))


class DmaCopyBackend:
    """vLLM's, as far as its interface goes: 0.26.0."""

    def __init__(self) -> None:
        self.launched: list[tuple[bool, object]] = []
        self.is_shut_down = False

    def init(
        self,
        gpu_caches: dict[str, torch.Tensor],
        cpu_caches: dict[str, torch.Tensor],
        device: torch.device,
        load_stream: Stream,
        store_stream: Stream,
    ) -> None:
        assert list(gpu_caches) == list(cpu_caches)
        assert load_stream.priority == store_stream.priority == 0
        assert load_stream is not store_stream
        (self.pages,), (self.host,) = gpu_caches.values(), cpu_caches.values()

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[tuple[int, Passed]],
        wait_event: object = None,
    ) -> None:
        source, target = (self.pages, self.host) if is_store else (self.host, self.pages)
        target[dst_blocks] = source[src_blocks]
        self.launched.append((is_store, wait_event))
        events_list.append((event_idx, Passed()))

    def shutdown(self) -> None:
        self.is_shut_down = True


class CPUOffloadingWorker:
    """vLLM's, as far as its interface goes: 0.26.0, and 0.32.0 by another name of a count."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, num_cpu_blocks: int) -> None:
        assert blocks_per_chunk == 1
        ((ref,),) = kv_caches.group_data_refs
        assert (ref.tensor_idx, ref.page_size_bytes) == (0, PAGE_BYTES)
        (self.pages,) = (one.tensor for one in kv_caches.tensors)
        assert self.pages.dtype == torch.int8
        self.host = torch.zeros((num_cpu_blocks, PAGE_BYTES), dtype=torch.int8)
        self._store_handler = SimpleNamespace(dst_tensors=[self.host])
        self._ended: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        assert src_spec.group_sizes == [len(src_spec.block_ids)]
        self.host[dst_spec.block_ids] = self.pages[src_spec.block_ids]
        self._ended.append(job_id)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        assert dst_spec.block_indices == [0]
        self.pages[dst_spec.block_ids] = self.host[src_spec.block_ids]
        self._ended.append(job_id)
        return True

    def get_finished(self) -> list[SimpleNamespace]:
        ended = [SimpleNamespace(job_id=job) for job in self._ended]
        self._ended.clear()
        return ended

    def shutdown(self) -> None: ...


class NewerCPUOffloadingWorker(CPUOffloadingWorker):
    def __init__(self, kv_caches: Any, blocks_per_chunk: int, num_cpu_chunks: int) -> None:
        super().__init__(kv_caches, blocks_per_chunk, num_cpu_chunks)


class GPULoadStoreSpec(SimpleNamespace):
    def __init__(
        self, block_ids: list[int], group_sizes: list[int], block_indices: list[int]
    ) -> None:
        super().__init__(block_ids=block_ids, group_sizes=group_sizes, block_indices=block_indices)


class CPULoadStoreSpec(SimpleNamespace):
    def __init__(self, block_ids: list[int]) -> None:
        super().__init__(block_ids=block_ids)


class MemoryObject:
    def __init__(self, memory: torch.Tensor, address: int) -> None:
        self.raw_tensor = memory
        self.data_ptr = memory.data_ptr()
        self.meta = SimpleNamespace(address=address)
        self.references = 1

    def get_size(self) -> int:
        return PAGE_BYTES

    def ref_count_down(self) -> None:
        self.references -= 1


class Allocator:
    """LMCache's, as far as its interface goes: one buffer, aligned objects."""

    PIN_CHUNK_SIZE = 1 << 26
    ALIGN_BYTES = 4096

    def _prepare(self, size: int) -> None:
        self.buffer = torch.zeros(size, dtype=torch.uint8)
        self.objects: list[MemoryObject] = []

    def batched_allocate(
        self, shapes: torch.Size, dtypes: torch.dtype, batch_size: int
    ) -> Sequence[MemoryObject] | None:
        unit = -(-shapes.numel() // self.ALIGN_BYTES) * self.ALIGN_BYTES
        if unit * batch_size > self.buffer.numel():
            return None
        starts = range(0, unit * batch_size, unit)
        self.objects = [MemoryObject(self.buffer[at : at + unit], at) for at in starts]
        return self.objects

    def close(self) -> None:
        assert {one.references for one in self.objects} <= {0}


class LazyMemoryAllocator(Allocator):
    def __init__(self, init_size: int, final_size: int) -> None:
        assert init_size == final_size
        self._prepare(final_size)


class MixedMemoryAllocator(Allocator):
    def __init__(self, size: int) -> None:
        self._prepare(size)


class Operations:
    """``torch_ops``, as far as its interface goes: 0.5.3."""

    TransferDirection = SimpleNamespace(H2D="h2d", D2H="d2h")

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.completions: list[tuple[str, bytes]] = []
        self.library: object = SimpleNamespace(cudaMemcpy=print)

    def lmcache_memcpy_async(
        self,
        dest: int,
        src: int,
        nbytes: int,
        direction: str,
        host_buffer_offset: int,
        host_buffer_alignments: int,
    ) -> None:
        self.calls.append((direction, host_buffer_offset, host_buffer_alignments))
        move(dest, src, nbytes)

    def record_completion_on_stream(self, cuda_stream_ptr: int, kind: str, payload: bytes) -> None:
        assert (cuda_stream_ptr, kind) == (Stream.cuda_stream, "finish_write")
        self.completions.append((kind, payload))

    def drain_recorded_completions(self) -> list[tuple[str, bytes]]:
        drained = list(self.completions)
        self.completions.clear()
        return drained

    def names(self) -> dict[str, object]:
        return {
            "TransferDirection": self.TransferDirection,
            "_get_copy_lib": lambda: self.library,
            "lmcache_memcpy_async": self.lmcache_memcpy_async,
            "record_completion_on_stream": self.record_completion_on_stream,
            "drain_recorded_completions": self.drain_recorded_completions,
        }


def to_object(gpu_buffer: torch.Tensor, memory_obj: MemoryObject) -> None:
    memory_obj.raw_tensor[:PAGE_BYTES].copy_(gpu_buffer)


def from_object(memory_obj: MemoryObject, gpu_buffer: torch.Tensor) -> None:
    gpu_buffer.copy_(memory_obj.raw_tensor[:PAGE_BYTES])


class TransferModule:
    """``LMCacheDrivenTransferModule``, as far as its interface goes.

    Takes as many tokens for a block as the context says; ``has_events`` as from 0.5.3 on.
    """

    has_events = True
    succeeds = True

    def __init__(self, ctx: Any) -> None:
        self.ctx = ctx
        self.entry = SimpleNamespace(cache_context=SimpleNamespace(stream=Stream()))
        if self.has_events:
            self.entry.event_backend = None
        self.waited: list[object] = []

    def register_kv_cache(
        self,
        instance_id: int,
        kv_caches: list[Any],
        model_name: str,
        world_size: int,
        engine_type: str,
        layout_hints: dict[str, str],
        engine_group_infos: list[Any],
    ) -> None:
        (layer,) = kv_caches
        self.pages = layer.to_tensor()
        assert self.pages.shape[:2] == (NUM_PAGES, self.ctx.chunk_size)
        self.ctx.layout_desc_registry.append(model_name)

    def get_and_touch_context_entry(self, instance_id: int) -> Any:
        return self.entry

    def retrieve(
        self,
        key: Any,
        instance_id: int,
        gpu_block_ids: list[list[int]],
        event_ipc_handle: bytes,
        skip_first_n_tokens: int = 0,
    ) -> tuple[bytes, bool]:
        (blocks,) = gpu_block_ids
        (keys,) = self.ctx.resolve_obj_keys(key, [0])
        self.ctx.event_bus.publish(object())
        self.ctx.event_bus.publish_on_stream(Stream(), object())
        with self.ctx.storage_manager.read_prefetched_results(keys) as objects:
            for block, one in zip(blocks, objects, strict=True):
                page = self.pages[block].view(torch.uint8)
                page.copy_(one.raw_tensor[:PAGE_BYTES].view(page.shape))
        self.ctx.storage_manager.finish_read_prefetched(keys)
        if not self.has_events:
            return b"of this process", self.succeeds
        events = self.entry.event_backend
        produced = events.import_event(event_ipc_handle, None)
        events.wait_event(produced, self.entry.cache_context.stream)
        self.waited.append(produced.waits)
        event = events.create_event(None)
        events.record_event(event, self.entry.cache_context.stream)
        return events.export_event(event, None), self.succeeds

    def close(self) -> None: ...
