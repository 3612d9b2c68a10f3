"""Tests that need a GPU are never skipped silently."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import num_gpus
from tests.meta.checks import ROOT


@pytest.mark.skipif(num_gpus() > 0, reason="there is a CUDA device, so nothing is skipped")
def test_skipped_gpu_tests_are_counted_at_the_end(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    for folder, num_tests in (("gpu", 2), ("unit", 1)):
        lines = [f"def test_{number}(): pass" for number in range(num_tests)]
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"test_{folder}.py").write_text("\n".join(lines), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "GPU: 2 tests NOT RUN, there is no CUDA device" in result.stdout
    assert "1 passed, 2 skipped" in result.stdout
