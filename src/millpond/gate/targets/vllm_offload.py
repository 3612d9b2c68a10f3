"""vLLM's two offloading connectors: the code of their workers that copies.

Written for vLLM 0.26.0, 0.27.1 and 0.32.0 (``DmaCopyBackend`` is the same text in all three).
Both report a transfer once its event has passed, and their schedulers go by that report: a
store's host blocks can be read from then on, a load's request runs from then on.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch

from millpond.gate.paths import CannotTest, Promise, Room
from millpond.gate.targets.foreign import (
    AskedCompletion,
    Target,
    expect_cuda,
    expect_parameters,
    expect_registered,
    known_version,
    symbol,
)
from millpond.gate.targets.vllm_swap import DISTRIBUTIONS, KNOWN_VERSIONS
from millpond.transfer import cudart
from millpond.transfer.copies import Direction

_SIMPLE: Final = "vllm.v1.simple_kv_offload"
_OFFLOAD: Final = "vllm.v1.kv_offload"


def simple_offload() -> "SimpleOffload":
    """Make ``vllm-simple-offload``; raises ``CannotTest``."""
    return SimpleOffload(known_version(DISTRIBUTIONS, KNOWN_VERSIONS))


def offloading_handlers() -> "OffloadingHandlers":
    """Make ``vllm-offloading-handlers``; raises ``CannotTest``."""
    return OffloadingHandlers(known_version(DISTRIBUTIONS, KNOWN_VERSIONS))


class ReachedEvents:
    """Which transfers of one direction have ended: ``_poll_stream_events`` (worker.py, 0.26.0).

    ``events`` is filled by the backend's thread, in the order of submission.
    """

    def __init__(self) -> None:
        self.events: list[tuple[int, Any]] = []
        self._reached: int | None = None

    def has_reached(self, number: int) -> bool:
        """Say whether transfer ``number``, and so all before it, have ended."""
        while self.events and self.events[0][1].query():
            self._reached, _ = self.events.pop(0)
        return self._reached is not None and self._reached >= number


class SimpleOffload(Target):
    """``DmaCopyBackend``, called as ``SimpleCPUOffloadWorker.get_finished`` calls it."""

    def __init__(self, version: str) -> None:
        super().__init__("vllm-simple-offload", Promise.HOST, {"vllm": version})
        self._make_backend = symbol(f"{_SIMPLE}.copy_backend", "DmaCopyBackend")
        self._pin = symbol(f"{_SIMPLE}.cuda_mem_ops", "pin_tensor")
        self._numbers = itertools.count()
        self._reached = {direction: ReachedEvents() for direction in Direction}
        self._backend: Any = None
        self._compute_done: Any = None
        self._host: torch.Tensor | None = None

    def open(self, room: Room) -> torch.Tensor:
        """As ``Path.open``."""
        expect_cuda(room)
        self._expect_interface()
        # Memory, its registration and the streams' priority as in register_kv_caches
        # (simple_kv_offload/worker.py, 0.26.0).
        host = torch.zeros((room.num_host_pages, room.page_bytes), dtype=torch.uint8)
        try:
            self._pin(host)
        except RuntimeError as error:
            raise CannotTest(f"{error}: raise the limit of locked memory (ulimit -l)") from error
        self._host = host
        expect_registered(host)
        stream: Any = torch.cuda.Stream
        low, _ = stream.priority_range()
        load_stream, store_stream = stream(priority=low), stream(priority=low)
        device = room.pages.device
        backend = self._make_backend()
        backend.init({"pages": room.pages}, {"pages": host}, device, load_stream, store_stream)
        self._backend = backend
        self._compute_done = torch.Event()
        return host

    def _expect_interface(self) -> None:
        backend = self._make_backend
        caches = ("gpu_caches", "cpu_caches", "device")
        expect_parameters(backend.init, "self", *caches, "load_stream", "store_stream")
        blocks = ("src_blocks", "dst_blocks", "is_store")
        events = ("event_idx", "events_list", "wait_event")
        expect_parameters(backend.launch_copy, "self", *blocks, *events)

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> AskedCompletion:
        """As ``Path.copy``."""
        number = next(self._numbers)
        reached = self._reached[direction]
        pages, host = [i for i, _ in pairs], [j for _, j in pairs]
        arguments = {"event_idx": number, "events_list": reached.events}
        # get_finished (simple_kv_offload/worker.py, 0.26.0 to 0.32.0): a load gets no event to
        # wait for; a store gets one event, used again for each store.
        if direction is Direction.LOAD:
            self._backend.launch_copy(host, pages, is_store=False, **arguments)
        else:
            self._compute_done.record(torch.cuda.current_stream())
            self._backend.launch_copy(
                pages, host, is_store=True, wait_event=self._compute_done, **arguments
            )
        return AskedCompletion(lambda: reached.has_reached(number))

    def close(self) -> None:
        """As ``Path.close``."""
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None
        if self._host is not None:
            cudart.unregister_host(self._host.data_ptr())
            self._host = None


class OffloadingHandlers(Target):
    """Both ``SingleDirectionOffloadingHandler`` of a ``CPUOffloadingWorker``, with its memory.

    ``submit_store`` and ``submit_load`` hand over to ``transfer_async``; the connector calls
    them on the engine's thread (``start_kv_transfers``, offloading/worker.py, 0.26.0), and
    learns of the end by ``get_finished``. Before a store the handler waits for the stream that
    is current; before a load it does so in 0.32.0, and not in 0.26.0 and 0.27.1.
    """

    def __init__(self, version: str) -> None:
        super().__init__("vllm-offloading-handlers", Promise.HOST, {"vllm": version})
        self._make_worker = symbol(f"{_OFFLOAD}.cpu.gpu_worker", "CPUOffloadingWorker")
        self._make_caches = symbol(f"{_OFFLOAD}.base", "CanonicalKVCaches")
        self._make_tensor = symbol(f"{_OFFLOAD}.base", "CanonicalKVCacheTensor")
        self._make_ref = symbol(f"{_OFFLOAD}.base", "CanonicalKVCacheRef")
        self._make_pages = symbol(f"{_OFFLOAD}.base", "GPULoadStoreSpec")
        self._make_host = symbol(f"{_OFFLOAD}.cpu.common", "CPULoadStoreSpec")
        self._jobs = itertools.count()
        self._finished: set[int] = set()
        self._worker: Any = None

    def open(self, room: Room) -> torch.Tensor:
        """As ``Path.open``."""
        expect_cuda(room)
        self._expect_interface()
        page_bytes = room.page_bytes
        tensor = self._make_tensor(tensor=room.pages.view(torch.int8), page_size_bytes=page_bytes)
        ref = self._make_ref(tensor_idx=0, page_size_bytes=page_bytes)
        caches = self._make_caches(tensors=[tensor], group_data_refs=[[ref]])
        # Host blocks as large as the device's; without a shared region, as create_worker does
        # by default (kv_offload/cpu/spec.py, 0.26.0).
        worker = self._make_worker(caches, 1, room.num_host_pages)
        (host,) = getattr(worker, "_store_handler").dst_tensors  # noqa: B009 # a private name
        self._worker = worker
        return expect_registered(host.view(torch.uint8))

    def _expect_interface(self) -> None:
        worker = self._make_worker
        expect_parameters(worker, "kv_caches", "blocks_per_chunk", "num_cpu_blocks|num_cpu_chunks")
        expect_parameters(worker.submit_store, "self", "job_id", "src_spec", "dst_spec")
        expect_parameters(worker.submit_load, "self", "job_id", "src_spec", "dst_spec")
        expect_parameters(self._make_pages, "block_ids", "group_sizes", "block_indices")
        expect_parameters(self._make_host, "block_ids")

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> AskedCompletion:
        """As ``Path.copy``."""
        job = next(self._jobs)
        pages = self._make_pages([i for i, _ in pairs], group_sizes=[len(pairs)], block_indices=[0])
        host = self._make_host([j for _, j in pairs])
        if direction is Direction.STORE:
            accepted = self._worker.submit_store(job, pages, host)
        else:
            accepted = self._worker.submit_load(job, host, pages)
        if not accepted:
            raise CannotTest(f"the worker refused to {direction} {len(pairs)} blocks")
        return AskedCompletion(lambda: self._is_finished(job))

    def _is_finished(self, job: int) -> bool:
        self._finished.update(result.job_id for result in self._worker.get_finished())
        return job in self._finished

    def close(self) -> None:
        """As ``Path.close``."""
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
