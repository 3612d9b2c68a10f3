"""A daemon in a process of its own: ``python -m tests.faults.daemon_main OPTIONS-AS-JSON``.

Prints one line of JSON for each event. Exit codes: 0 orderly stop, 3 set-up error, 70 broken
invariant, as the tests expect them.
"""

import json
import logging
import sys
import threading

from millpond.model.errors import InvariantBroken, SetupError
from millpond.pool import pool
from millpond.pool.pool import Pool
from millpond.service import loop, sessions
from millpond.service.reaper import Orphans, Process
from millpond.service.server import ServeOptions, Serving, serve

SETUP_EXIT, BROKEN_EXIT = 3, 70


def say(event: str, **fields: object) -> None:
    """Tell the test what happened."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def plant_faults(options: dict[str, object]) -> None:
    """Make come true what a test needs and a sound daemon does not do."""
    if options.get("broken"):

        def check_invariants(self: Pool) -> None:
            raise InvariantBroken("planted")

        Pool.check_invariants = check_invariants  # type: ignore[method-assign]
    if options.get("failing_lookup"):

        def lookup(self: Pool, *args: object) -> None:
            raise ZeroDivisionError("planted")

        Pool.lookup = lookup  # type: ignore[method-assign,assignment]
    if options.get("early_reuse"):

        def add(self: Orphans, session: int, rank: int, process: Process) -> None:
            self._on_drained(session, rank)

        Orphans.add = add  # type: ignore[method-assign]
    if "write_lease_s" in options:
        pool._WRITE_LEASE_NS_MAX = int(options["write_lease_s"] * 1e9)  # type: ignore[call-overload]
    if "orphans_max" in options:
        sessions._ORPHANS_MAX = options["orphans_max"]  # type: ignore[misc]
    if "handshake_s" in options:
        loop.HANDSHAKE_S_MAX = options["handshake_s"]  # type: ignore[misc]


def main() -> int:
    """Serve as the first argument says."""
    options = json.loads(sys.argv[1])
    plant_faults(options)
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
