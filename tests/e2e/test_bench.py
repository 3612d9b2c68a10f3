"""The benchmark on real engines: periods with and without the cache are what they say."""

import json
import os
from pathlib import Path

import pytest

from millpond.bench.periods import Runner, plan_periods
from millpond.bench.records import Period, load_record
from millpond.bench.scenario import Design, Moved, Scenario, Sessions
from millpond.bench.stages import LiveStage, RestartStage
from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.config import PoolConfig
from millpond.launch.demo import ENGINE_ENVIRON
from millpond.launch.system import SystemOptions
from millpond.launch.tiny import make_hybrid
from millpond.model.limits import MIB
from tests.e2e.engines import HYBRID_ARGS, Replicas, full_blocks

pytestmark = pytest.mark.timeout(600)

LENGTH = 600
SCENARIO = Scenario(
    name="short",
    description="d",
    design=Design(rounds=1, aa_rounds=0, warm_up=2),
    workload=(
        Moved(lengths=(LENGTH,), prompts=2, output_tokens=4),
        Sessions(
            placement="alternate",
            initial_tokens=(LENGTH,),
            sessions=1,
            turns=3,
            growth_tokens=100,
            output_tokens=4,
        ),
    ),
)
TOML = f"""
name = "short"
description = "d"
[design]
rounds = 1
aa_rounds = 0
warm_up = 2
[[workload]]
kind = "moved"
lengths = [{LENGTH}]
prompts = 2
output_tokens = 4
"""


def test_running_replicas_are_measured_with_their_pool_switched(
    hybrid: Replicas, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "short.toml"
    scenario.write_text(TOML)
    system = hybrid.system
    argv = ["bench", "run", str(scenario), "--out", str(tmp_path / "out"), "--json"]
    argv += ["--socket", str(system.socket)]
    for name in (hybrid.a, hybrid.b):
        argv += ["--url", f"{name}={system.replica(name).url}"]
    assert run(argv, dict(os.environ)) == Exit.OK
    document = json.loads(capsys.readouterr().out)
    assert document["data"]["headlines"][1].startswith("moved requests, moved 600: TTFT")
    periods = load_record(tmp_path / "out" / "bench.json").periods
    assert [period.plan.cache for period in periods] == ["off", "millpond", "millpond", "off"]
    for period in periods:
        for sample in period.samples:
            assert sample.error is None
            assert sample.output_tokens == 4
            assert sample.sources is not None
            is_loaded = sample.role == "moved" and period.plan.cache == "millpond"
            assert sample.sources.loaded_tokens == (full_blocks(LENGTH) if is_loaded else 0)
            assert sample.sources.local_tokens == 0
    on = periods[1]
    assert sum(traffic.bytes_read for traffic in on.traffic.values()) > 0
    assert all(traffic.bytes_read == 0 for traffic in periods[3].traffic.values())


@pytest.fixture
def options(tmp_path: Path) -> SystemOptions:
    return SystemOptions(
        model=str(make_hybrid(tmp_path / "model", seed=1).path),
        num_replicas=2,
        device="cpu",
        environ={**os.environ, **ENGINE_ENVIRON},
        pool=PoolConfig(tmp_path / "pool.sock", 256 * MIB, None),
        engine_args=("--enable-prompt-tokens-details", "--max-num-seqs", "4", *HYBRID_ARGS),
        run_dir=tmp_path / "logs",
    )


def tokens_found(period: Period) -> dict[str, int | None]:
    """Return what the engine says it did not compute, by prompt."""
    assert [sample.error for sample in period.samples] == [None] * len(period.samples)
    return {sample.key: sample.cached_tokens for sample in period.samples}


@pytest.mark.engines
def test_a_pool_switched_off_serves_like_an_engine_without_one(
    options: SystemOptions, tmp_path: Path
) -> None:
    """OFF by restart and OFF by switch find the same tokens; ON finds what others computed."""
    off, on, *_, off_live = plan_periods(SCENARIO.design, ["off", "millpond"])
    stage = RestartStage(options, on_progress=lambda _states: None)
    runner = Runner(
        scenario=SCENARIO,
        num_replicas=2,
        folder=tmp_path / "periods",
        run_id="x",
        on_progress=lambda _doing: None,
    )
    runner.run([off], stage)
    with stage.scene("millpond", 1) as scene:
        assert options.pool is not None
        with LiveStage(scene.replicas, socket=options.pool.socket) as live:
            runner.run([on, off_live], live)
    by_restart, with_pool, by_switch = map(tokens_found, runner.periods)
    assert by_restart == by_switch
    moved = [key for key in by_restart if key.endswith("/again")]
    assert [by_restart[key] for key in moved] == [0, 0]
    assert [with_pool[key] for key in moved] == [full_blocks(LENGTH)] * 2
    third_turn = "sessions 600/0/2"
    assert by_restart[third_turn] == full_blocks(LENGTH), "its own cache is there with OFF too"
    assert runner.periods[0].traffic == {}
