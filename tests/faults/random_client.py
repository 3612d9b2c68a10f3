"""An engine that does random work, and verifies every byte that it reads.

    python -m tests.faults.random_client OPTIONS-AS-JSON

It holds several leases at once, copies in small steps, hangs up in the middle and goes on
copying, comes back and says what it has drained. It prints when it has ``begun``. A line on its
input tells it to finish all work; it then prints what it did and ends. A byte that is not what
belongs to its key is printed as a ``violation`` and ends it at once.
"""

import json
import random
import select
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from millpond.arena.arena import Arena
from millpond.model.errors import ExpectedError
from tests.faults.engine import KINDS, Engine, Kind, Piece, pieces_to_read, pieces_to_write

NUM_PREFIXES = 20
LENGTH_MAX = 10
JOBS_MAX = 4
RETRY_S = 0.05


@dataclass
class Job:
    """One lease on its way: what is still to be copied, under which session, in which memory."""

    verb: str
    prefix: str
    lease_id: int
    session: int
    arena: Arena
    pieces: Iterator[Piece]
    ok: bool = True


class RandomClient:
    """All that one process does follows from ``seed``, but for who is faster."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._path: str = options["socket_path"]
        self._replica: str = options["replica"]
        self._kind: Kind = KINDS[options["kind"]]
        self._rng = random.Random(options["seed"])
        self._engine: Engine | None = None
        self._arena: Arena | None = None
        self._ended: list[int] = []
        """Sessions that ended, until the daemon has welcomed us with what we say of them."""
        self._jobs: list[Job] = []
        self._pause = threading.Event()
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """Work until told to finish, then finish everything."""
        while not select.select([sys.stdin], [], [], 0)[0]:
            self._step()
        while self._jobs:
            self._try(self._step_a_job)
        # Once more, to say that everything has drained.
        self._disconnect()
        while not self._connect():
            pass
        self._disconnect()

    def _step(self) -> None:
        if self._engine is None and not self._rng.randrange(4):
            self._connect()
        elif self._engine is not None and self._engine.scheduler.poll_closed():
            self._disconnect()
        choices = [self._step_a_job] * 12 + [self._wait]
        if self._engine is not None:
            choices += [self._look_up, self._hang_up]
            if len(self._jobs) < JOBS_MAX:
                choices += [self._begin_store] * 3 + [self._begin_load] * 5
        self._try(self._rng.choice(choices))

    def _try(self, step: Callable[[], None]) -> None:
        try:
            step()
        except ExpectedError as error:
            self.counts[type(error).__name__] += 1
            self._disconnect()

    # ------------------------------------------------------------ sessions

    def _connect(self) -> bool:
        busy = {job.session for job in self._jobs}
        drained = [session for session in self._ended if session not in busy]
        self.counts["connects"] += 1
        try:
            self._engine = Engine(
                self._path,
                self._replica,
                self._kind,
                session_key=f"{self._replica}-{self._rng.getrandbits(64):x}",
                drained=drained,
                arena=self._arena,
            )
        except ExpectedError as error:
            self.counts[type(error).__name__] += 1
            self._pause.wait(RETRY_S)
            return False
        self._arena = self._engine.mapping
        self._ended = [session for session in self._ended if session in busy]
        self.counts["sessions"] += 1
        return True

    def _disconnect(self) -> None:
        if self._engine is not None:
            self._ended.append(self._engine.scheduler.session)
            self._engine.disconnect()
            self._engine = None

    def _hang_up(self) -> None:
        """Lose one connection, in the middle of whatever is going on."""
        if self._engine is not None and not self._rng.randrange(10):
            self._rng.choice([self._engine.scheduler, *self._engine.workers]).close()
            self.counts["hang-ups"] += 1

    # ------------------------------------------------------------ work

    def _wait(self) -> None:
        self._pause.wait(self._rng.uniform(0, 0.004))

    def _wish(self) -> tuple[str, int]:
        return f"p-{self._rng.randrange(NUM_PREFIXES)}", self._rng.randint(1, LENGTH_MAX)

    def _look_up(self) -> None:
        assert self._engine is not None
        found = self._engine.lookup(*self._wish())
        self.counts[f"lookup {found.outcome}"] += 1

    def _begin_store(self) -> None:
        assert self._engine is not None
        prefix, num_blocks = self._wish()
        lease = self._engine.reserve(prefix, num_blocks)
        self.counts[f"reserve {lease.reason or 'granted'}"] += 1
        if lease.lease_id is not None:
            pieces = pieces_to_write(self._kind, lease, prefix)
            self._begin("store", prefix, lease.lease_id, pieces)
            if self.counts["reserve granted"] == 3:
                say(begun=True)

    def _begin_load(self) -> None:
        assert self._engine is not None
        prefix, num_blocks = self._wish()
        lease = self._engine.pin(prefix, num_blocks)
        self.counts[f"pin {lease.reason or 'granted'}"] += 1
        if lease.lease_id is not None:
            self._begin("load", prefix, lease.lease_id, pieces_to_read(self._kind, lease, prefix))

    def _begin(self, verb: str, prefix: str, lease_id: int, pieces: Iterator[Piece]) -> None:
        assert self._engine is not None
        self._jobs.append(
            Job(
                verb=verb,
                prefix=prefix,
                lease_id=lease_id,
                session=self._engine.scheduler.session,
                arena=self._engine.mapping,
                pieces=pieces,
                ok=self._rng.random() < 0.85,
            )
        )

    def _step_a_job(self) -> None:
        """Copy a little, whether or not the session still lives: copies don't know."""
        if not self._jobs:
            return
        job = self._rng.choice(self._jobs)
        num_wanted = self._rng.randint(1, 6)
        num_done = 0
        for piece in islice(job.pieces, num_wanted):
            self._copy(job, piece)
            num_done += 1
        gives_up = job.verb == "store" and not job.ok and not self._rng.randrange(4)
        if num_done < num_wanted or gives_up:
            self._jobs.remove(job)
            self._finish(job)

    def _copy(self, job: Job, piece: Piece) -> None:
        view = job.arena.view(piece.offset_bytes, len(piece.content))
        if job.verb == "store":
            view[:] = piece.content
        elif bytes(view) != piece.content:
            say(violation=f"{job.prefix} at {piece.offset_bytes} in session {job.session}")
            raise SystemExit(1)
        self.counts[f"bytes of {job.verb}s"] += len(piece.content)

    def _finish(self, job: Job) -> None:
        """Say that a lease's copies are over, if there is still somebody to say it to."""
        engine = self._engine
        self.counts[f"{job.verb}s"] += 1
        if engine is None or engine.scheduler.session != job.session:
            self.counts[f"late {job.verb}s"] += 1
            return
        for worker in self._rng.sample(engine.workers, len(engine.workers)):
            worker.finish([job.lease_id], ok=job.ok)


def say(**line: object) -> None:
    """Tell the test."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Do what the first argument says."""
    client = RandomClient(json.loads(sys.argv[1]))
    client.run()
    say(finished=client.counts)


if __name__ == "__main__":
    main()
