"""A trace replayed against two real replicas behind a router: its times, prefixes and tokens."""

import json
import os
from pathlib import Path

import pytest

from millpond.bench.analysis import analyse
from millpond.bench.records import Period, load_record
from millpond.cli import run
from millpond.cli.exits import Exit

pytestmark = [pytest.mark.engines, pytest.mark.timeout(600)]

GAP_MS = 1500
PREFIX, TAIL = 512, 40
"""Tokens after scaling: two blocks of the pool, and some that no other prompt has."""
STREAM = "AABABC"
"""Whose prefix each request of the trace has."""
TOML = """
name = "traced"
description = "d"
[design]
rounds = 1
aa_rounds = 0
warm_up = 2
[[workload]]
kind = "replay"
format = "mooncake"
requests = 100
token_scale = 0.5
output_tokens_max = 4
"""


def trace() -> str:
    """Return a line for each request, in the format of Mooncake's traces."""
    lines: list[dict[str, object]] = []
    for number, name in enumerate(STREAM):
        first = 10 * (1 + ord(name) - ord("A"))
        lines.append(
            {
                "timestamp": GAP_MS * number,
                "input_length": 2 * (PREFIX + TAIL),
                "output_length": 100,
                "hash_ids": [first, first + 1, 1000 + number],
            }
        )
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_a_trace_is_replayed_behind_a_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "traced.toml").write_text(TOML)
    (tmp_path / "trace.jsonl").write_text(trace())
    out = tmp_path / "out"
    argv = ["bench", "run", str(tmp_path / "traced.toml"), "--trace", str(tmp_path / "trace.jsonl")]
    argv += ["--policy", "round-robin", "--switch", "live", "--pool", "256MiB"]
    argv += ["--device", "cpu", "--out", str(out), "--json"]
    assert run(argv, dict(os.environ)) == Exit.OK
    document = json.loads(capsys.readouterr().out)
    periods = load_record(out / "bench.json").periods
    assert [period.plan.cache for period in periods] == ["off", "millpond", "millpond", "off"]
    for period in periods:
        check_times(period)
        check_tokens(period)
    told = analyse(periods).told
    num_requests = len(periods) * len(STREAM)
    assert told.requests == {"router": num_requests}
    assert (told.num_both, told.num_different) == (num_requests, 0)
    assert document["data"]["headlines"][0].startswith("millpond against off: requests ")
    assert (out / "report.html").read_text().count("moved by the router") == 1


def check_times(period: Period) -> None:
    """Each request came at its time, and none much later."""
    begin_ms = min(sample.start_ms for sample in period.samples)
    assert [sample.key for sample in period.samples] == [f"replay/{i}/0" for i in range(6)]
    for number, sample in enumerate(period.samples):
        assert sample.error is None
        assert sample.output_tokens == 4
        assert sample.input_tokens == PREFIX + TAIL
        assert sample.start_ms - begin_ms == pytest.approx(GAP_MS * number, abs=500)


def check_tokens(period: Period) -> None:
    """A prefix is local where it was served before, and loaded where another replica was."""
    served: dict[str, set[str]] = {}
    for name, sample in zip(STREAM, period.samples, strict=True):
        holders = served.setdefault(name, set())
        assert sample.routed is not None
        assert sample.routed.sources is not None
        sources = sample.routed.sources
        is_loaded = bool(holders) and sample.replica not in holders
        is_on = period.plan.cache == "millpond"
        where = (period.plan.number, sample.key, sample.replica, holders)
        assert sources.loaded_tokens == (PREFIX if is_loaded and is_on else 0), where
        assert sources.local_tokens == (PREFIX if sample.replica in holders else 0), where
        holders.add(sample.replica)
