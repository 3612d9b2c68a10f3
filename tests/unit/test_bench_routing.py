"""What the benchmark reads from a router's access log, written as a router writes it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.bench import routing
from millpond.bench.records import Routed, Sources
from millpond.bench.routing import RouterLog
from millpond.model.errors import ConfigError
from millpond.router.records import AccessLog, Attribution, Record
from tests.unit.bench_values import sample

LOADED = Sources(computed_tokens=10, local_tokens=20, loaded_tokens=70, writers={"a": 30, "b": 40})


def line(request_id: str, *, source: str | None = "pool", holder: str = "b") -> Record:
    """Return a request to a, of which a replica may have told."""
    record = Record(request_id, "POST", "/v1/completions", "cost", is_own_id=False)
    record.replica, record.holder = "a", holder
    if source is not None:
        record.attribution = Attribution(
            source=source,
            reader="a",
            prompt_tokens=100,
            computed_tokens=10,
            local_tokens=20,
            loaded_tokens=70,
            writers={"a": 30, "b": 40},
        )
    return record


@pytest.fixture
def log(tmp_path: Path) -> Iterator[AccessLog]:
    made = AccessLog(tmp_path / "log")
    yield made
    made.close()


@pytest.fixture(autouse=True)
def wait_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "_LINES_S_MAX", 0.2)


def test_each_request_gets_its_own_line_and_only_what_is_sure(
    log: AccessLog, tmp_path: Path
) -> None:
    log.write(line("before"))
    read = RouterLog(tmp_path / "log")
    sources = ["pool", "pool-ambiguous", "guessed", None]
    for number, source in enumerate(sources):
        log.write(line(f"r{number}", source=source, holder="a" if number == 1 else "b"))
    samples = [sample(number, 5.0) for number in range(4)]
    read.attribute(samples)
    assert [each.routed for each in samples] == [
        Routed(is_moved=True, sources=LOADED),
        Routed(is_moved=False, sources=None),
        Routed(is_moved=True, sources=None),
        Routed(is_moved=True, sources=None),
    ]


def test_a_request_without_a_line_has_nothing_and_a_failed_one_is_not_waited_for(
    log: AccessLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = RouterLog(tmp_path / "log")
    log.write(line("r0"))
    samples = [sample(0, 5.0), sample(1, 5.0)]
    read.attribute(samples)
    assert [each.routed is None for each in samples] == [False, True]
    monkeypatch.setattr(routing, "_LINES_S_MAX", 60.0)
    failed = [sample(2, None)]
    read.attribute(failed)
    assert failed[0].routed is None


def test_lines_that_come_late_and_in_halves_are_waited_for(
    log: AccessLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "_LINES_S_MAX", 20.0)
    log.write(line("r0"))
    text = (tmp_path / "log").read_bytes()
    path = tmp_path / "half"
    path.write_bytes(text[:30])
    read = RouterLog(path)
    polled = threading.Event()
    monkeypatch.setattr(routing.time, "sleep", lambda _s: polled.set())

    def rest() -> None:
        assert polled.wait(20.0)
        with path.open("ab") as file:
            file.write(text[30:])

    thread = threading.Thread(target=rest)
    thread.start()
    one = sample(0, 5.0)
    read.attribute([one])
    thread.join(20.0)
    assert one.routed == Routed(is_moved=True, sources=LOADED)


def test_what_was_there_before_is_not_read(tmp_path: Path, log: AccessLog) -> None:
    """Only the last line is looked at: a log may have grown for months, a full disk spoilt one."""
    (tmp_path / "log").write_bytes(b"spoilt\n")
    log.write(line("r0"))
    read = RouterLog(tmp_path / "log")
    log.write(line("r1"))
    samples = [sample(0, 5.0), sample(1, 5.0)]
    read.attribute(samples)
    assert [each.routed is None for each in samples] == [True, False]


@pytest.mark.parametrize("how", ["truncated", "renamed", "renamed and longer"])
def test_a_log_that_is_rotated_is_read_from_its_new_begin(
    log: AccessLog, tmp_path: Path, how: str
) -> None:
    path = tmp_path / "log"
    for number in range(3):
        log.write(line(f"before-{number}"))
    read = RouterLog(path)
    if how == "truncated":
        path.write_bytes(b"")
        log.write(line("r0"))
    else:
        path.rename(tmp_path / "log.1")
        anew = AccessLog(path)
        anew.write(line("r0"))
        for number in range(5 if how == "renamed and longer" else 0):
            anew.write(line(f"after-{number}"))
        anew.close()
    one = sample(0, 5.0)
    read.attribute([one])
    assert one.routed == Routed(is_moved=True, sources=LOADED)


@pytest.mark.parametrize(
    "spoilt",
    [b"nonsense\n", b'{"request_id": "r0"}\n', b'{"request_id": "r0", "is_moved": true}\n'],
)
def test_what_cannot_be_read_after_measuring_ends_no_run(
    log: AccessLog, tmp_path: Path, spoilt: bytes
) -> None:
    path = tmp_path / "log"
    read = RouterLog(path)
    with path.open("ab") as file:
        file.write(spoilt)
    log.write(line("r1"))
    samples = [sample(0, 5.0), sample(1, 5.0)]
    read.attribute(samples)
    assert [each.routed is None for each in samples] == [True, False]
    path.unlink()
    gone = sample(2, 5.0)
    read.attribute([gone])
    assert gone.routed is None


@pytest.mark.parametrize("text", [None, "nonsense\n", '{"time": 1}\n'])
def test_what_is_no_access_log_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "log").write_text(text)
    with pytest.raises(ConfigError, match="--access-log"):
        RouterLog(tmp_path / "log")
