"""The harness against an endpoint whose truth is known: effects, clocks, order, interrupts."""

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from millpond.bench.analysis import analyse
from millpond.bench.client import Client, Target
from millpond.bench.driving import Sending, drive
from millpond.bench.effects import Effect
from millpond.bench.periods import Doing, Runner, plan_periods
from millpond.bench.records import Record, Sample, load_record
from millpond.bench.scenario import Design, Moved, Scenario, Sessions
from millpond.bench.stages import LiveStage
from millpond.bench.workloads import Piece, Request, requests_of
from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.model.errors import ConfigError, ExpectedError, SetupError
from tests.faults.scripted_endpoint import Asked, Endpoint, ScriptedStage, Stream

OFF_S, ON_S = 0.12, 0.06
SPREAD_S = 0.012
MACHINE_MS = 10.0
"""What a machine that has other work adds to a time now and then."""
WAIT_S = 10.0
SCENARIO = Scenario(
    name="s",
    description="d",
    design=Design(rounds=1, aa_rounds=1, warm_up=2),
    workload=(Moved(lengths=(20,), prompts=6, output_tokens=3, gap_s=0.0, concurrency=3),),
)
SESSIONS = Sessions(
    placement="alternate",
    initial_tokens=(30,),
    sessions=4,
    turns=3,
    growth_tokens=10,
    output_tokens=2,
    think_s=0.03,
    concurrency=2,
)


def serving(off_s: float, on_s: float):  # noqa: ANN201
    """Return a script whose first token comes later with the cache off; seeded by request."""

    async def script(endpoint: Endpoint, asked: Asked, stream: Stream) -> None:
        spread_s = random.Random(asked.request_id).uniform(-SPREAD_S, SPREAD_S)
        await asyncio.sleep((on_s if endpoint.cache == "millpond" else off_s) + spread_s)
        for _ in range(3):
            await stream.token()
        await stream.done()

    return script


def request(number: int, **fields: object) -> Request:
    given: dict[str, object] = {
        "key": f"r{number}",
        "group": "g",
        "role": "any",
        "unit": f"u{number}",
        "pieces": (Piece(str(number), 10),),
        "output_tokens": 2,
        "replica": 0,
    }
    return Request(**(given | fields))  # pyright: ignore[reportArgumentType]


def send(
    endpoint: Endpoint, requests: Sequence[Request], *, timeout_s: float = 5.0
) -> list[Sample]:
    async def run() -> list[Sample]:
        samples: list[Sample] = []
        async with Client(timeout_s=timeout_s) as client, asyncio.timeout(WAIT_S):
            sending = Sending(
                targets=[endpoint.target],
                id_prefix="t",
                zero_ns=time.perf_counter_ns(),
                on_sample=samples.append,
            )
            await drive(requests, client, sending)
        return samples

    return asyncio.run(run())


def runner_in(folder: Path, on_progress=lambda _doing: None, run_id: str = "x") -> Runner:  # noqa: ANN001
    return Runner(
        scenario=SCENARIO,
        num_replicas=2,
        folder=folder,
        run_id=run_id,
        on_progress=on_progress,
    )


PLANS = plan_periods(SCENARIO.design, ["off", "millpond"])


def ttft(effects: Sequence[Effect], part: str) -> Effect:
    (found,) = [each for each in effects if (each.part, each.metric) == (part, "ttft_ms")]
    return found


# ---------------------------------------------------------------- effects


def test_a_planted_effect_is_recovered_and_a_a_shows_none(tmp_path: Path) -> None:
    with Endpoint(serving(OFF_S, ON_S)) as endpoint:
        runner = runner_in(tmp_path)
        runner.run(PLANS, ScriptedStage(endpoint))
    assert [len(period.samples) for period in runner.periods] == [12] * 8
    assert [len(period.warm_up) for period in runner.periods] == [2] * 8
    assert all(period.is_complete for period in runner.periods)
    assert endpoint.num_resets == 8, "flushed after each warm-up"
    analysis = analyse(runner.periods)
    assert analysis.num_errors == {}
    effect = ttft(analysis.effects, "moved")
    interval, noise = effect.saved_ms.interval, effect.noise
    assert interval is not None
    planted_ms = 1000 * (OFF_S - ON_S)
    assert interval.low - MACHINE_MS <= planted_ms <= interval.high + MACHINE_MS
    assert effect.verdict == "faster"
    assert noise is not None
    assert noise.low < 1.2
    assert noise.high > 1 / 1.2


