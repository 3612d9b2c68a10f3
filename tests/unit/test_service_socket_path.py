"""Who may take a socket path."""

import fcntl
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from millpond.model.errors import SocketUnusable
from millpond.service.socket_path import claim


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a name short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="mp-") as name:
        yield Path(name)


def test_socket_and_folder_are_the_owners_only(folder: Path) -> None:
    path = folder / "new" / "pool.sock"
    place = claim(str(path))
    with place.listen():
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    place.release()
    assert list(path.parent.iterdir()) == []


def test_path_too_long(folder: Path) -> None:
    longest = str(folder / ("x" * 200))[:107]
    place = claim(longest)
    place.listen().close()
    place.release()
    with pytest.raises(SocketUnusable, match="at most 107"):
        claim(longest + "x")


def test_length_counts_bytes(folder: Path) -> None:
    with pytest.raises(SocketUnusable, match="at most 107"):
        claim(str(folder / ("ü" * 50)))


def test_a_file_is_not_replaced(folder: Path) -> None:
    path = folder / "pool.sock"
    path.write_text("precious")
    with pytest.raises(SocketUnusable, match="not a socket"):
        claim(str(path))
    assert path.read_text() == "precious"


def test_a_live_listener_is_named(folder: Path) -> None:
    path = folder / "pool.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(SocketUnusable, match=f"process {os.getpid()}"):
            claim(str(path))


def test_a_dead_listener_is_replaced(folder: Path) -> None:
    path = folder / "pool.sock"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
    place = claim(str(path))
    with place.listen(), socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
    place.release()
    assert not path.exists()


def test_second_claim_is_refused_before_the_first_listens(folder: Path) -> None:
    path = folder / "pool.sock"
    place = claim(str(path))
    with pytest.raises(SocketUnusable, match=f"process {os.getpid()}"):
        claim(str(path))
    place.release()
    claim(str(path)).release()


def test_release_leaves_anothers_socket(folder: Path) -> None:
    path = folder / "pool.sock"
    place = claim(str(path))
    with place.listen(), socket.socket(socket.AF_UNIX) as other:
        path.unlink()
        other.bind(str(path))
        place.release()
        assert path.exists()


def test_lock_on_a_removed_file_counts_for_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder of the lock goes, file and all, between our open and our lock."""
    path, lock_path = folder / "pool.sock", folder / "pool.sock.lock"
    flock = fcntl.flock
    removed: list[bool] = []

    def flock_late(fd: int, operation: int) -> None:
        if not removed:
            lock_path.unlink()
            removed.append(True)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock_late)
    place = claim(str(path))
    assert lock_path.read_text() == f"{os.getpid()}\n"
    place.release()


def test_a_folder_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder, 4711, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(SocketUnusable, match="belongs to uid"):
        claim(str(folder / "pool.sock"))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("path", ["/proc/nowhere/pool.sock", "/dev/null/pool.sock"])
def test_a_folder_that_cannot_be_made(path: str) -> None:
    with pytest.raises(SocketUnusable, match="choose"):
        claim(path)
