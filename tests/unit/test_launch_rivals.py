"""How other caches are started, and what is refused where they can't be."""

import fnmatch
import json
import re
from pathlib import Path

import pytest

from millpond.launch import rivals
from millpond.launch.replica import ReplicaSpec, engine_argv, engine_environ
from millpond.launch.rivals import (
    LMCACHE,
    RIVALS,
    VLLM_FS,
    Lmcache,
    RivalName,
    RivalOptions,
    VllmFs,
    check_rival,
    make_rival,
)
from millpond.model.errors import SetupError
from millpond.model.limits import GIB

PYTHON = Path("/p/python")


def options(name: RivalName, **changes: object) -> RivalOptions:
    fields: dict[str, object] = {"name": name, "size_bytes": 3 * GIB}
    return RivalOptions(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def lmcache(**changes: object) -> Lmcache:
    return Lmcache(options(LMCACHE, **changes), num_replicas=2, port=5, http_port=6)


def vllm_fs(**changes: object) -> VllmFs:
    return VllmFs(options(VLLM_FS, **changes), num_replicas=2, files=Path("/f/it"))


def value_after(argv: tuple[str, ...], flag: str) -> str:
    assert argv.count(flag) == 1
    return argv[argv.index(flag) + 1]


# ---------------------------------------------------------------- LMCache


def test_lmcaches_server_is_as_large_as_the_pool_and_listens_at_home() -> None:
    argv = lmcache().server_argv(PYTHON)
    assert argv[:3] == (str(PYTHON), "-m", "lmcache.v1.multiprocess.http_server")
    assert value_after(argv, "--l1-size-gb") == "3"
    assert value_after(argv, "--host") == value_after(argv, "--http-host") == "127.0.0.1"
    assert (value_after(argv, "--port"), value_after(argv, "--http-port")) == ("5", "6")
    assert value_after(argv, "--max-workers") == "2"
    assert value_after(argv, "--eviction-policy") == "LRU"
    small = lmcache(size_bytes=GIB // 4).server_argv(PYTHON)
    assert value_after(small, "--l1-size-gb") == "0.25"


def test_replicas_join_lmcaches_server_at_its_port() -> None:
    member = lmcache().membership("a")
    assert member == lmcache().membership("b")
    assert member.transfer["kv_connector"] == "LMCacheMPConnector"
    assert member.transfer["kv_connector_extra_config"] == {
        "lmcache.mp.host": "tcp://127.0.0.1",
        "lmcache.mp.port": 5,
    }
    assert member.engine_args == ()
    assert member.environ["PYTHONHASHSEED"] == "0"


def test_a_hybrid_gives_lmcache_one_block_a_step() -> None:
    """Its recipe for Qwen3.6-27B: chunks of 784 tokens, steps of at most 1,567."""
    hybrid = lmcache(hybrid_block_tokens=784)
    argv = hybrid.server_argv(PYTHON)
    assert value_after(argv, "--chunk-size") == "784"
    assert "--separate-object-groups" in argv
    args = hybrid.membership("a").engine_args
    assert value_after(args, "--max-num-batched-tokens") == "1567"
    assert value_after(args, "--mamba-cache-mode") == "align"
    plain = lmcache().server_argv(PYTHON)
    assert value_after(plain, "--chunk-size") == "256"
    assert "--separate-object-groups" not in plain


def test_lmcaches_server_sees_each_gpu_once_and_tells_nobody_of_it() -> None:
    environ = lmcache().server_environ({"A": "1", "CUDA_VISIBLE_DEVICES": "3,3,1"})
    assert environ["CUDA_VISIBLE_DEVICES"] == "3,1", "CUDA sees no device in a list with doubles"
    assert environ["LMCACHE_TRACK_USAGE"] == "false"
    assert environ["A"] == "1"
    assert lmcache().membership("a").environ["LMCACHE_TRACK_USAGE"] == "false"


# ---------------------------------------------------------------- vLLM's files


def test_replicas_share_files_and_have_equal_parts_of_the_memory() -> None:
    a, b = (vllm_fs().membership(name) for name in "ab")
    assert a.transfer["kv_connector"] == "OffloadingConnector"
    extra = a.transfer["kv_connector_extra_config"]
    assert extra == b.transfer["kv_connector_extra_config"]
    assert extra == {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 3 * GIB // 2,
        "secondary_tiers": [{"type": "fs", "root_dir": "/f/it"}],
        "block_size": 256,
    }
    assert a.environ == b.environ == {"PYTHONHASHSEED": "0"}, "equal names for equal prefixes"


def test_what_a_killed_replica_leaves_is_known_by_name() -> None:
    a, b = (vllm_fs().membership(name) for name in "ab")
    assert a.transfer["engine_id"] == "it-a"
    assert a.leftovers[:2] == (Path("/f/it"), Path("/dev/shm/vllm_offload_it-a.mmap"))
    assert b.leftovers[1] == Path("/dev/shm/vllm_offload_it-b.mmap")


def test_what_each_of_several_engines_leaves_is_known_and_no_other_replicas() -> None:
    """With --data-parallel-size every engine has a number behind its name."""
    patterns = [path.name for path in vllm_fs().membership("r").leftovers]

    def is_removed(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

    assert is_removed("vllm_offload_it-r.mmap")
    assert is_removed("vllm_offload_it-r_dp0.mmap")
    assert is_removed("vllm_offload_it-r_dp11.mmap")
    assert not is_removed("vllm_offload_it-r27.mmap")
    assert not is_removed("vllm_offload_it-r27_dp0.mmap")


def test_a_hybrids_blocks_are_kept_as_they_are() -> None:
    extra = vllm_fs(hybrid_block_tokens=784).membership("a").transfer["kv_connector_extra_config"]
    assert isinstance(extra, dict)
    assert "block_size" not in extra


# ---------------------------------------------------------------- both


def test_a_member_is_started_with_its_config_last_arguments_and_environment() -> None:
    member = lmcache(hybrid_block_tokens=784).membership("a")
    spec = ReplicaSpec(
        name="a",
        model="m",
        port=1,
        gpus=("0",),
        engine_args=("--max-num-batched-tokens", "16384"),
        membership=member,
    )
    argv = engine_argv(spec)
    assert json.loads(value_after(argv, "--kv-transfer-config")) == member.transfer
    assert argv[-2:] == ("--max-num-batched-tokens", "1567"), "the last one counts"
    environ = engine_environ(spec, {"A": "1", "PYTHONHASHSEED": "7"})
    assert environ == {"A": "1", "CUDA_VISIBLE_DEVICES": "0", **member.environ}


def test_each_system_has_ports_and_files_of_its_own(tmp_path: Path) -> None:
    server = make_rival(options(LMCACHE), 2)
    assert isinstance(server, Lmcache)
    assert server.port != server.http_port
    one, other = (make_rival(options(VLLM_FS, files_in=tmp_path), 2) for _ in range(2))
    assert isinstance(one, VllmFs)
    assert isinstance(other, VllmFs)
    assert one.files != other.files
    assert one.files.parent == tmp_path
    assert list(tmp_path.iterdir()) == [], "nothing is created before replicas start"


# ---------------------------------------------------------------- refusals


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose folders are the installed packages: both of them, with all features."""
    for needed in rivals._NEEDED_FILES.values():
        for package, file, _ in needed:
            path = tmp_path / package / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def folder_of(package: str) -> Path | None:
        return tmp_path / package if (tmp_path / package).exists() else None

    monkeypatch.setattr(rivals, "_folder_of", folder_of)
    return tmp_path


@pytest.mark.parametrize("name", RIVALS)
def test_where_all_is_there_nothing_is_refused(packages: Path, name: RivalName) -> None:
    check_rival(options(name, files_in=packages), "cuda")
    assert [path for path in packages.iterdir() if path.is_file()] == [], "the probe is gone"


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(
    ("name", "reason"), [(LMCACHE, "CUDA IPC"), (VLLM_FS, "does not start with its CPU engine")]
)
def test_a_cpu_is_refused_with_cache_reason_and_remedy(name: RivalName, reason: str) -> None:
    with pytest.raises(SetupError, match=rf"cache {name} needs a GPU.*{reason}.*--caches"):
        check_rival(options(name), "cpu")


def test_a_package_that_is_missing_is_refused_with_the_command_that_brings_it(
    packages: Path,
) -> None:
    (packages / "lmcache").rename(packages / "gone")
    with pytest.raises(SetupError, match=r"cache lmcache.*not installed.*pip install lmcache"):
        check_rival(options(LMCACHE), "cuda")


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        (LMCACHE, 0, "a multiprocess server, and lmcache"),
        (LMCACHE, 1, "an LMCacheMPConnector, and vllm"),
        (VLLM_FS, 0, "a TieringOffloadingSpec with a file-system tier, and vllm"),
    ],
)
def test_a_version_without_the_feature_is_refused_with_its_name(
    packages: Path, name: RivalName, number: int, words: str
) -> None:
    package, file, _ = rivals._NEEDED_FILES[name][number]
    (packages / package / file).unlink()
    with pytest.raises(SetupError, match=rf"cache {name} needs {re.escape(words)}.*upgrade"):
        check_rival(options(name), "cuda")


@pytest.mark.usefixtures("packages")
def test_a_folder_that_files_cannot_be_kept_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"vllm-fs can't keep files in .*nowhere.*--files-in"):
        check_rival(options(VLLM_FS, files_in=tmp_path / "nowhere"), "cuda")
