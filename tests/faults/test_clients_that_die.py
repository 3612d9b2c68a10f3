"""Clients that die, leave or freeze while they hold leases: no slot is lost, none is too early."""

import os
import signal
from collections.abc import Callable

from tests.faults.world import NUM_SLOTS, ClientProcess, Daemon, eventually

Maker = Callable[[], ClientProcess]


def holding_leases(client: ClientProcess, replica: str = "a") -> tuple[int, int]:
    """Let a client hold 4 blocks being read and 3 being written; return the lease ids."""
    client.engine(replica)
    client.store("stored", 4)
    reading = client.ask("pin", prefix="stored", num_blocks=4)
    writing = client.ask("reserve", prefix="unfinished", num_blocks=3)
    assert len(writing["offsets"][0]) == 3
    return reading["lease"], writing["lease"]


def test_a_killed_client_gives_its_slots_back(daemon: Daemon, client: Maker) -> None:
    victim = client()
    holding_leases(victim)
    assert (daemon.num_slots("committed"), daemon.num_slots("reserved")) == (4, 3)
    victim.kill()
    eventually(lambda: daemon.num_slots("reserved") == 0, "reserved slots freed")
    eventually(lambda: daemon.num_slots("quarantined") == 0, "quarantined slots freed")
    assert daemon.num_slots("committed") == 4
    assert daemon.status()["service"]["orphans"] == []
    daemon.check()
    survivor = client()
    survivor.engine("b")
    assert survivor.ask("lookup", prefix="unfinished", num_blocks=3) == [0, "miss"]
    assert survivor.ask("lookup", prefix="stored", num_blocks=4) == [4, "hit"]
    # All slots can be had, those that the victim read from included.
    assert len(survivor.ask("reserve", prefix="new", num_blocks=NUM_SLOTS)["offsets"][0]) == (
        NUM_SLOTS
    )


def test_slots_of_a_living_client_wait_until_it_has_drained(daemon: Daemon, client: Maker) -> None:
    engine = client()
    holding_leases(engine)
    engine.ask("close")
    eventually(lambda: daemon.num_slots("quarantined") == 3, "slots quarantined")
    # Neither a later session of the same process nor another process frees them ...
    later = engine.engine("a", "second-start")
    other = client()
    other.engine("b", drained=(later - 1,))
    assert daemon.num_slots("quarantined") == 3
    # ... nor can they be had: only the rest is free.
    taken = other.ask("reserve", prefix="new", num_blocks=NUM_SLOTS)
    assert daemon.num_slots("quarantined") == 3
    other.ask("finish", lease=taken["lease"], ok=False)
    # The process itself says so.
    engine.ask("close")
    eventually(lambda: len(daemon.status()["service"]["clients"]) == 3, "second session ended")
    assert len(daemon.status()["service"]["orphans"]) == 1  # the second held nothing
    engine.engine("a", "third-start", drained=(later - 1, later))
    eventually(lambda: daemon.num_slots("quarantined") == 0, "slots freed")
    daemon.check()


def test_reading_slots_of_a_living_client_are_not_handed_out(daemon: Daemon, client: Maker) -> None:
    engine = client()
    engine.engine("a")
    engine.store("stored", 4)
    pinned = engine.ask("pin", prefix="stored", num_blocks=4)
    read_from = set(pinned["offsets"][0][1::2])
    engine.ask("close")
    eventually(lambda: daemon.status()["service"]["orphans"] != [], "session ended")
    other = client()
    other.engine("b")
    taken = other.ask("reserve", prefix="new", num_blocks=NUM_SLOTS - 4)
    assert len(set(taken["offsets"][0])) == NUM_SLOTS - 4
    assert not read_from & set(taken["offsets"][0])
    assert other.ask("reserve", prefix="more", num_blocks=1)["reason"] == "full"
    other.ask("finish", lease=taken["lease"])
    engine.kill()
    eventually(lambda: daemon.status()["service"]["orphans"] == [], "reader is dead")
    assert len(other.ask("reserve", prefix="more", num_blocks=4)["offsets"][0]) == 4
    daemon.check()


def test_a_frozen_client_holds_up_nobody(daemon: Daemon, client: Maker) -> None:
    frozen, lively = client(), client()
    _, writing = holding_leases(frozen)
    lively.engine("b")
    frozen.signal(signal.SIGSTOP)
    for i in range(20):
        lively.store(f"lively-{i}", 5)
    assert daemon.num_slots("reserved") == 3
    assert len(daemon.status()["service"]["clients"]) == 5
    assert lively.ask("lookup", prefix="unfinished", num_blocks=3) == [0, "pending"]
    frozen.signal(signal.SIGCONT)
    frozen.ask("finish", lease=writing)
    eventually(
        lambda: lively.ask("lookup", prefix="unfinished", num_blocks=3) == [3, "hit"],
        "the thawed client's blocks are found",
    )
    daemon.check()


