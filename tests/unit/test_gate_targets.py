"""Audit targets without a GPU and without the packages: what is refused, and what is called."""

import importlib
import importlib.metadata
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path as FilePath
from types import ModuleType, SimpleNamespace

import pytest
import torch

from millpond.gate.paths import CannotTest, Path, Promise, Room
from millpond.gate.targets import (
    TARGETS,
    foreign,
    lmcache_copies,
    lmcache_memory,
    lmcache_retrieve,
    make_target,
    vllm_offload,
    vllm_swap,
)
from millpond.transfer.copies import Direction
from tests import target_stand_ins as stand_ins
from tests.target_stand_ins import NUM_PAGES, PAGE_BYTES

PAIRS = [(3, 6), (0, 2), (7, 0)]
LMCACHE_TARGETS = [name for name in TARGETS if name.startswith("lmcache")]


@pytest.fixture
def room() -> Room:
    generator = torch.Generator().manual_seed(7)
    size = (NUM_PAGES, PAGE_BYTES)
    return Room(torch.randint(0, 256, size, dtype=torch.uint8, generator=generator), NUM_PAGES)


# ---------------------------------------------------------------- the list


def test_importing_the_list_imports_no_package_under_test() -> None:
    code = (
        "import sys, millpond.gate.targets\n"
        "print(sorted({'vllm', 'lmcache', 'torch'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert run.stdout.strip() == "[]"


def test_every_factory_exists_and_its_module_imports_no_package_under_test() -> None:
    code = (
        "import importlib, sys\n"
        "from millpond.gate.targets import TARGETS\n"
        "for where in TARGETS.values():\n"
        "    module, _, factory = where.partition(':')\n"
        "    assert callable(getattr(importlib.import_module(module), factory)), where\n"
        "print(sorted({'vllm', 'lmcache'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert run.stdout.strip() == "[]"


def test_unknown_target_is_misuse_and_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no target 'lmcache'; .*lmcache-raw-pointer"):
        make_target("lmcache")


def test_a_path_of_ones_own_is_made_by_module_and_factory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("paths_of_my_own")
    made = object()
    module.__dict__["make"] = lambda: made
    monkeypatch.setitem(sys.modules, "paths_of_my_own", module)
    assert make_target("paths_of_my_own:make") is made


# ---------------------------------------------------------------- versions and symbols


@pytest.mark.parametrize("name", TARGETS)
def test_missing_package_cannot_be_tested(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(distribution: str) -> str:
        raise importlib.metadata.PackageNotFoundError(distribution)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(CannotTest, match=r"(vllm|lmcache) is not installed; .* knows 0\."):
        make_target(name)


@pytest.mark.parametrize("name", TARGETS)
def test_unknown_version_cannot_be_tested(
    name: str, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = name.split("-", maxsplit=1)[0]
    install(tmp_path, package, "99.1.0")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CannotTest, match=rf"{package} 99\.1\.0 is installed; .* knows 0\."):
        make_target(name)


@pytest.mark.parametrize("name", LMCACHE_TARGETS)
def test_known_version_without_its_code_cannot_be_tested(
    name: str, tmp_path: FilePath, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "lmcache", "0.5.3")
    (tmp_path / "lmcache").mkdir()
    (tmp_path / "lmcache" / "__init__.py").write_text("raise OSError('libc10.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    for loaded in [module for module in sys.modules if module.split(".")[0] == "lmcache"]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(CannotTest, match=r"lmcache\..* cannot be had \(OSError: libc10"):
        make_target(name)


def install(folder: FilePath, package: str, version: str) -> None:
    metadata = folder / f"{package}-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        ("0.26.0", True),
        ("0.26.0+cu130", True),
        ("0.26", True),
        ("0.260.0", False),
        ("1.0.26", False),
    ],
)
def test_known_versions_are_prefixes_of_whole_numbers(
    version: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    if is_known:
        assert foreign.known_version(["vllm"], ["0.26"]) == version
    else:
        with pytest.raises(CannotTest):
            foreign.known_version(["vllm"], ["0.26"])


def takes_a_b(a: int, b: int = 0, *, c: int = 0) -> None: ...
def takes_a_needs_c(a: int, *, c: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "names", "fits"),
    [
        (takes_a_b, ["a"], True),
        (takes_a_b, ["a", "b"], True),
        (takes_a_b, ["a", "x|b"], True),
        (takes_a_b, ["b", "a"], False),
        (takes_a_b, ["a", "b", "c", "d"], False),
        (takes_a_needs_c, ["a"], False),
    ],
)
def test_parameters_are_compared_by_name_and_order(
    function: Callable[..., None], names: list[str], fits: bool
) -> None:
    if fits:
        foreign.expect_parameters(function, *names)
    else:
        with pytest.raises(CannotTest, match="was written for another version"):
            foreign.expect_parameters(function, *names)


# ---------------------------------------------------------------- what a target says


def test_wait_ends_when_done_or_when_its_time_has_passed() -> None:
    answers = iter([False, False, True])
    assert foreign.AskedCompletion(lambda: next(answers)).wait(30)
    assert not foreign.AskedCompletion(lambda: False).wait(0.01)


# ---------------------------------------------------------------- stand-ins


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets accept pages on the CPU, and get events and streams that do nothing."""
    for module in (vllm_swap, vllm_offload, lmcache_copies, lmcache_retrieve):
        monkeypatch.setattr(module, "expect_cuda", lambda _: None)
    for module in (vllm_swap, vllm_offload, lmcache_memory):
        monkeypatch.setattr(module, "expect_registered", lambda host: host)
    monkeypatch.setattr(
        vllm_swap,
        "pinned_pages",
        lambda room: torch.zeros((room.num_host_pages, room.page_bytes), dtype=torch.uint8),
    )
    monkeypatch.setattr(vllm_swap, "_descriptor", lambda values: values)
    monkeypatch.setattr(torch.cuda, "Event", stand_ins.Passed)
    monkeypatch.setattr(torch.cuda, "Stream", stand_ins.Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stand_ins.Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch, "Event", stand_ins.Passed)


Provide = Callable[..., None]
OffloadTarget = type[vllm_offload.SimpleOffload] | type[vllm_offload.OffloadingHandlers]


@pytest.fixture
def provide(monkeypatch: pytest.MonkeyPatch) -> Provide:
    """Put modules of other projects in their place, with the names given."""

    def put(module: str, **names: object) -> None:
        stand_in = ModuleType(module)
        stand_in.__dict__.update(names)
        monkeypatch.setitem(sys.modules, module, stand_in)

    return put


def known(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)


def check_bytes(path: Path, room: Room) -> None:
    """All bytes of the pairs arrive in each direction, and no others change."""
    host = path.open(room)
    assert host.shape == (NUM_PAGES, PAGE_BYTES)
    for direction in path.directions:
        host.copy_(torch.randint(0, 256, host.shape, dtype=torch.uint8))
        pages, rows = room.pages.clone(), host.clone()
        completion = path.copy(direction, PAIRS)
        assert completion.wait(30)
        assert completion.is_done()
        for i, j in PAIRS:
            if direction is Direction.STORE:
                rows[j] = pages[i]
            else:
                pages[i] = rows[j]
        assert torch.equal(host, rows)
        assert torch.equal(room.pages, pages)
    path.close()


# ---------------------------------------------------------------- vLLM


@pytest.mark.usefixtures("on_cpu")
def test_swap_blocks_is_called_with_source_target_bytes_and_mapping(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def swap(
        src: torch.Tensor, dst: torch.Tensor, block_size_in_bytes: int, block_mapping: torch.Tensor
    ) -> None:
        assert block_size_in_bytes == PAGE_BYTES
        assert block_mapping.dtype == torch.int64
        for source, target in block_mapping.tolist():
            dst[target].copy_(src[source])

    path = vllm_swap.SwapBlocks("vllm-swap-blocks", swap, {"vllm": "0.26.0"})
    assert path.promise is Promise.STREAM
    check_bytes(path, room)


@pytest.mark.usefixtures("on_cpu")
def test_swap_blocks_batch_is_called_with_addresses_and_sizes(room: Room) -> None:
    orders: list[bool] = []

    def swap(
        src_ptrs: torch.Tensor,
        dst_ptrs: torch.Tensor,
        sizes: torch.Tensor,
        is_src_access_order_any: bool = False,
    ) -> None:
        orders.append(is_src_access_order_any)
        for source, target, size in zip(
            src_ptrs.tolist(), dst_ptrs.tolist(), sizes.tolist(), strict=True
        ):
            stand_ins.move(target, source, size)

    path = vllm_swap.SwapBlocksBatch("vllm-swap-blocks-batch", swap, {"vllm": "0.26.0"})
    check_bytes(path, room)
    assert orders == [False, True]  # a store's source may still be written


def test_vllm_without_the_compiled_operation_cannot_be_tested(
    provide: Provide, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, "0.26.0")
    provide("vllm._custom_ops", swap_blocks=lambda: None)
    provide("torch.ops", _C_cache_ops=SimpleNamespace())
    with pytest.raises(CannotTest, match="built without swap_blocks"):
        make_target("vllm-swap-blocks")


@pytest.mark.usefixtures("on_cpu")
def test_simple_offload_gives_stores_an_event_and_loads_none(
    room: Room, provide: Provide, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, "0.26.0")
    registered: list[int] = []
    backends: list[stand_ins.DmaCopyBackend] = []

    class Kept(stand_ins.DmaCopyBackend):
        def __init__(self) -> None:
            super().__init__()
            backends.append(self)

    provide("vllm.v1.simple_kv_offload.copy_backend", DmaCopyBackend=Kept)
    provide(
        "vllm.v1.simple_kv_offload.cuda_mem_ops",
        pin_tensor=lambda host: registered.append(host.data_ptr()),
    )
    monkeypatch.setattr(vllm_offload.cudart, "unregister_host", registered.remove)
    path = make_target("vllm-simple-offload")
    assert path.promise is Promise.HOST
    check_bytes(path, room)
    assert registered == []
    (backend,) = backends
    assert backend.is_shut_down
    assert [(store, event is not None) for store, event in backend.launched] == [
        (True, True),
        (False, False),
    ]


def test_a_transfer_has_ended_when_its_event_and_all_before_it_have_passed() -> None:
    reached = vllm_offload.ReachedEvents()
    late = SimpleNamespace(query=lambda: False)
    reached.events += [(1, stand_ins.Passed()), (2, late), (3, stand_ins.Passed())]
    assert reached.has_reached(1)
    assert not reached.has_reached(3)
    late.query = lambda: True
    assert reached.has_reached(3)
    assert reached.has_reached(2)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "worker", [stand_ins.CPUOffloadingWorker, stand_ins.NewerCPUOffloadingWorker]
)
def test_offloading_handlers_are_called_through_their_worker(
    worker: type, room: Room, provide: Provide, monkeypatch: pytest.MonkeyPatch
) -> None:
    known(monkeypatch, "0.32.0")
    provide("vllm.v1.kv_offload.cpu.gpu_worker", CPUOffloadingWorker=worker)
    provide("vllm.v1.kv_offload.cpu.common", CPULoadStoreSpec=stand_ins.CPULoadStoreSpec)
    provide(
        "vllm.v1.kv_offload.base",
        CanonicalKVCaches=SimpleNamespace,
        CanonicalKVCacheTensor=SimpleNamespace,
        CanonicalKVCacheRef=SimpleNamespace,
        GPULoadStoreSpec=stand_ins.GPULoadStoreSpec,
    )
    check_bytes(make_target("vllm-offloading-handlers"), room)


@pytest.mark.parametrize("target", [vllm_offload.SimpleOffload, vllm_offload.OffloadingHandlers])
def test_installed_vllm_has_the_interface_that_is_expected(target: OffloadTarget) -> None:
    version = foreign.known_version(vllm_swap.DISTRIBUTIONS, vllm_swap.KNOWN_VERSIONS)
    target(version)._expect_interface()


@pytest.mark.parametrize("target", [vllm_offload.SimpleOffload, vllm_offload.OffloadingHandlers])
def test_vllm_targets_need_a_cuda_device(target: OffloadTarget, room: Room) -> None:
    path = target("0.32.0")
    with pytest.raises(CannotTest, match="pages are on cpu; this target needs a CUDA device"):
        path.open(room)
    path.close()


# ---------------------------------------------------------------- LMCache


@pytest.fixture(params=["0.5.2", "0.5.3"])
def operations(
    request: pytest.FixtureRequest, provide: Provide, monkeypatch: pytest.MonkeyPatch
) -> stand_ins.Operations:
    known(monkeypatch, request.param)
    operations = stand_ins.Operations()
    older = "lmcache.python_ops_fallback"
    module = older if request.param == "0.5.2" else "lmcache.v1.platform.torch_ops"
    provide(module, **operations.names())
    allocators = "lmcache.v1.memory_allocators"
    provide(
        f"{allocators}.lazy_memory_allocator", LazyMemoryAllocator=stand_ins.LazyMemoryAllocator
    )
    provide(
        f"{allocators}.mixed_memory_allocator", MixedMemoryAllocator=stand_ins.MixedMemoryAllocator
    )
    provide(
        "lmcache.v1.gpu_connector.gpu_ops",
        lmcache_memcpy_async_d2h=stand_ins.to_object,
        lmcache_memcpy_async_h2d=stand_ins.from_object,
    )
    return operations


@pytest.mark.usefixtures("on_cpu")
def test_raw_pointer_is_called_as_for_lazy_objects(
    room: Room, operations: stand_ins.Operations
) -> None:
    check_bytes(make_target("lmcache-raw-pointer"), room)
    offsets = [j * PAGE_BYTES for _, j in PAIRS]
    pieces = stand_ins.LazyMemoryAllocator.PIN_CHUNK_SIZE
    assert operations.calls == [
        *(("d2h", offset, pieces) for offset in offsets),
        *(("h2d", offset, pieces) for offset in offsets),
    ]


@pytest.mark.usefixtures("on_cpu")
def test_raw_pointer_without_a_cuda_runtime_is_not_called(
    room: Room, operations: stand_ins.Operations
) -> None:
    path = make_target("lmcache-raw-pointer")
    operations.library = None
    with pytest.raises(CannotTest, match=r"finds no libcudart\.so: .* LD_LIBRARY_PATH"):
        path.open(room)


@pytest.mark.usefixtures("on_cpu", "operations")
def test_mixed_allocator_is_called_with_page_and_object(room: Room) -> None:
    check_bytes(make_target("lmcache-mixed-allocator"), room)


@pytest.mark.usefixtures("on_cpu", "operations")
def test_recorder_reports_a_store_when_its_completion_is_drained(
    room: Room, operations: stand_ins.Operations
) -> None:
    path = make_target("lmcache-completion-recorder")
    assert (list(path.directions), path.promise) == ([Direction.STORE], Promise.HOST)
    path.open(room)
    first, second = path.copy(Direction.STORE, PAIRS), path.copy(Direction.STORE, PAIRS)
    withheld = operations.completions.pop()
    assert first.is_done()
    assert not second.is_done()
    operations.completions.append(withheld)
    assert second.is_done()
    assert first.is_done()
    path.close()


@pytest.mark.usefixtures("operations")
@pytest.mark.parametrize("name", [n for n in LMCACHE_TARGETS if n != "lmcache-mp-retrieve"])
def test_lmcache_targets_need_a_cuda_device(name: str, room: Room) -> None:
    path = make_target(name)
    with pytest.raises(CannotTest, match="pages are on cpu; this target needs a CUDA device"):
        path.open(room)
    path.close()


@pytest.mark.usefixtures("on_cpu", "operations")
def test_pages_that_are_not_whole_alignments_have_rows_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = Room(torch.zeros((4, 6000), dtype=torch.uint8), 3)
    path = make_target("lmcache-mixed-allocator")
    host = path.open(odd)
    assert (host.shape, host.stride()) == ((3, 6000), (8192, 1))
    path.close()


def test_host_memory_that_is_not_registered_cannot_be_judged() -> None:
    with pytest.raises(CannotTest, match=r"not registered with CUDA: .*ulimit"):
        foreign.expect_registered(torch.zeros(1))


# ---------------------------------------------------------------- LMCache's server


@pytest.fixture(params=[True, False], ids=["events", "no-events"])
def server(
    request: pytest.FixtureRequest, provide: Provide, operations: stand_ins.Operations
) -> list[stand_ins.TransferModule]:
    modules: list[stand_ins.TransferModule] = []

    class Kept(stand_ins.TransferModule):
        has_events = request.param

        def __init__(self, ctx: object) -> None:
            super().__init__(ctx)
            modules.append(self)

    multiprocess = "lmcache.v1.multiprocess"
    provide(
        f"{multiprocess}.modules.lmcache_driven_transfer",
        LMCacheDrivenTransferModule=Kept,
        _HAS_NATIVE_OBJECT_GROUP_TRANSFER=True,
    )
    provide(f"{multiprocess}.custom_types", IPCCacheServerKey=SimpleNamespace)
    provide(f"{multiprocess}.engine_context", LayoutDescRegistry=list)
    provide("lmcache.utils", EngineType=SimpleNamespace(VLLM="vllm"))
    provide("lmcache.v1.distributed.api", ObjectKey=SimpleNamespace)
    return modules


@pytest.mark.usefixtures("on_cpu")
def test_retrieve_gets_blocks_keys_and_the_clients_event(
    room: Room, server: list[stand_ins.TransferModule]
) -> None:
    path = make_target("lmcache-mp-retrieve")
    assert (list(path.directions), path.promise) == ([Direction.LOAD], Promise.HOST)
    assert path.versions["lmcache.c_ops"] == "compiled"
    check_bytes(path, room)
    (module,) = server
    if module.has_events:
        assert module.waited == [[module.entry.cache_context.stream]]


@pytest.mark.usefixtures("on_cpu")
def test_a_retrieve_that_failed_is_no_copy(
    room: Room, server: list[stand_ins.TransferModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_ins.TransferModule, "succeeds", False)
    path = make_target("lmcache-mp-retrieve")
    path.open(room)
    with pytest.raises(CannotTest, match="retrieve failed"):
        path.copy(Direction.LOAD, PAIRS).wait(30)
    path.close()


@pytest.mark.usefixtures("on_cpu")
def test_a_server_that_does_not_take_the_pages_says_why(
    room: Room, server: list[stand_ins.TransferModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("unsupported kv_caches structure")

    monkeypatch.setattr(stand_ins.TransferModule, "register_kv_cache", refuse)
    path = make_target("lmcache-mp-retrieve")
    with pytest.raises(CannotTest, match="does not take the pages: unsupported"):
        path.open(room)


@pytest.mark.usefixtures("on_cpu", "server")
def test_retrieve_only_loads(room: Room) -> None:
    path = make_target("lmcache-mp-retrieve")
    path.open(room)
    with pytest.raises(ValueError, match="cannot store"):
        path.copy(Direction.STORE, PAIRS)
    path.close()
