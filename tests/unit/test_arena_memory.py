"""How much memory there is: told from made-up proc and sys trees."""

import resource
from pathlib import Path

import pytest

from millpond.arena.memory import available_bytes, ensure_available, tightest_bound
from millpond.model.errors import ArenaTooLarge
from millpond.model.limits import ARENA_HEADER_BYTES, GIB, KIB, MIB

V1_UNLIMITED = 9223372036854771712


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB available, no cgroups and no limits."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    write(tmp_path, "proc/meminfo", f"MemTotal: {99 * GIB // KIB} kB\nMemAvailable: 67108864 kB\n")
    write(tmp_path, "proc/self/status", "Name: python\nVmSize: 1048576 kB\n")
    return tmp_path


def write(root: Path, path: str, text: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}")


def cgroup_v2(
    root: Path, folder: str, *, limit: object, usage: int, files: int = 0, high: object = "max"
) -> None:
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.high", high)
    write(root, f"{folder}/memory.current", usage)
    stat = f"anon 5\nshmem 7\nactive_file {files}\ninactive_file {files}\n"
    write(root, f"{folder}/memory.stat", stat)


def cgroup_v1(root: Path, folder: str, *, limit: int, usage: int, files: int = 0) -> None:
    write(root, f"{folder}/memory.limit_in_bytes", limit)
    write(root, f"{folder}/memory.usage_in_bytes", usage)
    own = "active_file 999999999999\ninactive_file 999999999999\n"  # not with the children's
    stat = f"{own}total_active_file {files}\ntotal_inactive_file {files}\n"
    write(root, f"{folder}/memory.stat", stat)


def mount_v2(root: Path, mounted_root: str = "/") -> None:
    line = f"30 24 0:26 {mounted_root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
    write(root, "proc/self/mountinfo", line)


def test_machine_alone(machine: Path) -> None:
    assert available_bytes(root=machine) == 64 * GIB


def test_v2_limit_less_usage_plus_file_cache(machine: Path) -> None:
    mount_v2(machine)
    write(machine, "proc/self/cgroup", "0::/app\n")
    cgroup_v2(machine, "sys/fs/cgroup/app", limit=8 * GIB, usage=3 * GIB, files=GIB)
    assert available_bytes(root=machine) == 7 * GIB
    assert "cgroup" in tightest_bound(root=machine).source


def test_v2_a_parent_can_be_the_tightest(machine: Path) -> None:
    mount_v2(machine)
    write(machine, "proc/self/cgroup", "0::/a/b/c\n")
    cgroup_v2(machine, "sys/fs/cgroup/a/b/c", limit="max", usage=GIB)
    cgroup_v2(machine, "sys/fs/cgroup/a/b", limit=32 * GIB, usage=GIB)
    cgroup_v2(machine, "sys/fs/cgroup/a", limit=4 * GIB, usage=GIB)
    bound = tightest_bound(root=machine)
    assert bound.available_bytes == 3 * GIB
    assert bound.source.endswith("/sys/fs/cgroup/a")


def test_v2_high_counts_like_a_limit(machine: Path) -> None:
    mount_v2(machine)
    write(machine, "proc/self/cgroup", "0::/app\n")
    cgroup_v2(machine, "sys/fs/cgroup/app", limit="max", high=2 * GIB, usage=GIB)
    assert available_bytes(root=machine) == GIB


def test_v2_in_a_container_whose_own_group_is_mounted(machine: Path) -> None:
    mount_v2(machine, mounted_root="/docker/abc")
    write(machine, "proc/self/cgroup", "0::/docker/abc/inner\n")
    cgroup_v2(machine, "sys/fs/cgroup/inner", limit=5 * GIB, usage=0)
    cgroup_v2(machine, "sys/fs/cgroup", limit=6 * GIB, usage=2 * GIB)
    assert available_bytes(root=machine) == 4 * GIB


def test_v2_path_outside_of_what_is_mounted(machine: Path) -> None:
    mount_v2(machine, mounted_root="/docker/abc")
    write(machine, "proc/self/cgroup", "0::/elsewhere\n")
    cgroup_v2(machine, "sys/fs/cgroup", limit=6 * GIB, usage=0)
    assert available_bytes(root=machine) == 6 * GIB


def test_v1_walked_up(machine: Path) -> None:
    mounts = (
        "40 30 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        "41 30 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    )
    write(machine, "proc/self/mountinfo", mounts)
    write(machine, "proc/self/cgroup", "5:cpu:/x\n4:memory:/x/y\n")
    cgroup_v1(machine, "sys/fs/cgroup/memory/x/y", limit=V1_UNLIMITED, usage=GIB)
    cgroup_v1(machine, "sys/fs/cgroup/memory/x", limit=3 * GIB, usage=2 * GIB, files=256 * MIB)
    cgroup_v1(machine, "sys/fs/cgroup/memory", limit=V1_UNLIMITED, usage=9 * GIB)
    assert available_bytes(root=machine) == GIB + 512 * MIB


def test_usage_over_the_limit_leaves_nothing(machine: Path) -> None:
    mount_v2(machine)
    write(machine, "proc/self/cgroup", "0::/app\n")
    cgroup_v2(machine, "sys/fs/cgroup/app", limit=GIB, usage=2 * GIB)
    assert available_bytes(root=machine) == 0


@pytest.mark.parametrize(
    ("limit", "limit_bytes", "available", "name"),
    [
        (resource.RLIMIT_AS, 3 * GIB, 2 * GIB, "ulimit -v"),
        (resource.RLIMIT_FSIZE, 2 * GIB, 2 * GIB, "ulimit -f"),
    ],
)
def test_own_limits(
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    limit_bytes: int,
    available: int,
    name: str,
) -> None:
    unlimited = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(
        resource, "getrlimit", lambda which: (limit_bytes,) * 2 if which == limit else unlimited
    )
    bound = tightest_bound(root=machine)
    assert bound.available_bytes == available
    assert name in bound.source


def test_refusal_names_both_numbers_and_the_remedy(machine: Path) -> None:
    # Each 4 KiB of slots bring the 8 bytes of a checksum with them.
    largest = (64 * GIB - ARENA_HEADER_BYTES) // (4 * KIB + 8) * 4 * KIB
    ensure_available(largest, root=machine)
    with pytest.raises(ArenaTooLarge, match="65536 MiB; choose a smaller size") as caught:
        ensure_available(largest + 4 * KIB, root=machine)
    assert caught.value.wanted_bytes == largest + 4 * KIB
    assert caught.value.available_bytes == 64 * GIB


def test_real_machine_has_some() -> None:
    assert 0 < available_bytes() < 2**50
