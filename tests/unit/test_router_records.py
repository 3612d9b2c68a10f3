"""Records of requests: what logs and metrics make of them, and of reports of the pool."""

import asyncio
import json
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from millpond.model.errors import InvariantBroken
from millpond.router.attribution import Attributor, PoolReports, SeenNames, attribute, guess
from millpond.router.errors import Ended, no_replica, replica_gone
from millpond.router.headers import facts
from millpond.router.metrics import Metrics, main_source
from millpond.router.placement.estimates import Estimates
from millpond.router.records import AccessLog, GivenName, Record
from millpond.router.replicas import Replicas, State
from millpond.service.client import AdminClient
from millpond.service.protocol import Report


def record(**changes: object) -> Record:
    fields: dict[str, object] = {
        "request_id": "r",
        "method": "POST",
        "path": "/v1/completions",
        "policy": "cost",
        "is_own_id": True,
        "replica": "b",
        "tried": ["a", "b"],
        "holder": "a",
        "identity": "text",
        "prompt_tokens": 100,
        "local_tokens": 30,
        "status": 200,
        "is_stream": True,
        "arrived_ns": 10**9,
        "first_byte_ns": 3 * 10**9,
    }
    return Record(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def report(computed: int, local: int, **writers: int) -> tuple[str, Report]:
    loaded = sum(writers.values())
    return "b", Report(
        request_id="cmpl-r-0",
        prompt_tokens=computed + local + loaded,
        computed_tokens=computed,
        local_tokens=local,
        loaded_tokens=loaded,
        writers=writers,
    )


def test_several_prompts_of_one_request_are_summed() -> None:
    found = attribute(record(), [report(10, 5, a=100, b=7), report(20, 0, a=50)])
    assert found.source == "pool"
    assert (found.prompt_tokens, found.computed_tokens, found.local_tokens) == (192, 30, 5)
    assert (found.loaded_tokens, found.own_tokens, found.other_tokens) == (157, 7, 150)
    assert found.writers == {"a": 150, "b": 7}
    assert main_source(found) == "pool-other"


def test_a_name_of_the_clients_is_sure_only_while_it_is_unique() -> None:
    mine = record(is_own_id=False, given_name=GivenName(1))
    assert attribute(mine, [report(1, 0)]).source == "pool"
    assert attribute(mine, [report(1, 0), report(1, 0)]).source == "pool-ambiguous"
    again = record(is_own_id=False, given_name=GivenName(2))
    assert attribute(again, [report(1, 0)]).source == "pool-ambiguous", "the report of the first"


def test_of_two_at_once_under_a_new_name_neither_is_sure() -> None:
    seen = SeenNames()
    first, second = (record(is_own_id=False, given_name=seen.note("n")) for _ in range(2))
    for each in (first, second):
        assert attribute(each, [report(1, 0)]).source == "pool-ambiguous", "whose report it is"
    alone = record(is_own_id=False, given_name=seen.note("m"))
    assert attribute(alone, [report(1, 0)]).source == "pool"


def test_names_of_clients_are_remembered_within_bounds() -> None:
    seen = SeenNames(2)
    assert [seen.note(name).num_requests for name in "aababc"] == [1, 2, 1, 3, 2, 1]
    assert seen.note("a").num_requests == 1, "the oldest one has gone"


class BrokenPool:
    """An admin's client of a pool that finds fault with names, and then with itself."""

    welcome = SimpleNamespace(epoch=1)

    def poll_closed(self) -> bool:
        return False

    def close(self) -> None:
        pass

    def requests_named(self, name: str) -> list[tuple[str, Report]]:
        if name == "broken":
            raise InvariantBroken("a bug")
        if name == "long":
            raise ValueError("limit: a name")
        return [report(1, 0)]


def test_a_pool_that_is_broken_is_away_and_a_bad_name_has_no_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdminClient, "connect", lambda *_, **__: BrokenPool())
    pool = PoolReports(Path("any"))
    assert pool.ask(["long", "short"]) == [(), [report(1, 0)]]
    assert pool.is_connected
    assert pool.ask(["short", "broken"]) is None
    assert not pool.is_connected


def test_what_is_being_asked_about_at_the_end_is_recorded_too() -> None:
    asked, answer = threading.Event(), threading.Event()

    class Slow(PoolReports):
        is_connected = True

        def ask(self, request_ids: Sequence[str]) -> None:
            if request_ids:
                asked.set()
                answer.wait(10)

    async def scenario() -> list[Record]:
        done: list[Record] = []
        attributor = Attributor(Slow(Path("none")), on_done=done.append, on_new_pool=lambda: None)
        attributor.submit(record())
        running = asyncio.create_task(attributor.run())
        assert await asyncio.to_thread(asked.wait, 10)
        running.cancel()
        await asyncio.wait({running}, timeout=10)
        answer.set()
        attributor.close()
        return done

    (found,) = asyncio.run(scenario())
    assert found.attribution is not None
    assert found.attribution.source == "guessed"


