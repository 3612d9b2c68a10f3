"""A daemon and clients for each test; none outlives it."""

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.world import ClientProcess, Daemon, short_folder


@pytest.fixture
def seed() -> int:
    """What all chance in a test follows from; printed, so that pytest shows it on failure."""
    number = int(os.environ.get("MILLPOND_SEED") or secrets.randbits(32))
    print(f"MILLPOND_SEED={number}")  # noqa: T201
    return number


@pytest.fixture
def socket_path() -> Iterator[str]:
    """A place for a socket."""
    with short_folder() as folder:
        yield str(Path(folder) / "pool.sock")


@pytest.fixture
def daemon(socket_path: str) -> Iterator[Daemon]:
    """A daemon that accepts clients, and of which nothing may be left, nor of them in it."""
    with Daemon(socket_path) as started:
        yield started.wait_ready()
        started.settle()
        started.stop()


@pytest.fixture
def client(socket_path: str) -> Iterator[Callable[[], ClientProcess]]:
    """A maker of client processes."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(ClientProcess(socket_path))
