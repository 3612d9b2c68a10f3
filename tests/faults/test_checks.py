"""A check of a large pool takes seconds; nobody waits for it, and nothing is left of it."""

import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.model.errors import DaemonGone
from millpond.service import protocol
from millpond.service.protocol import Hello
from tests.faults.engine import Engine
from tests.faults.raw import RawClient
from tests.faults.world import Daemon, eventually


class Slow(Daemon):
    """A daemon with a pool so large that a check takes until the test ``lets_it_end``."""

    def __init__(self, socket_path: str, sign: Path) -> None:
        super().__init__(socket_path, check_waits_for=str(sign))
        self._sign = sign

    def lets_it_end(self) -> None:
        """Let this check end, and all others."""
        self._sign.touch()


@pytest.fixture
def slow(socket_path: str, tmp_path: Path) -> Iterator[Slow]:
    """A daemon with a large pool."""
    with Slow(socket_path, tmp_path / "sign") as daemon:
        yield daemon.wait_ready()
        daemon.lets_it_end()


def checker_of(daemon: Slow) -> int:
    """Wait for the child that checks; return its pid."""
    children = Path(f"/proc/{daemon.pid}/task/{daemon.pid}/children")
    eventually(lambda: children.read_text() != "", "the check has begun")
    return int(children.read_text().split()[0])


def is_alive(pid: int) -> bool:
    """Return whether a process has not ended, waited for or not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_engines_are_served_while_the_pool_is_checked(slow: Slow) -> None:
    with RawClient(slow.socket_path) as admin, Engine(slow.socket_path, "a") as engine:
        admin.greet(Hello(role="admin"))
        admin.send(protocol.Check(id=1))
        admin.send(protocol.Status(id=2))
        for number in range(3):
            engine.store(f"p-{number}", 4)
            engine.verify(f"p-{number}", 4)
        # Its own next request waits for its turn: replies come in the order of requests.
        assert select.select([admin.socket], [], [], 0) == ([], [], [])
        slow.lets_it_end()
        assert admin.reply() == protocol.Done(id=1)
        assert admin.reply().id == 2
    slow.settle()
    slow.stop()


def test_who_asks_meanwhile_is_answered_by_the_next_check(slow: Slow) -> None:
    with RawClient(slow.socket_path) as first, RawClient(slow.socket_path) as second:
        first.greet(Hello(role="admin"))
        first.send(protocol.Check(id=1))
        checker = checker_of(slow)
        second.greet(Hello(role="admin"))
        second.send(protocol.Check(id=2))
        with RawClient(slow.socket_path) as hasty:  # gone when the answer comes
            hasty.greet(Hello(role="admin"))
            hasty.send(protocol.Check(id=3))
            hasty.socket.close()
        assert checker_of(slow) == checker
        slow.lets_it_end()
        assert first.reply() == protocol.Done(id=1)
        assert second.reply() == protocol.Done(id=2)
    slow.settle()


def test_a_checker_that_is_killed_is_made_up_for(slow: Slow) -> None:
    with RawClient(slow.socket_path) as admin:
        admin.greet(Hello(role="admin"))
        admin.send(protocol.Check(id=1))
        os.kill(checker_of(slow), signal.SIGKILL)
        slow.lets_it_end()
        assert admin.reply() == protocol.Done(id=1)


def test_a_daemon_that_ends_takes_its_checker_along(slow: Slow) -> None:
    with RawClient(slow.socket_path) as admin:
        admin.greet(Hello(role="admin"))
        admin.send(protocol.Check(id=1))
        checker = checker_of(slow)
        slow.stop()
        assert not is_alive(checker)


def test_a_checker_keeps_nothing_of_a_killed_daemon(slow: Slow) -> None:
    with RawClient(slow.socket_path) as admin, Engine(slow.socket_path, "a") as engine:
        admin.greet(Hello(role="admin"))
        admin.send(protocol.Check(id=1))
        checker = checker_of(slow)
        slow.kill()
        assert is_alive(checker)
        # Neither our connections nor the lock on the socket's path.
        with pytest.raises(DaemonGone):
            engine.lookup("p", 1)
        with Daemon(slow.socket_path) as successor:
            successor.wait_ready().stop()
        slow.lets_it_end()
        eventually(lambda: not is_alive(checker), "the checker has ended")


def test_who_has_said_all_and_closed_its_half_is_answered_still(slow: Slow) -> None:
    with RawClient(slow.socket_path) as admin:
        admin.greet(Hello(role="admin"))
        admin.send(protocol.Check(id=1))
        admin.send(protocol.Status(id=2))
        admin.socket.shutdown(socket.SHUT_WR)
        checker_of(slow)
        slow.status()  # a round of the daemon's in which it could have hung up
        slow.lets_it_end()
        assert admin.reply() == protocol.Done(id=1)
        assert isinstance(admin.reply(), protocol.StatusReply)
        assert admin.reply() is None
