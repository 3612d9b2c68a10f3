"""The worker's side ends every lease it is told of, also those that it cannot serve."""

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from millpond.connector import versions
from millpond.connector.geometry import EngineLayout
from millpond.connector.metadata import Job, PartJob, StepMetadata
from millpond.connector.worker import WorkerSide
from millpond.model.errors import DaemonGone
from millpond.model.layout import LayerPages, PartLayout
from millpond.model.names import Coverage
from millpond.service.client import ReplicaIdentity
from millpond.service.protocol import Link
from millpond.transfer import Direction, Ends, Pace, Ticket
from millpond.transfer.link import LinkReport, LinkSpeed

SESSION = 7
SLOT_BYTES = 4096


class FakeClient:
    """A seam: notes what the daemon would hear."""

    def __init__(self, session: int = SESSION) -> None:
        self.session = session
        self.arena: Any = SimpleNamespace(
            size_bytes=10 * SLOT_BYTES,
            address=0,
            sums=lambda *_: memoryview(array("Q", [0])),
        )
        self.finished: list[tuple[int, bool]] = []
        self.links: list[Link] = []

    def tell_link(self, link: Link) -> None:
        self.links.append(link)

    def finish(self, lease_ids: list[int], *, ok: bool) -> None:
        self.finished += [(lease, ok) for lease in lease_ids]


class NotReady:
    """A copy engine whose arena is not registered yet."""

    def fence(self) -> object:
        return object()

    def is_ready(self, _: int) -> bool:
        return False

    def adopt(self, _: object) -> None: ...

    def step(self, *, early: bool = False) -> None: ...

    def hold_back(self) -> None: ...

    def submit(self, *_: object, **__: object) -> None:
        pytest.fail("a job was submitted to an engine that is not ready")


def make_worker(client: FakeClient | None) -> Any:  # noqa: ANN401
    part = PartLayout("attention", (LayerPages("l", 0, SLOT_BYTES),), {0: 1})
    layout = EngineLayout(256, 256, (256,), (part,), (Coverage.EVERY,), (None,))
    engine: Any = NotReady()
    settings: Any = SimpleNamespace(socket="/nowhere", check_ratio=0.0, early_loads=True)
    worker: Any = WorkerSide(layout, ReplicaIdentity(
        replica="a", session_key="k", num_ranks=1), settings, engine, 0)  # fmt: skip
    worker._current = client
    return worker


def job(lease: int, *, slot: int = 0, session: int = SESSION) -> Job:
    return Job(lease, f"request-{lease}", session, lease, (PartJob(0, [slot], {0: [[1]]}),))


@pytest.mark.parametrize("slot", [0, 10 * SLOT_BYTES, -1], ids=["not ready", "behind", "before"])
def test_jobs_that_cannot_be_served_end_their_leases(slot: int) -> None:
    client = FakeClient()
    worker = make_worker(client)
    step = StepMetadata(loads=[job(1, slot=slot)], stores=[job(2, slot=slot)])
    worker.start_loads(step)
    worker.start_stores(step)
    assert client.finished == [(1, False), (2, False)]
    results = worker.take_results()
    assert results.stores_done == {2: 1}
    assert list(results.loads_failed) == ["request-1"]
    assert results.unready_offset == (slot if slot == 0 else None)
    assert worker.finished() == (set(), {"request-1"}, {"request-1"})


