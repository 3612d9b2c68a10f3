"""Real engines, started once a system and shared by all tests that need it."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.engines import EXACT, OLDER_PYTHON, Gates, Replicas, Stage

SYSTEMS = ("shared", "attention", "guarded", "gated", "parallel", "telling", "older", "as_026")
"""In the order in which tests run, so that each starts once."""
SYSTEM_OF_FIXTURE = {"hybrid": "shared", "sliding": "shared"} | {s: s for s in SYSTEMS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests of one system beside each other; those of none come first."""
    here = Path(__file__).parent
    mine = [i for i, item in enumerate(items) if here in item.path.parents]
    in_order = sorted((items[i] for i in mine), key=_place)
    for i, item in zip(mine, in_order, strict=True):
        items[i] = item


def _place(item: pytest.Item) -> int:
    assert isinstance(item, pytest.Function)
    call = getattr(item, "callspec", None)
    names = [*item.fixturenames, *(call.params.values() if call else ())]
    systems = [SYSTEM_OF_FIXTURE[n] for n in names if isinstance(n, str) and n in SYSTEM_OF_FIXTURE]
    return 1 + SYSTEMS.index(systems[0]) if systems else 0


@pytest.fixture(scope="session")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    with tempfile.TemporaryDirectory(prefix="millpond-test-") as folder:
        made = Stage(Path(folder), keeps_logs=lambda: request.session.testsfailed > 0)
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def hybrid(stage: Stage) -> Replicas:
    """Gated delta net and attention, blocks of 256 tokens."""
    return Replicas(stage.system("shared"))


@pytest.fixture
def sliding(stage: Stage) -> Replicas:
    """Windows of 512 tokens and full attention, two engine blocks to one of Millpond's."""
    return Replicas(stage.system("shared"), "c", "d", EXACT)


@pytest.fixture
def attention(stage: Stage) -> Replicas:
    """Full attention, four engine blocks to one of Millpond's."""
    return Replicas(stage.system("attention"), tolerance=EXACT)


@pytest.fixture
def guarded(stage: Stage) -> Replicas:
    """Hybrid engines that sum every page they store and compare every one they load."""
    return Replicas(stage.system("guarded"))


@pytest.fixture
def gated(stage: Stage) -> Replicas:
    """Hybrid engines with little memory whose copies are held back through ``gates``."""
    return Replicas(stage.system("gated"))


@pytest.fixture
def parallel(stage: Stage) -> Replicas:
    """One hybrid engine on two tensor-parallel ranks."""
    return Replicas(stage.system("parallel"), b="a")


@pytest.fixture
def telling(stage: Stage) -> Replicas:
    """Engines that publish what their caches hold: two hybrid ones, and others."""
    return Replicas(stage.system("telling"))


@pytest.fixture
def older(stage: Stage) -> Replicas:
    """Hybrid engines of vLLM 0.27.1."""
    needs_older_engine()
    return Replicas(stage.system("older"))


@pytest.fixture
def as_026(stage: Stage) -> Replicas:
    """Engines with the local lookup of vLLM 0.26: ``a`` as it was there, ``b`` mended."""
    needs_older_engine()
    return Replicas(stage.system("as_026"))


def needs_older_engine() -> None:
    if not OLDER_PYTHON.exists():
        pytest.fail(f"no {OLDER_PYTHON}: run scripts/setup --engine cpu-0.27", pytrace=False)


@pytest.fixture
def gates(stage: Stage) -> Gates:
    return stage.gates


@pytest.fixture(params=["hybrid", "sliding", pytest.param("attention", marks=pytest.mark.engines)])
def replicas(request: pytest.FixtureRequest) -> Replicas:
    """Each kind of model in turn."""
    return request.getfixturevalue(request.param)
