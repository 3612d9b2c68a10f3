"""The daemon starts where it may, ends cleanly, and can be killed without a trace."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from millpond.model.errors import DaemonGone, InvariantBroken, RequestTimedOut
from millpond.model.limits import MIB, REQUEST_TIMEOUT_S
from millpond.service.client import AdminClient, SchedulerClient
from tests.faults.daemon_main import BROKEN_EXIT, SETUP_EXIT
from tests.faults.world import (
    KEY_BYTES,
    ClientProcess,
    Daemon,
    arena_holders,
    eventually,
    identity,
    keys,
)

Maker = Callable[[], ClientProcess]


def test_killed_daemon_leaves_nothing_and_is_replaced(socket_path: str, client: Maker) -> None:
    with Daemon(socket_path) as first:
        first.wait_ready()
        inode = first.arena_inode()
        assert "/dev/shm" not in Path(f"/proc/{first.pid}/maps").read_text()
        engine = client()
        session = engine.engine("a", "k")
        engine.store("prefix", 4)
        pinned = engine.ask("pin", prefix="prefix", num_blocks=4)
        engine.ask("write", offset=pinned["offsets"][0][1], text="kept")
        first.kill()
    assert arena_holders(inode) == {engine.pid}
    assert Path(socket_path).exists()
    assert engine.attempt("lookup", prefix="prefix", num_blocks=4)["error"] == "DaemonGone"
    assert engine.attempt("finish", lease=pinned["lease"])["error"] == "DaemonGone"
    # The mapping is the engine's own: a copy in flight does not crash.
    assert engine.ask("read", offset=pinned["offsets"][0][1], num_bytes=4) == "kept"
    with Daemon(socket_path) as second:
        second.wait_ready()
        assert engine.engine("a", "k", drained=(session,)) != session
        assert engine.ask("lookup", prefix="prefix", num_blocks=4) == [0, "miss"]
        engine.store("prefix", 4)
        assert engine.ask("read", offset=pinned["offsets"][0][1], num_bytes=4) == "\0" * 4
        second.check()
        assert arena_holders(inode) == set()  # the engine has given it up for the new one


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_orderly_stop(socket_path: str, client: Maker, number: signal.Signals) -> None:
    with Daemon(socket_path) as daemon:
        daemon.wait_ready()
        engine = client()
        engine.engine("a")
        daemon.signal(number)
        assert daemon.exit_code() == 0
    assert list(Path(socket_path).parent.iterdir()) == []
    assert engine.attempt("lookup", prefix="p", num_blocks=1)["error"] == "DaemonGone"


def test_stop_while_memory_is_being_touched(socket_path: str) -> None:
    with Daemon(socket_path, size_bytes=512 * MIB, slow_touch=True) as daemon:
        line = daemon.line()
        assert line["event"] == "progress"
        assert line["done_bytes"] < line["total_bytes"] == 512 * MIB
        assert not Path(socket_path).exists()
        stopped = time.monotonic()
        daemon.signal(signal.SIGINT)
        assert daemon.exit_code() == 0
        assert time.monotonic() - stopped < 2.0
    assert list(Path(socket_path).parent.iterdir()) == []


def test_second_daemon_is_refused(daemon: Daemon, client: Maker) -> None:
    with Daemon(daemon.socket_path) as second:
        line = second.line()
        assert second.exit_code() == SETUP_EXIT
    assert line["event"] == "SocketUnusable"
    assert f"process {daemon.pid} " in line["message"]
    client().engine("a")  # the first one serves on


def test_of_daemons_that_start_at_once_one_wins(socket_path: str) -> None:
    daemons = [Daemon(socket_path) for _ in range(4)]
    try:
        events = sorted(daemon.line()["event"] for daemon in daemons)
        assert events == ["SocketUnusable"] * 3 + ["ready"]
        AdminClient.connect(socket_path).close()
    finally:
        for daemon in daemons:
            daemon.__exit__()


def test_too_large_is_refused_before_anything_is_allocated(socket_path: str) -> None:
    with Daemon(socket_path, size_bytes=2**50) as daemon:
        line = daemon.line()
        assert daemon.exit_code() == SETUP_EXIT
    assert line["event"] == "ArenaTooLarge"
    assert f"arena of {2**50 // MIB} MiB" in line["message"]
    assert "leaves" in line["message"]
    assert list(Path(socket_path).parent.iterdir()) == []


def test_too_small_is_refused(socket_path: str) -> None:
    with Daemon(socket_path, size_bytes=MIB) as daemon:
        line = daemon.line()
        assert daemon.exit_code() == SETUP_EXIT
    assert line["event"] == "ConfigError"


def too_long(path: str) -> str:
    return path + "x" * 100


def in_a_folder_nobody_may_write_to(path: str) -> str:
    return "/proc/millpond/pool.sock"  # not even root may


def a_file(path: str) -> str:
    Path(path).write_text("precious")
    return path


def a_folder(path: str) -> str:
    Path(path).mkdir()
    return path


def below_a_file(path: str) -> str:
    Path(path).write_text("precious")
    return f"{path}/pool.sock"


def a_dangling_link(path: str) -> str:
    Path(path).symlink_to("nowhere")
    return path


UNUSABLE = {
    too_long: "at most 107",
    in_a_folder_nobody_may_write_to: "choose another path",
    a_file: "not a socket",
    a_folder: "not a socket",
    below_a_file: "choose another path",
    a_dangling_link: "not a socket",
}


@pytest.mark.parametrize("make", UNUSABLE, ids=lambda make: make.__name__)
def test_unusable_path_is_refused_and_left_as_it_is(
    socket_path: str, make: Callable[[str], str]
) -> None:
    path = make(socket_path)
    before = set(Path(socket_path).parent.iterdir())
    with Daemon(path) as daemon:
        line = daemon.line()
        assert daemon.exit_code() == SETUP_EXIT
    assert line["event"] == "SocketUnusable"
    assert UNUSABLE[make] in line["message"]
    assert set(Path(socket_path).parent.iterdir()) == before
    if make in {a_file, below_a_file}:
        assert Path(socket_path).read_text() == "precious"


def test_path_served_by_something_else_is_refused(socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(socket_path)
        other.listen()
        with Daemon(socket_path) as daemon:
            line = daemon.line()
            assert daemon.exit_code() == SETUP_EXIT
        assert f"served by process {os.getpid()} already" in line["message"]
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(socket_path)  # it still can be reached


def test_stale_socket_and_lock_are_replaced(socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(socket_path)
    Path(f"{socket_path}.lock").write_text("4711\n")
    with Daemon(socket_path) as daemon:
        daemon.wait_ready().check()
        daemon.stop()


def test_frozen_daemon_times_out(daemon: Daemon) -> None:
    engine = SchedulerClient.connect(daemon.socket_path, identity("a", "k"))
    daemon.signal(signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(RequestTimedOut):
        engine.lookup(keys("p", 4), KEY_BYTES)
    assert REQUEST_TIMEOUT_S * 0.9 < time.monotonic() - started < REQUEST_TIMEOUT_S + 1.0
    # The reply would come late: this connection is of no use any more.
    with pytest.raises(DaemonGone):
        engine.lookup(keys("p", 4), KEY_BYTES)
    assert engine.poll_closed()
    with pytest.raises(RequestTimedOut):
        AdminClient.connect(daemon.socket_path, timeout_s=0.2)
    daemon.signal(signal.SIGCONT)

    def reconnects() -> bool:
        try:
            SchedulerClient.connect(daemon.socket_path, identity("a", "k")).close()
        except DaemonGone:
            return False
        return True

    eventually(reconnects, "the thawed daemon serves")


def test_no_daemon(socket_path: str) -> None:
    with pytest.raises(DaemonGone, match="no daemon"):
        AdminClient.connect(socket_path)


def test_something_else_at_the_socket(socket_path: str) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(socket_path)
        other.listen()
        with pytest.raises(RequestTimedOut):
            AdminClient.connect(socket_path, timeout_s=0.1)


def test_broken_invariant_ends_the_daemon(socket_path: str, client: Maker) -> None:
    with Daemon(socket_path, broken=True) as daemon:
        daemon.wait_ready()
        engine = client()
        engine.engine("a")
        with daemon.admin() as admin, pytest.raises(InvariantBroken, match="planted"):
            admin.check()
        assert daemon.line() == {"event": "broken", "message": "planted"}
        assert daemon.exit_code() == BROKEN_EXIT
    assert engine.attempt("lookup", prefix="p", num_blocks=1)["error"] == "DaemonGone"
    assert list(Path(socket_path).parent.iterdir()) == []


def test_an_error_in_one_connection_ends_only_that(socket_path: str, client: Maker) -> None:
    with Daemon(socket_path, failing_lookup=True) as daemon:
        daemon.wait_ready()
        first, second = client(), client()
        first.engine("a")
        second.engine("b")
        assert first.attempt("lookup", prefix="p", num_blocks=1)["error"] == "DaemonGone"
        assert second.ask("reserve", prefix="p", num_blocks=1)["lease"] is not None
        assert "ZeroDivisionError: planted" in daemon.errors()


def test_an_error_that_breaks_the_pool_ends_the_daemon(socket_path: str, client: Maker) -> None:
    with Daemon(socket_path, failing_lookup=True, broken=True) as daemon:
        daemon.wait_ready()
        engine = client()
        engine.engine("a")
        assert engine.attempt("lookup", prefix="p", num_blocks=1)["error"] == "DaemonGone"
        assert daemon.exit_code() == BROKEN_EXIT


def test_mapping_is_kept_over_a_reconnect_to_the_same_daemon(daemon: Daemon, client: Maker) -> None:
    engine = client()
    first = engine.engine("a", "k1")
    engine.ask("write", offset=0, text="mine")
    engine.ask("close")
    eventually(lambda: daemon.status()["service"]["clients"][1:] == [], "session ended")
    engine.engine("a", "k2", drained=(first,))
    assert engine.ask("read", offset=0, num_bytes=4) == "mine"
    maps = Path(f"/proc/{engine.pid}/maps").read_text()
    assert maps.count("memfd:millpond-arena") == 1


def test_status_names_clients_and_totals(daemon: Daemon, client: Maker) -> None:
    engine = client()
    session = engine.engine("a", "k")
    status = daemon.status()
    found = {
        (entry["role"], entry["replica"], entry["rank"], entry["pid"], entry["session"])
        for entry in status["service"]["clients"]
    }
    assert found == {
        ("scheduler", "a", None, engine.pid, session),
        ("worker", "a", 0, engine.pid, session),
        ("admin", None, None, os.getpid(), None),
    }
    assert status["service"]["pid"] == daemon.pid
    assert status["pool"]["enabled"] is True
