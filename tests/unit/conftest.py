"""What unit tests share. Those of the connector import vLLM, without its compiler.

With the compiler torch imports modules of its own that warn of deprecations, which fail tests.
"""

import os

import pytest

from millpond.bench import resampling

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw less often: intervals are rougher, and the tests several times as fast."""
    monkeypatch.setattr(resampling, "RESAMPLES", 300)