def test_leases_of_a_session_that_is_about_to_be_joined_end_on_joining(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = make_worker(None)
    worker.start_stores(StepMetadata(stores=[job(3), job(4, session=SESSION - 1)]))
    assert worker.take_results().stores_done == {3: 1, 4: 1}
    client = FakeClient()
    monkeypatch.setattr("millpond.connector.worker.WorkerClient.connect", lambda *_, **__: client)
    worker._join()
    assert client.finished == [(3, False)]


def test_a_kept_request_is_reported_when_its_last_store_has_ended() -> None:
    worker = make_worker(FakeClient())
    worker._num_stores["request-5"] = 1
    worker.start_loads(StepMetadata(delayed={"request-5"}))
    assert worker.finished() == (set(), set(), set())
    worker._end_store(job(5), worker._current, None)
    assert worker.finished() == ({"request-5"}, set(), set())


def test_each_daemon_hears_of_the_link_once_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakeClient(), FakeClient(SESSION + 1)
    worker = make_worker(first)
    worker.tell_link(LinkReport(LinkSpeed(55.0, 54.0, generation=5, width=16)))
    assert [(link.h2d_gb_s, link.d2h_gb_s, link.problem) for link in first.links] == [
        (55.0, 54.0, "")
    ]
    worker._left(first)
    worker.tell_link(LinkReport(problem="x" * 1000))  # known while there is no daemon
    monkeypatch.setattr("millpond.connector.worker.WorkerClient.connect", lambda *_, **__: second)
    monkeypatch.setattr(worker._copy_engine, "wait_idle", lambda _: True, raising=False)
    worker._join()
    assert [(link.h2d_gb_s, len(link.problem)) for link in second.links] == [(None, 256)]
    assert len(first.links) == 1


class Fences(NotReady):
    """A copy engine whose fences are numbers, and which notes what was submitted behind which."""

    def __init__(self) -> None:
        self.num_fences = 0
        self.behind: list[object] = []

    def fence(self) -> object:
        self.num_fences += 1
        return self.num_fences

    def is_ready(self, _: int) -> bool:
        return True

    def submit(self, *_: object, **named: object) -> None:
        self.behind.append(named["after"])


def test_each_step_takes_a_fence_of_its_own_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """E1 and E3: a fence of an earlier step is passed before this step's kernels have run."""
    worker = make_worker(FakeClient())
    engine = worker._copy_engine = Fences()
    monkeypatch.setattr(worker, "_copies", lambda *_: None)
    worker.start_loads(StepMetadata(loads=[job(1), job(2)]))
    worker.start_stores(StepMetadata(stores=[job(3)]))
    worker.start_stores(StepMetadata())
    worker.start_loads(StepMetadata(loads=[job(4)]))
    assert engine.behind == [1, 1, 2, 3]
    assert engine.num_fences == 3


def test_the_memory_of_a_daemon_that_is_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the next daemon, which needs as much, might never have the room to start."""
    gone = FakeClient()
    released: list[float] = []
    closed: list[bool] = []
    worker = make_worker(gone)
    gone.arena.close = lambda: closed.append(True)
    worker._arena = gone.arena
    worker._left(gone)
    monkeypatch.setattr(worker._copy_engine, "wait_idle", lambda _: True, raising=False)
    monkeypatch.setattr(worker._copy_engine, "release", released.append, raising=False)

    def connect(*_: object, **named: object) -> object:
        if not released:
            raise DaemonGone("nobody is there")
        assert named["arena"] is None
        return FakeClient(SESSION + 1)

    monkeypatch.setattr("millpond.connector.worker.WorkerClient.connect", connect)
    with pytest.raises(DaemonGone):
        worker._join()
    assert len(released) == len(closed) == 1
    assert worker._join().session == SESSION + 1
    assert worker._past_sessions == []


class Held(NotReady):
    """A copy engine that ends nothing by itself."""

    def __init__(self) -> None:
        self.ends: list[Ends] = []
        self.steps: list[bool] = []
        """Whether each asked to be told early."""
        self.num_held_back = 0
        self.paces: list[Pace | None] = []

    def pace(self, pace: Pace | None) -> None:
        self.paces.append(pace)

    def begin_step(self) -> None: ...

    def step(self, *, early: bool = False) -> None:
        self.steps.append(early)

    def hold_back(self) -> None:
        self.num_held_back += 1

    def is_ready(self, _: int) -> bool:
        return True

    def submit(self, *_: object, ends: Ends, **__: object) -> None:
        self.ends.append(ends)


def submitted(worker: Any, monkeypatch: pytest.MonkeyPatch, step: StepMetadata) -> Ends:  # noqa: ANN401
    engine = worker._copy_engine = Held()
    monkeypatch.setattr(worker, "_copies", lambda *_: None)
    worker.start_loads(step)
    worker.start_stores(step)
    (ends,) = engine.ends
    return ends


def test_a_load_that_has_landed_is_reported_once_and_its_lease_ends_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    worker = make_worker(client)
    ends = submitted(worker, monkeypatch, StepMetadata(loads=[job(1)]))
    assert ends.on_landed is not None
    ends.on_landed()
    assert worker._copy_engine.steps == []
    assert worker.finished() == (set(), {"request-1"}, set())
    assert worker._copy_engine.steps == [False]  # it is the engine's thread that comes by
    assert client.finished == []
    ends.on_done(Ticket(Direction.LOAD, 0, 0, None))
    assert client.finished == [(1, True)]
    assert worker.finished() == (set(), set(), set())


def test_a_landing_that_was_reported_stays_so_whatever_comes_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    worker = make_worker(client)
    ends = submitted(worker, monkeypatch, StepMetadata(loads=[job(1)]))
    assert ends.on_landed is not None
    ends.on_landed()
    assert worker.finished() == (set(), {"request-1"}, set())
    ends.on_done(Ticket(Direction.LOAD, 0, 0, "the device is lost"))
    assert client.finished == [(1, False)]
    assert worker.finished() == (set(), set(), set())
    assert worker.take_results() is None


@pytest.mark.parametrize("is_on", [True, False])
def test_only_an_engine_with_nothing_to_compute_is_told_of_loads_early(is_on: bool) -> None:
    """The forward pass of other requests would wait for the load as well."""
    worker = make_worker(FakeClient())
    worker._early_loads = is_on
    engine = worker._copy_engine = Held()
    for computes in (False, True, False):
        worker.start_loads(StepMetadata(computes=computes))
        worker.finished()
    assert engine.steps == [is_on, False, is_on]


@pytest.mark.parametrize("begins", [True, False])
def test_the_device_waits_for_early_loads_before_the_engine_enqueues_anything(begins: bool) -> None:
    """At the beginning of the next step; where others come first there, at once."""
    worker = make_worker(FakeClient())
    worker._begins_steps = begins
    engine = worker._copy_engine = Held()
    worker.finished()
    assert engine.num_held_back == (0 if begins else 1)
    worker.begin_step(StepMetadata(computes=False, uses_pages=True))
    assert engine.num_held_back == (1 if begins else 2)


def test_an_empty_step_between_report_and_forward_pass_waits_for_nothing() -> None:
    """VLLM's host would wait behind it, and launch nothing meanwhile."""
    worker = make_worker(FakeClient())
    worker._begins_steps = True
    engine = worker._copy_engine = Held()
    worker.begin_step(StepMetadata(computes=False, uses_pages=False))
    assert engine.num_held_back == 0
    worker.begin_step(StepMetadata(computes=True))
    assert engine.num_held_back == 1


def test_loads_keep_a_pace_beside_an_engine_that_computes() -> None:
    worker = make_worker(FakeClient())
    worker._begins_steps = True
    engine = worker._copy_engine = Held()
    for speed in (None, LinkSpeed(h2d_gb_s=50.0, d2h_gb_s=40.0)):
        worker.tell_link(LinkReport(speed))
        for computes in (True, False):
            step = StepMetadata(computes=computes)
            worker.begin_step(step)
            worker.start_loads(step)
    *before, beside, idle = engine.paces
    assert [*before, idle] == [None] * 3, "nothing known, or nothing computed"
    assert beside is not None
    assert beside.bytes_per_s == 50e9


def test_an_engine_that_does_not_tell_of_its_steps_sets_no_pace() -> None:
    worker = make_worker(FakeClient())
    engine = worker._copy_engine = Held()
    worker.start_loads(StepMetadata(computes=True))
    assert engine.paces == []


@pytest.mark.parametrize(
    ("connector", "num_engines", "may"),
    [("MillpondConnector", 1, True), ("MillpondConnector", 2, False), ("MultiConnector", 1, False)],
)
def test_an_engine_whose_wait_would_be_others_too_is_not_told_early(
    connector: str,
    num_engines: int,
    may: bool,
) -> None:
    config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector=connector),
        parallel_config=SimpleNamespace(data_parallel_size=num_engines),
    )
    assert versions.may_load_early(config) == may


