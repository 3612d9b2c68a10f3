"""Set-up ends in one clear line with the remedy; nothing is downloaded here.

The scripts are copied into a folder of their own, where they believe to be a checkout.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.checks import ROOT

OFFLINE = {
    "MILLPOND_PYTHON": sys.executable,
    "PIP_CONFIG_FILE": os.devnull,
    "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
    "PIP_RETRIES": "0",
}
no_gpu = pytest.mark.skipif(
    Path("/proc/driver/nvidia").exists(), reason="with a GPU, this would set up vLLM"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", folder / "scripts", ignore=shutil.ignore_patterns("__py*"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def set_up(checkout: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / "setup", *flags],
        env={"PATH": os.environ["PATH"], "HOME": str(checkout), **environment},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """Return the one line that a failed set-up says."""
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("set-up failed: ")
    return line


def program(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
    return path


def python_with(folder: Path, lines: str) -> str:
    """Return a Python that runs ``lines`` before install.py, to stand for another machine."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(lines, encoding="utf-8")
    command = f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} "$@"\n'
    return str(program(folder, "python", command))


def test_the_python_that_is_asked_for_does_not_exist(checkout: Path) -> None:
    line = refusal(set_up(checkout, MILLPOND_PYTHON="/nowhere/python"))
    assert "MILLPOND_PYTHON=/nowhere/python" in line


def test_no_python_on_the_path_is_new_enough(checkout: Path) -> None:
    folder = checkout / "bin"
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14", "python"):
        program(folder, name, "#!/bin/sh\nexit 1\n")
    line = refusal(set_up(checkout, PATH=f"{folder}:/bin:/usr/bin"))
    assert "no Python 3.11 to 3.14" in line
    assert "MILLPOND_PYTHON" in line


@pytest.mark.parametrize(
    ("machine", "word"),
    [
        ("import platform; platform.system = lambda: 'Darwin'", "Linux"),
        ("import platform; platform.machine = lambda: 'riscv64'", "x86_64 or aarch64"),
        ("import platform; platform.libc_ver = lambda: ('', '')", "glibc"),
        ("import platform; platform.libc_ver = lambda: ('glibc', '2.17')", "glibc 2.17"),
        (
            "import shutil; shutil.disk_usage = lambda p: type('D', (), {'free': 10**9})",
            "0.9 GiB are free",
        ),
        (
            (
                "import importlib.util as u\nfind = u.find_spec\n"
                "u.find_spec = lambda name: None if name == 'ensurepip' else find(name)"
            ),
            "no venv module",
        ),
    ],
)
def test_machine_that_cannot_run_it(checkout: Path, machine: str, word: str) -> None:
    result = set_up(checkout, MILLPOND_PYTHON=python_with(checkout, machine))
    assert word in refusal(result)


@no_gpu
def test_cuda_on_a_machine_without_a_gpu(checkout: Path) -> None:
    assert "no NVIDIA driver" in refusal(set_up(checkout, "--engine", "cuda"))


def test_failed_download(checkout: Path) -> None:
    line = refusal(set_up(checkout, **OFFLINE))
    assert "could not be downloaded" in line
    assert "build/setup.log" in line
    assert "ERROR" in (checkout / "build" / "setup.log").read_text(encoding="utf-8")


def test_the_second_time_asks_nobody_until_something_changes(checkout: Path) -> None:
    pretend = (
        "import install; stamp = install.ENGINES['cpu'].stamp; stamp.parent.mkdir()\n"
        "stamp.write_text('cpu ' + install._fingerprint())"
    )
    subprocess.run(
        [sys.executable, "-c", pretend],
        env={"PYTHONPATH": str(checkout / "scripts")},
        check=True,
        timeout=20,
    )
    done = set_up(checkout, **OFFLINE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    with (checkout / "pyproject.toml").open("a", encoding="utf-8") as project:
        project.write("# changed\n")
    elsewhere = python_with(checkout, "import platform; platform.system = lambda: 'Plan 9'")
    assert "this is Plan 9" in refusal(set_up(checkout, MILLPOND_PYTHON=elsewhere))


@no_gpu
def test_the_engine_that_was_chosen_is_kept(checkout: Path) -> None:
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / ".millpond-setup").write_text("cuda old", encoding="utf-8")
    assert "no NVIDIA driver" in refusal(set_up(checkout, MILLPOND_PYTHON=sys.executable))