def test_only_one_report_is_of_one_prompt() -> None:
    assert attribute(record(), [report(1, 0)]).is_of_one_prompt
    assert not attribute(record(), [report(1, 0), report(1, 0)]).is_of_one_prompt
    assert guess(record()).is_of_one_prompt


def test_tokens_that_may_be_of_other_requests_are_not_counted() -> None:
    metrics = Metrics(Replicas(), Estimates())
    again = record(is_own_id=False, given_name=GivenName(2))
    again.attribution = attribute(again, [report(5, 5, a=5)])
    metrics.add(again)
    text = metrics.text().decode()
    assert "millpond_router_requests_total{" in text
    for name in ("prompt_tokens_total{", "loaded_tokens_total{", "ttft_seconds_count{"):
        assert f"millpond_router_{name}" not in text


def test_a_guess_adds_up() -> None:
    found = guess(record())
    assert (found.source, found.reader) == ("guessed", "b")
    assert found.computed_tokens + found.local_tokens == found.prompt_tokens == 100


def test_times_are_of_streams() -> None:
    assert record().ttft_s == 2.0
    assert record(is_stream=False).ttft_s is None
    assert record(first_byte_ns=None).ttft_s is None


def test_a_request_has_moved_only_if_somebody_else_held_its_prefix() -> None:
    assert record().is_moved
    assert not record(holder="b").is_moved
    assert not record(holder=None).is_moved
    assert not record(replica=None).is_moved


def test_headers_say_what_is_known() -> None:
    found = dict(facts(record(holder=None)))
    assert found[b"x-millpond-prefix-holder"] == b"none"
    assert found[b"x-millpond-moved"] == b"no"
    nothing = dict(facts(record(replica=None, identity="")))
    assert set(nothing) == {b"x-millpond-request-id", b"x-millpond-policy"}


def test_a_line_of_the_log_is_json_and_whole(tmp_path: Path) -> None:
    log = AccessLog(tmp_path / "log")
    finished = record(attribution=guess(record()), ended_ns=4 * 10**9)
    log.write(finished)
    (line,) = map(json.loads, (tmp_path / "log").read_text().splitlines())
    log.close()
    assert (line["first_byte_ms"], line["e2el_ms"]) == (2000.0, 3000.0)
    assert line["attribution"]["source"] == "guessed"
    assert line["tried"] == ["a", "b"]


def test_a_full_disk_ends_the_log_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog(Path("/dev/full"))
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            log.write(record())
    log.close()
    assert [x.message for x in caplog.records] == [
        "access log ends: path=/dev/full error=No space left on device"
    ]


def test_metrics_count_what_finished_and_show_what_is() -> None:
    replicas = Replicas()
    replicas.add("b", "http://b").state = State.READY
    replicas["b"].num_running = 3
    metrics = Metrics(replicas, Estimates())
    metrics.add(record(attribution=guess(record())))
    metrics.add(record(replica=None, status=503, ended=Ended.NO_REPLICA, tried=[], holder=None))
    text = metrics.text().decode()
    for line in (
        'millpond_router_requests_total{policy="cost",replica="b",status="200"} 1.0',
        'millpond_router_requests_total{policy="cost",replica="",status="503"} 1.0',
        'millpond_router_ended_total{ended="no-replica"} 1.0',
        'millpond_router_retries_total{replica="a"} 1.0',
        'millpond_router_moved_requests_total{policy="cost"} 1.0',
        'millpond_router_replica_running_requests{replica="b"} 3.0',
        'millpond_router_ttft_seconds_sum{policy="cost",source="computed"} 2.0',
    ):
        assert line in text


def test_errors_have_the_apis_form() -> None:
    fields = json.loads(no_replica().body())["error"]
    assert set(fields) == {"message", "type", "param", "code"}
    event = replica_gone("a").event("/v1/chat/completions")
    first, done, end = event.split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["error"]["code"] == 502
    assert (done, end) == (b"data: [DONE]", b"")


def test_the_documented_metrics_are_the_ones_there_are() -> None:
    text = (Path(__file__).parents[2] / "docs" / "ROUTER.md").read_text(encoding="utf-8")
    metrics = Metrics(Replicas(), Estimates())
    metrics.add(record(attribution=guess(record())))
    names = {
        line.split()[2].removeprefix("millpond_router_")
        for line in metrics.text().decode().splitlines()
        if line.startswith("# TYPE")
    }
    missing = [each for each in names if not each.endswith("_created") and f"`{each}`" not in text]
    assert missing == []