def test_no_effect_is_found_where_there_is_none(tmp_path: Path) -> None:
    with Endpoint(serving(ON_S, ON_S)) as endpoint:
        runner = runner_in(tmp_path)
        runner.run(PLANS, ScriptedStage(endpoint))
    effects = [each for each in analyse(runner.periods).effects if each.metric == "ttft_ms"]
    assert [each.verdict for each in effects] == ["within noise"] * 2


def test_periods_of_a_round_ask_the_same_prompts_and_rounds_others(tmp_path: Path) -> None:
    with Endpoint(serving(0.0, 0.0)) as endpoint:
        runner = runner_in(tmp_path)
        runner.run(PLANS, ScriptedStage(endpoint))
    prompts: dict[str, set[tuple[int, ...]]] = {}
    for asked in endpoint.asked:
        name = asked.request_id.split("-")[2]
        is_warm_up = "warm" in asked.request_id
        prompts.setdefault(f"{name}{'-warm' * is_warm_up}", set()).add(tuple(asked.prompt))
    assert prompts["0"] == prompts["3"]
    assert prompts["4"] == prompts["5"] == prompts["7"]
    assert not prompts["0"] & prompts["4"]
    assert not prompts["0-warm"] & (prompts["0"] | prompts["4"])
    assert len(prompts["0"]) == 6


# ---------------------------------------------------------------- clocks


def test_a_role_is_no_first_token() -> None:
    async def script(_endpoint: Endpoint, _asked: Asked, stream: Stream) -> None:
        await stream.role()
        await asyncio.sleep(0.1)
        await stream.token()
        await asyncio.sleep(0.05)
        await stream.token()
        await stream.done()

    with Endpoint(script) as endpoint:
        (sample,) = send(endpoint, [request(0)])
    assert sample.error is None
    assert sample.ttft_ms is not None
    assert sample.ttft_ms >= 100
    assert len(sample.itl_ms) == 1
    assert sample.itl_ms[0] >= 40
    assert sample.e2el_ms is not None
    assert sample.e2el_ms >= sample.ttft_ms + sum(sample.itl_ms)
    assert sample.output_tokens == 2


def test_ttft_begins_when_the_request_is_sent_and_not_when_it_was_due() -> None:
    """A long wait for its turn is no part of a request's own time."""
    with Endpoint(serving(0.05, 0.05)) as endpoint:
        samples = send(endpoint, [request(0), request(1, after="r0", wait_s=0.3)])
    second = samples[1]
    assert second.ttft_ms is not None
    assert second.ttft_ms < 300
    assert second.start_ms >= 300


def test_a_stalled_answer_delays_no_later_arrival() -> None:
    num_requests, step_s = 12, 0.02
    everyone = asyncio.Event()

    async def script(endpoint: Endpoint, asked: Asked, stream: Stream) -> None:
        if len(endpoint.asked) == num_requests:
            everyone.set()
        if asked.unit == "u0":
            # Ends only when all others have arrived: a harness that waits would never end.
            await asyncio.wait_for(everyone.wait(), WAIT_S)
        await stream.token()
        await stream.done()

    requests = [request(i, arrival_s=i * step_s) for i in range(num_requests)]
    with Endpoint(script) as endpoint:
        samples = send(endpoint, requests)
    assert all(sample.error is None for sample in samples)
    arrivals = {asked.unit: asked.begun_s for asked in endpoint.asked}
    for i in range(num_requests):
        assert arrivals[f"u{i}"] >= arrivals["u0"] + i * step_s - 0.015, "not before its time"
    by_key = {sample.key: sample for sample in samples}
    due_ms = [by_key[each.key].start_ms - (by_key[each.key].late_ms or 0) for each in requests]
    assert [each - due_ms[0] for each in due_ms] == pytest.approx(
        [1000 * i * step_s for i in range(num_requests)], abs=0.01
    )
    assert min(sample.late_ms or 0 for sample in samples) >= 0


def test_turns_wait_for_the_answer_before_and_think() -> None:
    with Endpoint(serving(0.02, 0.02)) as endpoint:
        requests = requests_of(SESSIONS, seed="1", num_replicas=1)
        samples = send(endpoint, requests)
    assert [sample.error for sample in samples] == [None] * 12
    by_unit: dict[str, list[Asked]] = {}
    for asked in endpoint.asked:
        by_unit.setdefault(asked.unit, []).append(asked)
    assert len(by_unit) == 4
    for turns in by_unit.values():
        assert [len(turn.prompt) for turn in turns] == [30, 40, 50]
        for before, after in itertools.pairwise(turns):
            assert before.ended_s is not None
            assert after.begun_s >= before.ended_s + SESSIONS.think_s - 0.005
            assert after.prompt[: len(before.prompt)] == before.prompt
    running = [
        sum(one.begun_s <= each.begun_s < (one.ended_s or 0) for one in endpoint.asked)
        for each in endpoint.asked
    ]
    assert max(running) == 2, "two sessions at once, as asked for"


