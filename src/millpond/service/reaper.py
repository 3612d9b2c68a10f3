"""Who died? Processes behind connections, told by their pidfds.

The end of a socket says that a connection is over. Only the end of a process says that its
copies are: a pidfd becomes readable after the kernel has taken the process apart, mappings
and device contexts included.
"""

import os
import select
from collections.abc import Callable, Iterator
from pathlib import Path


class Process:
    """A process that maps the arena, held by a pidfd that this object owns."""

    def __init__(self, pidfd: int, *, pid: int) -> None:
        """Take over ``pidfd``; ``ValueError`` (and it stays the caller's) if not of ``pid``."""
        self.pidfd = pidfd
        self.pid = pid
        """As this process sees it; 0 from another pid namespace."""
        self.closed = False
        found = _pid_of(pidfd)
        if found != pid:
            raise ValueError(f"descriptor is of process {found}, not of the sender {pid}")
        self.identity = _identity(pidfd, pid)
        """What only this process has as long as it lives, or None if that can't be told."""

    def is_dead(self) -> bool:
        """Return whether the process has ended and so can't copy any more."""
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def is_same(self, other: "Process") -> bool:
        """Return whether both are surely the same process; the older must still live."""
        return self.identity is not None and self.identity == other.identity and not self.is_dead()

    def close(self) -> None:
        """Forget the process. Idempotent."""
        if not self.closed:
            self.closed = True
            os.close(self.pidfd)


class Orphans:
    """Live processes of sessions that have ended, which may still be copying.

    An entry goes when its process dies or says that it has drained; ``on_drained(session,
    rank)`` is told of both.
    """

    def __init__(self, on_drained: Callable[[int, int], None]) -> None:
        self._on_drained = on_drained
        self._ranks: dict[Process, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, process: Process) -> bool:
        return process in self._ranks

    def __iter__(self) -> Iterator[tuple[int, int, Process]]:
        """Yield (session, rank, process) of each."""
        for process, (session, rank) in self._ranks.items():
            yield session, rank, process

    def add(self, session: int, rank: int, process: Process) -> None:
        """Wait for ``process``, or say at once that it has drained if it is dead already."""
        if process.is_dead():
            self._on_drained(session, rank)
            return
        self._ranks[process] = (session, rank)

    def died(self, process: Process) -> None:
        """Note that ``process`` has ended; one that is not here is ignored."""
        place = self._ranks.pop(process, None)
        if place is not None:
            self._on_drained(*place)

    def drained(self, session: int, rank: int, claimant: Process) -> Process | None:
        """Believe that a rank has drained if the very process says so; return its old entry."""
        for process, place in self._ranks.items():
            if place == (session, rank) and process.is_same(claimant):
                self.died(process)
                return process
        return None


def open_own_pidfd() -> int:
    """Return a new descriptor of this process, to be passed to the daemon."""
    return os.pidfd_open(os.getpid())


def _pid_of(fd: int) -> int:
    """Return the process that a pidfd is of; ``ValueError`` for another kind of descriptor."""
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    raise ValueError("descriptor is not a pidfd")


def _identity(pidfd: int, pid: int) -> tuple[int, int] | None:
    """Return what only this process has as long as it lives, or None if that can't be told."""
    if pid:
        return 0, pid
    # From Linux 6.9 on pidfds have a file system of their own and an inode a process; before,
    # they share one with all other anonymous files, an eventfd for example.
    status = os.fstat(pidfd)
    anonymous_fd = os.eventfd(0)
    try:
        anonymous = os.fstat(anonymous_fd)
    finally:
        os.close(anonymous_fd)
    return None if status.st_dev == anonymous.st_dev else (status.st_dev, status.st_ino)