def test_a_load_that_fails_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_worker(FakeClient())
    ends = submitted(worker, monkeypatch, StepMetadata(loads=[job(1)]))
    ends.on_done(Ticket(Direction.LOAD, 0, 0, "planted"))
    assert worker.finished() == (set(), {"request-1"}, {"request-1"})


def test_nothing_is_there_before_it_has_been_checked_or_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = make_worker(FakeClient())
    store = submitted(worker, monkeypatch, StepMetadata(stores=[job(1)]))
    worker._checksums = NoSums()
    load = submitted(worker, monkeypatch, StepMetadata(loads=[job(2)]))
    assert store.on_landed is None
    assert load.on_landed is None


class NoSums:
    """Checksums that fail in a way that nobody has thought of."""

    is_on = True

    def check(self, *_: object) -> None:
        raise MemoryError("planted")

    write = check


def test_copies_whose_checksums_fail_end_as_failed_ones() -> None:
    """A load must be reported, or its request waits for ever; a store must not be committed."""
    client = FakeClient()
    worker = make_worker(client)
    worker._checksums = NoSums()
    worker._num_stores["request-2"] = 1
    with pytest.raises(MemoryError):
        worker._end_load(job(1), client, None)
    with pytest.raises(MemoryError):
        worker._end_store(job(2), client, None)
    assert client.finished == [(1, False), (2, False)]
    assert worker.finished() == (set(), {"request-1"}, {"request-1"})
    results = worker.take_results()
    assert results.stores_done == {2: 1}
    assert list(results.loads_failed) == ["request-1"]
    assert worker._num_stores == {}