def test_a_request_that_follows_nobody_known_is_refused() -> None:
    with Endpoint(serving(0.0, 0.0)) as endpoint, pytest.raises(ValueError, match="r9"):
        send(endpoint, [request(0, after="r9")])
    assert endpoint.asked == []


# ---------------------------------------------------------------- what goes wrong


async def _breaks_off(_endpoint: Endpoint, _asked: Asked, stream: Stream) -> None:
    await stream.token()


async def _says_nothing(_endpoint: Endpoint, _asked: Asked, stream: Stream) -> None:
    await stream.done()


async def _falls_silent(_endpoint: Endpoint, _asked: Asked, stream: Stream) -> None:
    await stream.token()
    await asyncio.sleep(WAIT_S)


async def _reports_an_error(_endpoint: Endpoint, _asked: Asked, stream: Stream) -> None:
    await stream.event({"error": {"message": "out of memory"}})
    await stream.done()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (_breaks_off, "without [DONE]"),
        (_says_nothing, "no token"),
        (_falls_silent, "Timeout"),
        (_reports_an_error, "out of memory"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_failed_answer_is_an_error_and_the_next_one_is_asked(script, words: str) -> None:  # noqa: ANN001
    with Endpoint(script) as endpoint:
        samples = send(endpoint, [request(0), request(1, after="r0")], timeout_s=0.3)
    assert len(samples) == 2
    assert all(words in str(sample.error) for sample in samples)


def test_a_refused_request_keeps_status_and_reason(tmp_path: Path) -> None:
    with Endpoint(serving(0.0, 0.0)) as endpoint:
        wrong = Target("a", endpoint.url + "/nowhere", "m")
        stage = LiveStage([wrong], socket=None)
        with pytest.raises(SetupError, match="VLLM_SERVER_DEV_MODE"), stage.scene("off", 0):
            pass
        answer = asyncio.run(_ask(wrong.url))
    assert "status 404" in str(answer)


async def _ask(url: str) -> str | None:
    async with Client(timeout_s=1.0) as client:
        return (await client.ask(url, b"{}", {})).error


def test_a_run_that_nobody_answers_ends_at_once(tmp_path: Path) -> None:
    with Endpoint(_says_nothing) as endpoint, pytest.raises(ExpectedError, match="no token"):
        runner_in(tmp_path).run(PLANS, ScriptedStage(endpoint))
    assert len(endpoint.asked) == 2


# ---------------------------------------------------------------- interrupts


def interrupt_in(period: int, num_sent: int):  # noqa: ANN201
    """Return a listener that presses Ctrl-C once."""

    def listen(doing: Doing) -> None:
        if (doing.plan.number, doing.num_sent) == (period, num_sent):
            signal.raise_signal(signal.SIGINT)

    return listen


def test_ctrl_c_keeps_what_is_done_and_a_resumed_run_ends_it(tmp_path: Path) -> None:
    with Endpoint(serving(0.01, 0.01)) as endpoint:
        first = runner_in(tmp_path, interrupt_in(6, 5))
        with pytest.raises(KeyboardInterrupt):
            first.run(PLANS, ScriptedStage(endpoint))
        assert [period.plan.number for period in first.periods] == list(range(7))
        assert [period.is_complete for period in first.periods] == [True] * 6 + [False]
        interrupted = first.periods[-1]
        assert 5 <= len(interrupted.samples) < 12
        partial = analyse(first.periods)
        assert partial.num_incomplete_periods == 1
        assert 12 > ttft(partial.effects, "moved").num_prompts >= 6, "what is done is reported"

        endpoint.asked.clear()
        second = runner_in(tmp_path, run_id="y")
        second.resume(PLANS)
        assert [period.plan.number for period in second.periods] == list(range(6))
        second.run(PLANS, ScriptedStage(endpoint))
    assert len(endpoint.asked) == 2 * (12 + 2), "only the last two periods are run"
    assert [period.is_complete for period in second.periods] == [True] * 8
    assert second.periods[:6] == first.periods[:6]
    assert ttft(analyse(second.periods).effects, "moved").num_prompts == 12


TOML = """
name = "short"
description = "d"
[design]
warm_up = 1
[[workload]]
kind = "moved"
lengths = [20]
prompts = 4
output_tokens = 3
gap_s = 0.0
"""


def test_the_command_reports_what_is_done_after_ctrl_c_and_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(interrupts_at: int | None):  # noqa: ANN202
        async def answer(endpoint: Endpoint, _asked: Asked, stream: Stream) -> None:
            if len(endpoint.asked) == interrupts_at:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(WAIT_S)
            await stream.token()
            await stream.done()

        return answer

    (tmp_path / "short.toml").write_text(TOML)
    argv = ["bench", "run", str(tmp_path / "short.toml"), "--out", str(tmp_path / "out")]
    argv += ["--caches", "off", "--rounds", "0", "--model", "m", "--json"]
    with Endpoint(script(interrupts_at=9 + 9 + 4)) as endpoint:
        argv += ["--url", f"a={endpoint.url}"]
        assert run(argv, {}) == Exit.INTERRUPTED
        document = json.loads(capsys.readouterr().out)
        assert document["data"]["analysis"]["num_incomplete_periods"] == 1
        assert "A/A, moved 20" in document["data"]["headlines"][0]
        record = load_record(tmp_path / "out" / "bench.json")
        assert [len(period.samples) for period in record.periods] == [8, 8, 2]

        endpoint.script = script(interrupts_at=None)
        endpoint.asked.clear()
        assert run([*argv, "--resume"], {}) == Exit.OK
        assert len(endpoint.asked) == 9 + 9
        assert run([*argv, "--resume"], {}) == Exit.OK
        assert len(endpoint.asked) == 9 + 9, "one that is done is only reported"
    record = load_record(tmp_path / "out" / "bench.json")
    assert [len(period.samples) for period in record.periods] == [8] * 4


def test_a_period_of_another_run_is_not_taken_over(tmp_path: Path) -> None:
    with Endpoint(serving(0.0, 0.0)) as endpoint:
        runner_in(tmp_path).run(PLANS[:1], ScriptedStage(endpoint))
    other = [msgspec.structs.replace(PLANS[0], cache="lmcache")]
    with pytest.raises(ConfigError, match="another run"):
        runner_in(tmp_path).resume(other)
    (tmp_path / "period-000.json").write_text("{")
    with pytest.raises(ConfigError, match="remove it"):
        runner_in(tmp_path).resume(PLANS)


def test_a_run_tells_what_it_is_doing(tmp_path: Path) -> None:
    seen: list[Doing] = []
    with Endpoint(serving(0.0, 0.0)) as endpoint:
        runner_in(tmp_path, seen.append).run(PLANS[:2], ScriptedStage(endpoint))
    assert [doing.what for doing in seen[:3]] == ["starting", "settling", "warming up"]
    assert [doing.num_sent for doing in seen if doing.what == "measuring"] == [*range(1, 13)] * 2
    assert {(doing.num_periods, doing.num_requests) for doing in seen} == {(2, 12)}


def test_a_record_holds_every_sample_and_is_read_again(tmp_path: Path) -> None:
    with Endpoint(serving(0.0, 0.0)) as endpoint:
        runner = runner_in(tmp_path / "periods")
        runner.run(PLANS, ScriptedStage(endpoint))
    record = Record(scenario=SCENARIO, options={}, facts={}, periods=runner.periods)
    record.save(tmp_path / "bench.json", analyse(runner.periods))
    assert load_record(tmp_path / "bench.json").periods == runner.periods
    document = msgspec.json.decode((tmp_path / "bench.json").read_bytes())
    metrics = document["periods"][0]["metrics"]
    assert metrics["completed"] == 12
    assert metrics["total_output_tokens"] == 36
    names = {
        f"{f}_{m}_ms" for f in ("mean", "median", "std", "p99") for m in ("ttft", "itl", "e2el")
    }
    assert names <= metrics.keys()
    assert document["analysis"]["effects"]


@pytest.mark.parametrize(
    "rest",
    ["", ', "periods": 3', ', "periods": ["x"]', ', "periods": [{"plan": "x"}]'],
)
@pytest.mark.parametrize("number", [1, 2])
def test_a_damaged_record_is_called_none(tmp_path: Path, number: int, rest: str) -> None:
    (tmp_path / "bench.json").write_text(f'{{"format": {number}{rest}}}')
    with pytest.raises(ConfigError, match="no record"):
        load_record(tmp_path / "bench.json")
