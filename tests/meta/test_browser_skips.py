"""Tests that need a browser are never skipped silently."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import chromium
from tests.meta.checks import ROOT

TESTS = "import pytest\n@pytest.mark.browser\ndef test_one(): pass\ndef test_other(): pass\n"


def test_skipped_browser_tests_are_counted_at_the_end(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_page.py").write_text(TESTS, encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "BROWSER: 1 tests NOT RUN, there is no Chromium" in result.stdout
    assert "1 passed, 1 skipped" in result.stdout


@pytest.mark.parametrize(
    "name",
    [
        "chromium_headless_shell-1255/chrome-headless-shell-linux64/chrome-headless-shell",
        "chromium_headless_shell-1148/chrome-linux/headless_shell",
        "chromium-1255/chrome-linux/chrome",
    ],
)
def test_a_browser_of_playwrights_own_is_found_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", os.devnull)
    assert chromium() is None
    program = tmp_path / name
    program.parent.mkdir(parents=True)
    program.write_text("not to be run", encoding="utf-8")
    other = program.parent / "chrome_sandbox"
    other.write_text("a program, and no browser", encoding="utf-8")
    other.chmod(0o755)
    assert chromium() is None, "nothing that can be run"
    program.chmod(0o755)
    assert chromium() == str(program)
