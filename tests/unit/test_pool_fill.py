"""What a filled pool holds is told whole; run as its user does, with a small pool."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.meta.checks import ROOT

GIB = 2**30
PAGES, STATE = 784 * 64 * 1024, 153_944_064
NUM_BLOCKS = 131_072 // 784


def fills(*arguments: str) -> list[dict[str, Any]]:
    """Return the figures at 8,192 tokens a step: all states, and those of decision 13."""
    command = [sys.executable, "benchmarks/pool_fill.py", "--step-tokens", "8192", "--json"]
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(done.stdout)["data"]["fills"]


def test_one_prompt_that_fits_is_all_usable() -> None:
    """Sixteen steps end within it; with the rule, states are stored at seven of those."""
    for each, num_inner in zip(
        fills("--size", "20GiB", "--turnovers", "0.1"), (16, 7), strict=True
    ):
        shares = {name: ratio * 20 * GIB for name, ratio in each["shares"].items()}
        assert (each["num_prompts"], each["num_evictions"]) == (1, 0)
        assert shares["usable"] == pytest.approx(NUM_BLOCKS * PAGES)
        assert shares["needed"] == pytest.approx(STATE)
        assert shares["inner"] == pytest.approx(num_inner * STATE)
        assert shares["stranded"] == 0


def test_a_pool_that_has_evicted_holds_more_of_use_with_the_rule() -> None:
    every, ruled = fills("--size", "20GiB", "--turnovers", "4")
    for each in (every, ruled):
        assert each["num_evictions"] > 2 * 20 * GIB // PAGES, "overwritten more than twice"
        assert sum(each["shares"].values()) == pytest.approx(1)
        assert min(each["shares"].values()) >= 0
    assert ruled["shares"]["usable"] > every["shares"]["usable"] + 0.05
