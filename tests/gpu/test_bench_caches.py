"""Four caches in one run on a GPU: with each of them a moved request finds what was computed."""

import json
import os
from pathlib import Path

import pytest

from millpond.bench.records import load_record
from millpond.bench.stages import CACHES, OFF
from millpond.cli import run
from millpond.cli.exits import Exit
from millpond.launch.resources import visible_gpus
from millpond.launch.rivals import SHARED_MEMORY

pytestmark = [pytest.mark.engines, pytest.mark.timeout(1200)]

LENGTH = 3000
FULL_BLOCKS = LENGTH // 256 * 256
"""All three take blocks of 256 tokens where the model has attention alone."""
TOML = f"""
name = "short"
description = "d"
[design]
rounds = 1
aa_rounds = 0
warm_up = 2
settle_s = 1.0
[[workload]]
kind = "moved"
lengths = [{LENGTH}]
prompts = 3
output_tokens = 4
gap_s = 1.0
"""
ENGINE_ARGS = ("--enforce-eager", "--kv-cache-memory-bytes", str(2**30))


def shared_files() -> set[str]:
    """Return what lies in shared memory and has a name that a cache would give it."""
    prefixes = ("millpond", "vllm_offload", "lmcache")
    return {path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(prefixes)}


def test_moved_requests_find_their_prefix_with_each_of_the_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lmcache")
    before = shared_files()
    (tmp_path / "short.toml").write_text(TOML)
    out = tmp_path / "out"
    argv = ["bench", "run", str(tmp_path / "short.toml"), "--out", str(out), "--json"]
    argv += ["--tiny", "attention", "--pool", "1GiB", "--caches", ",".join(CACHES)]
    gpus = visible_gpus(os.environ)
    # Both replicas on one GPU, with a fraction of it each: as it is on a machine with one.
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": f"{gpus[0]},{gpus[0]}"}
    assert run([*argv, "--", *ENGINE_ARGS, "--gpu-memory-utilization", "0.2"], environ) == Exit.OK
    effects = json.loads(capsys.readouterr().out)["data"]["analysis"]["effects"]
    assert {each["other"] for each in effects} == set(CACHES) - {OFF}
    periods = load_record(out / "bench.json").periods
    assert [period.plan.cache for period in periods] == [*CACHES, *reversed(CACHES)]
    for period in periods:
        assert [sample.error for sample in period.samples] == [None] * 6
        found = {sample.key: sample.cached_tokens for sample in period.samples}
        for key, num_tokens in found.items():
            is_found = period.plan.cache != OFF and key.endswith("/again")
            assert num_tokens == (FULL_BLOCKS if is_found else 0), (period.plan.cache, key)
    assert shared_files() == before, "nothing is left in shared memory"
