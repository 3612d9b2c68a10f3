"""Processes by their pidfds: what is not the sender's own is not believed."""

import os

import pytest

from millpond.service import reaper
from millpond.service.reaper import Orphans, Process, open_own_pidfd


def me() -> Process:
    return Process(open_own_pidfd(), pid=os.getpid())


def test_a_live_process_is_not_dead() -> None:
    process = me()
    assert not process.is_dead()
    process.close()
    process.close()
    assert process.closed


def test_a_pidfd_of_another_process_is_refused() -> None:
    fd = os.pidfd_open(os.getppid())
    with pytest.raises(ValueError, match=str(os.getppid())):
        Process(fd, pid=os.getpid())
    os.close(fd)


def test_a_descriptor_of_another_kind_is_refused() -> None:
    fd = os.memfd_create("x")
    with pytest.raises(ValueError, match="not a pidfd"):
        Process(fd, pid=os.getpid())
    os.close(fd)


def test_two_pidfds_of_one_process_are_the_same() -> None:
    first, second = me(), me()
    assert first.is_same(second)
    first.close()
    second.close()


def test_processes_of_an_invisible_namespace_are_told_apart_where_the_kernel_can() -> None:
    fds = [open_own_pidfd(), open_own_pidfd(), os.pidfd_open(os.getppid())]
    first, second, parent = (reaper._identity(fd, 0) for fd in fds)
    for fd in fds:
        os.close(fd)
    if first is None:  # before Linux 6.9 nothing tells them apart, and nothing is claimed
        assert second is parent is None
    else:
        assert first == second != parent


def test_processes_that_cannot_be_told_apart_are_not_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reaper, "_pid_of", lambda _: 0)
    monkeypatch.setattr(reaper, "_identity", lambda *_: None)
    first, second = Process(open_own_pidfd(), pid=0), Process(open_own_pidfd(), pid=0)
    assert not first.is_same(second)
    first.close()
    second.close()


def test_an_orphan_is_drained_by_its_own_process_only() -> None:
    drained: list[tuple[int, int]] = []
    orphans = Orphans(lambda session, rank: drained.append((session, rank)))
    old, new = me(), me()
    parent = Process(os.pidfd_open(os.getppid()), pid=os.getppid())
    orphans.add(7, 1, old)
    assert orphans.drained(7, 1, parent) is None
    assert orphans.drained(7, 0, new) is None
    assert orphans.drained(6, 1, new) is None
    assert drained == []
    assert orphans.drained(7, 1, new) is old
    assert drained == [(7, 1)]
    assert len(orphans) == 0
    for process in (old, new, parent):
        process.close()


def test_an_orphan_that_dies_is_drained_once() -> None:
    drained: list[tuple[int, int]] = []
    orphans = Orphans(lambda session, rank: drained.append((session, rank)))
    process = me()
    orphans.add(3, 0, process)
    orphans.died(process)
    orphans.died(process)
    assert drained == [(3, 0)]
    process.close()