def test_a_frozen_client_can_be_killed(daemon: Daemon, client: Maker) -> None:
    frozen = client()
    holding_leases(frozen)
    frozen.signal(signal.SIGSTOP)
    frozen.kill()
    eventually(lambda: daemon.num_slots("reserved") == 0, "reserved slots freed")
    eventually(lambda: daemon.num_slots("quarantined") == 0, "quarantined slots freed")
    daemon.check()


def test_scheduler_dies_but_its_worker_may_still_copy(daemon: Daemon, client: Maker) -> None:
    scheduler, worker = client(), client()
    scheduler.ask("open", replica="a", session_key="k")
    session = worker.ask("join", replica="a", session_key="k")
    assert scheduler.ask("reserve", prefix="unfinished", num_blocks=3)["lease"] is not None
    scheduler.kill()
    eventually(lambda: daemon.num_slots("quarantined") == 3, "slots quarantined")
    assert worker.attempt("finish", lease=1)["error"] == "DaemonGone"
    successor = client()
    successor.ask("open", replica="a", session_key="k2")
    worker.ask("join", replica="a", session_key="k2", drained=(session,))
    eventually(lambda: daemon.num_slots("quarantined") == 0, "slots freed")
    daemon.check()


def test_one_rank_dies_and_the_other_may_still_copy(daemon: Daemon, client: Maker) -> None:
    first, second = client(), client()
    both = {"replica": "a", "session_key": "k", "num_ranks": 2}
    first.ask("open", **both)
    first.ask("join", **both, rank=0)
    assert first.ask("reserve", prefix="p", num_blocks=3)["reason"] == "not-ready"
    second.ask("join", **both, rank=1)
    lease = first.ask("reserve", prefix="p", num_blocks=3)["lease"]
    first.ask("finish", lease=lease)
    # What was sent before is answered before: the finish has been read.
    assert first.ask("lookup", prefix="p", num_blocks=3) == [0, "pending"]
    second.kill()
    # Rank 0 had finished and rank 1 is dead: nobody can be copying.
    eventually(lambda: daemon.num_slots("reserved") == 0, "reserved slots freed")
    eventually(lambda: daemon.num_slots("quarantined") == 0, "quarantined slots freed")
    assert daemon.status()["service"]["orphans"] == []
    assert first.attempt("lookup", prefix="p", num_blocks=3)["error"] == "DaemonGone"
    daemon.check()


def test_a_dead_process_is_noticed_although_its_socket_lives_on(
    daemon: Daemon, client: Maker
) -> None:
    parent = client()
    holding_leases(parent)
    child = parent.ask("fork")  # holds copies of the sockets
    parent.kill()
    os.kill(child, 0)
    eventually(lambda: daemon.num_slots("reserved") == 0, "reserved slots freed")
    eventually(lambda: daemon.num_slots("quarantined") == 0, "quarantined slots freed")
    os.kill(child, signal.SIGKILL)
    daemon.check()


def test_a_forked_child_does_not_map_the_arena(daemon: Daemon, client: Maker) -> None:
    parent = client()
    parent.engine("a")
    assert parent.ask("child_maps_arena") is False


def test_an_idle_client_is_left_alone(daemon: Daemon, client: Maker) -> None:
    idle = client()
    _, writing = holding_leases(idle)
    started = daemon.status()["service"]["uptime_s"]
    # At least one of the daemon's ticks, in which it expires leases and late handshakes.
    eventually(lambda: daemon.status()["service"]["uptime_s"] > started + 1.5, "ticks passed")
    idle.ask("finish", lease=writing)
    assert idle.ask("lookup", prefix="stored", num_blocks=4) == [4, "hit"]


def test_a_restarted_replica_waits_for_its_predecessor(daemon: Daemon, client: Maker) -> None:
    old, new = client(), client()
    old.engine("a", "first-start")
    refused = new.attempt("open", replica="a", session_key="second-start")
    assert (refused["error"], refused["code"]) == ("HandshakeRefused", "taken")
    assert str(old.pid) in refused["message"]
    old.kill()
    eventually(
        lambda: "ok" in new.attempt("open", replica="a", session_key="second-start"),
        "the name is free",
    )


def test_a_client_that_never_drains_is_not_let_in_for_ever(socket_path: str, client: Maker) -> None:
    with Daemon(socket_path, orphans_max=3) as daemon:
        daemon.wait_ready()
        forgetful = client()
        ended: list[int] = []
        for number in range(3):
            ended.append(forgetful.engine("a", f"start-{number}"))
            assert forgetful.ask("reserve", prefix=f"p-{number}", num_blocks=1)["lease"]
            forgetful.ask("close")
            eventually(lambda: daemon.footprint()["orphans"] == len(ended), "session ended")
        refused = forgetful.attempt("open", replica="a", session_key="start-3")
        assert (refused["error"], refused["code"]) == ("HandshakeRefused", "full")
        # It is believed although there is no session that it could join.
        late = forgetful.attempt("join", replica="a", session_key="start-3", drained=ended)
        assert late["code"] == "no-session"
        forgetful.engine("a", "start-3")
        forgetful.kill()
        daemon.settle()
