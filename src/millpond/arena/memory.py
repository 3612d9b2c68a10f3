"""How much memory an arena may take: the machine, every cgroup above us, our own limits."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from millpond.arena.arena import segment_bytes
from millpond.model.errors import ArenaTooLarge
from millpond.model.limits import KIB, MIB


class MemoryBound(NamedTuple):
    """What one authority still allows, and who it is."""

    source: str
    available_bytes: int


class _CgroupFiles(NamedTuple):
    """What a version of cgroups calls its limits, its usage, and its reclaimable pages."""

    limits: tuple[str, ...]
    usage: str
    reclaimable: tuple[str, ...]


_V1 = _CgroupFiles(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_V2 = _CgroupFiles(
    ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
)


def ensure_available(size_bytes: int, *, root: Path = Path("/")) -> None:
    """Raise ``ArenaTooLarge`` unless an arena of ``size_bytes`` fits; allocates nothing."""
    bound = tightest_bound(root=root)
    if segment_bytes(size_bytes) > bound.available_bytes:
        message = (
            f"an arena of {size_bytes // MIB} MiB does not fit: {bound.source} leaves "
            f"{bound.available_bytes // MIB} MiB; choose a smaller size or raise that limit"
        )
        raise ArenaTooLarge(message, wanted_bytes=size_bytes, available_bytes=bound.available_bytes)


def available_bytes(*, root: Path = Path("/")) -> int:
    """Return how many bytes this process could take now."""
    return tightest_bound(root=root).available_bytes


def tightest_bound(*, root: Path = Path("/")) -> MemoryBound:
    """Return the authority that allows least; ``root`` is where proc and sys are found."""
    bounds = [_machine(root), *_cgroups(root), *_own_limits(root)]
    return min(bounds, key=lambda bound: bound.available_bytes)


def _machine(root: Path) -> MemoryBound:
    fields = _fields(root / "proc/meminfo")
    return MemoryBound("the machine (MemAvailable)", fields["MemAvailable"] * KIB)


def _own_limits(root: Path) -> Iterator[MemoryBound]:
    space_limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space_limit != resource.RLIM_INFINITY:
        used_bytes = _fields(root / "proc/self/status")["VmSize"] * KIB
        yield MemoryBound("RLIMIT_AS (ulimit -v)", max(0, space_limit - used_bytes))
    file_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)  # holds for a memfd as well
    if file_limit != resource.RLIM_INFINITY:
        yield MemoryBound("RLIMIT_FSIZE (ulimit -f)", file_limit)


def _cgroups(root: Path) -> Iterator[MemoryBound]:
    """Yield the bound of each memory cgroup that we are in, from our own up to the root's."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            mount, files = _cgroup_mount(root, "cgroup2"), _V2
        elif "memory" in controllers.split(","):
            mount, files = _cgroup_mount(root, "cgroup"), _V1
        else:
            continue
        if mount is None:
            continue
        mounted_root, mount_point = mount
        # In a container, our path may lie outside of what is mounted: then the mount is ours.
        below = PurePosixPath(path)
        inside = below.relative_to(mounted_root) if below.is_relative_to(mounted_root) else None
        folder = root / mount_point.lstrip("/")
        for part in _upwards(inside or PurePosixPath()):
            bound = _cgroup_bound(folder / part, files)
            if bound is not None:
                yield bound


def _upwards(path: PurePosixPath) -> Iterator[PurePosixPath]:
    yield path
    yield from (parent for parent in path.parents if parent != path)


def _cgroup_mount(root: Path, kind: str) -> tuple[str, str] | None:
    """Return (root within the hierarchy, mount point) of the hierarchy that limits memory."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        file_system, _, options = rest.split(" ", 2)
        if file_system != kind or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        _, _, _, mounted_root, mount_point, *_ = fields.split(" ")
        return mounted_root, mount_point
    return None


def _cgroup_bound(folder: Path, files: _CgroupFiles) -> MemoryBound | None:
    limits = [
        int(text) for name in files.limits if (text := _read(folder / name).strip()).isdigit()
    ]
    usage = _read(folder / files.usage).strip()
    if not limits or not usage:
        return None
    statistics = _fields(folder / "memory.stat")
    reclaimable_bytes = sum(statistics.get(name, 0) for name in files.reclaimable)
    free_bytes = min(limits) - int(usage) + reclaimable_bytes
    return MemoryBound(f"cgroup {folder}", max(0, free_bytes))


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines ``name[:] number ...``."""
    fields: dict[str, int] = {}
    for line in _read(path).splitlines():
        name, *values = line.split()
        if values and values[0].isdigit():
            fields[name.rstrip(":")] = int(values[0])
    return fields


def _read(path: Path) -> str:
    """Return the text of a kernel file, empty where there is none."""
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
