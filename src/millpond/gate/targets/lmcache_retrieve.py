"""LMCache's multiprocess server: ``LMCacheDrivenTransferModule.retrieve``, in this process.

Written for LMCache 0.5.2 and 0.5.3. Real: the module, its registration of the pages, its cache
context with its stream, staging buffers and kernels, ``retrieve`` itself, and the memory
objects of the lazy allocator that the server uses. Stand-ins, as small as ``retrieve`` takes
them: the storage that finds objects by key, the bus for statistics, and the passing of pages
and events between processes, which CUDA refuses within one process.
"""

import itertools
import os
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final

import torch

from millpond.gate.paths import CannotTest, Promise, Room
from millpond.gate.targets.foreign import (
    AskedCompletion,
    Target,
    expect_cuda,
    expect_parameters,
    known_version,
    symbol,
)
from millpond.gate.targets.lmcache_memory import (
    DISTRIBUTIONS,
    KNOWN_VERSIONS,
    PageObjects,
    expect_runtime_library,
    lazy_allocator_class,
)
from millpond.transfer.copies import Direction

_SERVER: Final = "lmcache.v1.multiprocess"
_MODULE: Final = f"{_SERVER}.modules.lmcache_driven_transfer"
_MODEL: Final = "millpond-gate"
_SLOTS_A_BLOCK: Final = 16
"""Tokens of one block, and so of one memory object: each object is one page."""


def mp_retrieve() -> "Retrieve":
    """Make ``lmcache-mp-retrieve``; raises ``CannotTest``."""
    return Retrieve(known_version(DISTRIBUTIONS, KNOWN_VERSIONS))


class EventsInProcess:
    """``DefaultEventIPCBackend`` (v1/platform/base/event_ipc.py, 0.5.3) without the process.

    A handle names an event that is kept here; everything else is the same call.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self._events: dict[bytes, Any] = {}
        self._numbers = itertools.count()

    def check_event_support(self, device: object) -> None:
        """Events of one process need no support."""

    def create_event(self, device: object) -> Any:  # noqa: ANN401, ARG002
        """Return a new event."""
        return torch.cuda.Event()

    def export_event(self, event: object, device: object) -> bytes:  # noqa: ARG002
        """Keep ``event`` and return its name."""
        handle = next(self._numbers).to_bytes(8, "little")
        self._events[handle] = event
        return handle

    def import_event(self, handle: bytes, device: object) -> Any:  # noqa: ANN401, ARG002
        """Give up the event of that name."""
        return self._events.pop(handle)

    def record_event(self, event: Any, stream: object) -> None:  # noqa: ANN401
        """Record ``event`` on ``stream``."""
        event.record(stream)

    def wait_event(self, event: Any, stream: object) -> None:  # noqa: ANN401
        """Let ``stream`` wait for ``event``."""
        event.wait(stream)

    def query_event(self, event: Any) -> bool:  # noqa: ANN401
        """Say whether ``event`` has passed."""
        return bool(event.query())

    def synchronize_event(self, event: Any, device: object) -> None:  # noqa: ANN401, ARG002
        """Wait on the host for ``event``."""
        event.synchronize()


class ObjectsByRow:
    """What ``retrieve`` asks of the storage manager; the token of a key is a host row."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects

    def object_keys(self, key: Any, groups: Sequence[int]) -> list[list[Any]]:  # noqa: ANN401
        """As ``MPCacheServerContext.resolve_obj_keys``, one object a token."""
        make_key = symbol("lmcache.v1.distributed.api", "ObjectKey")
        rows = key.token_ids[key.start : key.end]
        return [
            [
                make_key(chunk_hash=row.to_bytes(8, "little"), model_name=_MODEL, kv_rank=0)
                for row in rows
            ]
            for _ in groups
        ]

    @contextmanager
    def read_prefetched_results(self, keys: Sequence[Any]) -> Generator[list[Any]]:
        """As ``StorageManager.read_prefetched_results``, without locks."""
        yield [self._objects[int.from_bytes(key.chunk_hash, "little")] for key in keys]

    def finish_read_prefetched(self, keys: Sequence[Any]) -> None:
        """Nothing is locked."""

    def finish_write(self, keys: Sequence[Any]) -> None:
        """Nothing is written."""


