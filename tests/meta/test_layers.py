"""The rooms import downwards only; the contracts are in pyproject.toml.

Each contract is shown to fail on a small package of the same rooms with one import too many.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.checks import ROOT

LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")
ROOMS = (
    "arena",
    "cli",
    "config",
    "connector",
    "launch",
    "model",
    "pool",
    "router",
    "router/placement",
    "service",
    "service/client",
    "service/server",
    "transfer",
)


def run_contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [LINT_IMPORTS, "--no-cache", "--no-logo", str(ROOT / "pyproject.toml")],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def make_rooms(folder: Path) -> Path:
    """Make a package of empty rooms and return its folder."""
    package = folder / "millpond"
    for room in ("", *ROOMS):
        (package / room).mkdir(parents=True, exist_ok=True)
        (package / room / "__init__.py").write_text("", encoding="utf-8")
    return package


def test_the_rooms_keep_the_contracts() -> None:
    result = run_contracts(ROOT / "src")
    assert result.returncode == 0, result.stdout + result.stderr


def test_empty_rooms_keep_the_contracts(tmp_path: Path) -> None:
    make_rooms(tmp_path)
    result = run_contracts(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("room", "line", "contract"),
    [
        ("model", "import millpond.pool", "Imports go down the rooms only"),
        ("pool", "import millpond.arena", "Imports go down the rooms only"),
        ("transfer", "import millpond.service", "Imports go down the rooms only"),
        ("connector", "import millpond.launch", "Imports go down the rooms only"),
        ("service", "import torch.cuda", "Only transfer, connector and gate see torch"),
        ("launch", "def f():\n    import torch", "Only transfer, connector and gate see torch"),
        ("transfer", "import vllm", "Only the connector sees vLLM"),
        ("cli", "from vllm import LLM", "Only the connector sees vLLM"),
        ("model", "import asyncio", "Model and pool have no clock, socket, thread, chance or log"),
        ("pool", "import time", "Model and pool have no clock, socket, thread, chance or log"),
        ("pool", "import logging", "Model and pool have no clock, socket, thread, chance or log"),
        ("service/client", "import millpond.pool", "Clients know the wire, not the daemon"),
        ("service/client", "from .. import server", "Clients know the wire, not the daemon"),
        ("surprise", "", "Imports go down the rooms only"),
    ],
)
def test_one_import_too_many_breaks_its_contract(
    tmp_path: Path, room: str, line: str, contract: str
) -> None:
    package = make_rooms(tmp_path)
    (package / room).mkdir(exist_ok=True)
    (package / room / "__init__.py").write_text(line + "\n", encoding="utf-8")
    result = run_contracts(tmp_path)
    assert result.returncode != 0
    assert f"{contract} BROKEN" in result.stdout


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("connector", "import vllm, torch, millpond.transfer"),
        ("transfer", "import torch"),
        ("service/server", "import millpond.pool, asyncio, time"),
    ],
)
def test_what_is_meant_is_allowed(tmp_path: Path, room: str, line: str) -> None:
    package = make_rooms(tmp_path)
    (package / room / "__init__.py").write_text(line + "\n", encoding="utf-8")
    result = run_contracts(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
