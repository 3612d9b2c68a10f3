"""A daemon in a process of its own: ``python -m tests.faults.daemon_main OPTIONS-AS-JSON``.

Prints one line of JSON for each event. Exit codes: 0 orderly stop, 3 set-up error, 70 broken
invariant, as the tests expect them.
"""

import errno
import json
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millpond.arena import touch
from millpond.arena.arena import Arena
from millpond.model.errors import InvariantBroken, SetupError
from millpond.model.limits import REGISTERED_BYTES
from millpond.pool import pool
from millpond.pool.pool import Pool
from millpond.service import loop, sessions
from millpond.service.reaper import Orphans, Process
from millpond.service.server import ServeOptions, Serving, serve
from tests.faults.world import eventually

SETUP_EXIT, BROKEN_EXIT = 3, 70


def say(event: str, **fields: object) -> None:
    """Tell the test what happened."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def broken(_: object) -> None:
    """Find an invariant broken at each check."""

    def check_invariants(self: Pool) -> None:
        raise InvariantBroken("planted")

    Pool.check_invariants = check_invariants  # type: ignore[method-assign]


def check_waits_for(path: str) -> None:
    """Check as slowly as in a very large pool: until a file is there."""
    check_at_once = Pool.check_invariants

    def check_invariants(self: Pool) -> None:
        eventually(Path(path).exists, "the test lets the check end")
        check_at_once(self)

    Pool.check_invariants = check_invariants  # type: ignore[method-assign]


def failing_lookup(_: object) -> None:
    """Fail in an unforeseen way."""

    def lookup(self: Pool, *args: object) -> None:
        raise ZeroDivisionError("planted")

    Pool.lookup = lookup  # type: ignore[method-assign,assignment]


def early_reuse(is_wanted: bool) -> None:
    """Free slots when a session ends, although its process may still copy."""

    def add(self: Orphans, session: int, rank: int, process: Process) -> None:
        self._on_drained(session, rank)

    if is_wanted:
        Orphans.add = add  # type: ignore[method-assign]


def write_lease_s(seconds: float) -> None:
    """Expire write leases sooner."""
    pool._WRITE_LEASE_NS_MAX = int(seconds * 1e9)


def orphans_max(num_orphans: int) -> None:
    """Refuse sessions sooner."""
    sessions._ORPHANS_MAX = num_orphans  # type: ignore[misc]


def handshake_s(seconds: float) -> None:
    """Lose patience sooner."""
    loop.HANDSHAKE_S_MAX = seconds  # type: ignore[misc]


def _before_populating(check: Callable[[int], None]) -> None:
    """Call ``check(start)`` before memory of slots is taken."""
    populate = touch._populate

    def checked(arena: Arena, fd: int, start: int, num_bytes: int) -> None:
        if start < arena.size_bytes:
            check(start)
        populate(arena, fd, start, num_bytes)

    touch._populate = checked


def memory_waits_for(held: tuple[int, str]) -> None:
    """Give no memory from an offset on until a file is there."""
    first, path = held

    def check(start: int) -> None:
        if start >= first:
            eventually(Path(path).exists, "the test lets the memory come")

    _before_populating(check)


def memory_ends_at(end: int) -> None:
    """Have no memory from an offset on."""

    def check(start: int) -> None:
        if start >= end:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    _before_populating(check)


def memory_is_slow(seconds: float) -> None:
    """Take so long for each piece, and take none."""

    def populate(arena: Arena, _fd: int, start: int, _num_bytes: int) -> None:
        if start < arena.size_bytes:
            threading.Event().wait(seconds)

    touch._populate = populate


FAULTS: dict[str, Callable[[Any], None]] = {
    fault.__name__: fault
    for fault in (
        broken,
        check_waits_for,
        failing_lookup,
        early_reuse,
        write_lease_s,
        orphans_max,
        handshake_s,
        memory_waits_for,
        memory_ends_at,
        memory_is_slow,
    )
}
"""What a test may plant, by the name of the option: things that a sound daemon does not do."""


def main() -> int:
    """Serve as the first argument says."""
    options = json.loads(sys.argv[1])
    for name in FAULTS.keys() & options.keys():
        FAULTS[name](options[name])
    logging.basicConfig(level=options.get("log_level", "INFO"), stream=sys.stderr)

    def on_ready(serving: Serving) -> None:
        say("ready", epoch=serving.epoch, pid=serving.pid)

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        if options.get("slow_touch"):
            say("progress", done_bytes=done_bytes, total_bytes=total_bytes)
            threading.Event().wait(0.1)

    try:
        serve(
            ServeOptions(
                socket_path=options["socket_path"],
                size_bytes=options["size_bytes"],
                step_bytes=options.get("step_bytes", REGISTERED_BYTES),
                on_progress=on_progress,
            ),
            on_ready=on_ready,
        )
    except SetupError as error:
        say(type(error).__name__, message=str(error))
        return SETUP_EXIT
    except InvariantBroken as error:
        say("broken", message=str(error))
        return BROKEN_EXIT
    return 0


if __name__ == "__main__":
    sys.exit(main())