class Retrieve(Target):
    """``retrieve``, called in a thread of the server with the client's event.

    The client is ``start_load_kv`` (integration/vllm/lmcache_mp_connector.py, 0.5.3): it
    records an event on its current stream, submits, and asks for the event that it gets back
    (``DeviceMessagingFuture``).
    """

    def __init__(self, version: str) -> None:
        super().__init__("lmcache-mp-retrieve", Promise.HOST, {"lmcache": version})
        self.directions = (Direction.LOAD,)
        self._make_module = symbol(_MODULE, "LMCacheDrivenTransferModule")
        self._make_key = symbol(f"{_SERVER}.custom_types", "IPCCacheServerKey")
        self._make_registry = symbol(f"{_SERVER}.engine_context", "LayoutDescRegistry")
        self._engine_type = symbol("lmcache.utils", "EngineType").VLLM
        self._make_allocator = lazy_allocator_class()
        self._compiled = bool(symbol(_MODULE, "_HAS_NATIVE_OBJECT_GROUP_TRANSFER"))
        operations = "compiled" if self._compiled else "Python"
        self.versions = {**self.versions, "lmcache.c_ops": operations}
        self._client = os.getpid()
        self._requests = itertools.count()
        self._events = EventsInProcess()
        self._objects: PageObjects | None = None
        self._module: Any = None
        self._entry: Any = None
        self._server: ThreadPoolExecutor | None = None

    def open(self, room: Room) -> torch.Tensor:
        """As ``Path.open``."""
        expect_cuda(room)
        arguments = ("key", "instance_id", "gpu_block_ids", "event_ipc_handle")
        expect_parameters(self._make_module.retrieve, "self", *arguments, "skip_first_n_tokens")
        if not self._compiled:
            expect_runtime_library(self.versions["lmcache"])
        pages = self._as_layer(room)
        size_bytes = PageObjects.size_bytes(room)
        self._objects = PageObjects(self._make_allocator(size_bytes, size_bytes), room)
        host = self._objects.rows(room.page_bytes)
        self._module = self._make_module(self._context(self._objects.objects))
        self._register(pages)
        self._server = ThreadPoolExecutor(1, thread_name_prefix="lmcache-retrieve")
        return host

    def _as_layer(self, room: Room) -> torch.Tensor:
        """Return the pages as one layer of latent attention: (blocks, slots, values)."""
        if room.page_bytes % (2 * _SLOTS_A_BLOCK):
            raise CannotTest(
                f"pages of {room.page_bytes} bytes do not make {_SLOTS_A_BLOCK} slots of"
                " 2-byte values; use a power of two"
            )
        return room.pages.view(torch.bfloat16).view(room.pages.shape[0], _SLOTS_A_BLOCK, -1)

    def _context(self, objects: Sequence[Any]) -> SimpleNamespace:
        """Return what the module uses of ``MPCacheServerContext``."""
        storage = ObjectsByRow(objects)
        silent = SimpleNamespace(publish=_ignore, publish_on_stream=_ignore)
        return SimpleNamespace(
            chunk_size=_SLOTS_A_BLOCK,
            separate_object_groups=False,
            full_sw_kv=False,
            storage_manager=storage,
            event_bus=silent,
            layout_desc_registry=self._make_registry(),
            resolve_obj_keys=storage.object_keys,
        )

    def _register(self, pages: torch.Tensor) -> None:
        layer = SimpleNamespace(to_tensor=lambda: pages)
        try:
            self._module.register_kv_cache(
                self._client, [layer], _MODEL, 1, self._engine_type, {}, []
            )
        except (ImportError, RuntimeError, ValueError) as error:
            self.close()
            raise CannotTest(f"LMCache's server does not take the pages: {error}") from error
        self._entry = self._module.get_and_touch_context_entry(self._client)
        if hasattr(self._entry, "event_backend"):  # 0.5.3; before, retrieve waits for nothing
            self._entry.event_backend = self._events
        # A server has been idle for long when its first request comes.
        torch.cuda.synchronize(pages.device)

    def copy(self, direction: Direction, pairs: Sequence[tuple[int, int]]) -> AskedCompletion:
        """As ``Path.copy``."""
        assert self._server is not None
        if direction is not Direction.LOAD:
            raise ValueError(f"{self.name} cannot {direction}")
        produced = torch.cuda.Event()
        produced.record()
        handle = self._events.export_event(produced, None)
        key = self._make_key(
            model_name=_MODEL,
            world_size=1,
            worker_id=0,
            token_ids=tuple(j for _, j in pairs),
            start=0,
            end=len(pairs),
            request_id=f"gate-{next(self._requests)}",
        )
        answer = self._server.submit(self._retrieve, key, [i for i, _ in pairs], handle)
        return AskedCompletion(lambda: _has_passed(answer), produced)

    def _retrieve(self, key: Any, blocks: list[int], handle: bytes) -> Any:  # noqa: ANN401
        """Run ``retrieve`` in the server's thread; return the event that the client gets."""
        answered, succeeded = self._module.retrieve(key, self._client, [blocks], handle)
        if not succeeded:
            raise CannotTest("retrieve failed; LMCache's log says why")
        if hasattr(self._entry, "event_backend"):
            return self._events.import_event(answered, None)
        # 0.5.2: its own event, recorded just before, cannot be opened in its own process.
        event = torch.cuda.Event()
        event.record(self._entry.cache_context.stream)
        return event

    def close(self) -> None:
        """As ``Path.close``."""
        if self._server is not None:
            self._server.shutdown()
            self._server = None
        if self._module is not None:
            self._module.close()
            self._module = self._entry = None
        if self._objects is not None:
            self._objects.close()
            self._objects = None


def _has_passed(answer: Future[Any]) -> bool:
    return answer.done() and bool(answer.result().query())


def _ignore(*_: object) -> None:
    """Take an event for statistics."""
