"""The socket's place in the file system: where it is, and who may take it.

A daemon first locks ``<path>.lock``, which the kernel gives back when the daemon dies, and
keeps it for life. So of two daemons that start at once one wins; a socket file that is found
under the lock is the left-over of a daemon that was killed, and is replaced.
"""

import contextlib
import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import Final

from millpond.model.errors import SocketUnusable
from millpond.model.limits import CLIENTS_MAX
from millpond.service.peercred import peer_credentials

_PATH_BYTES_MAX: Final = 107
"""``sun_path`` holds 108 bytes with its final zero."""
_BACKLOG: Final = CLIENTS_MAX
"""A connect beyond it fails at once, although the daemon lives."""


class SocketClaim:
    """The right to serve at a path, from ``claim`` to ``release``."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd
        self._bound: tuple[int, int] | None = None

    def listen(self) -> socket.socket:
        """Bind and listen, in place of a dead daemon's socket; only the owner may connect."""
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        )
        try:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
            os.fchmod(listener.fileno(), 0o600)  # bind gives the file this mode
            listener.bind(str(self.path))
            listener.listen(_BACKLOG)
            self._bound = _inode(self.path)
        except OSError as error:
            listener.close()
            raise _unusable(self.path, error) from error
        return listener

    def release(self) -> None:
        """Remove the socket, unless it is another's by now, and the lock."""
        with contextlib.suppress(FileNotFoundError):
            if self._bound is not None and _inode(self.path) == self._bound:
                self.path.unlink()
        with contextlib.suppress(FileNotFoundError):
            _lock_path(self.path).unlink()  # while we hold it: see _lock
        os.close(self._lock_fd)


def claim(socket_path: str) -> SocketClaim:
    """Take ``socket_path`` for this process, making its folder (mode 0700) where missing.

    Raises ``SocketUnusable`` with the remedy: too long, not writable, served by another
    daemon (whose pid it names), or something that is not a socket.
    """
    path = Path(socket_path)
    if len(os.fsencode(socket_path)) > _PATH_BYTES_MAX:
        raise SocketUnusable(
            f"socket path of {len(os.fsencode(socket_path))} bytes, at most {_PATH_BYTES_MAX}: "
            f"choose a shorter one than {socket_path}"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.parent.stat().st_uid
        if owner not in (0, os.geteuid()):  # who could put another socket in place of ours
            raise SocketUnusable(f"{path.parent} belongs to uid {owner}: choose another path")
        lock_fd = _lock(path)
    except OSError as error:
        raise _unusable(path, error) from error
    place = SocketClaim(path, lock_fd)
    try:
        _refuse_if_in_use(path)
    except BaseException:
        place.release()
        raise
    return place


def _lock(path: Path) -> int:
    """Return a descriptor that holds the lock file; it names this process.

    The winner removes the file when it goes, so that a lock may be got on a file that is
    not there any more: then try again on the one that is.
    """
    lock_path = _lock_path(path)
    while True:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                status = os.fstat(fd)
                if _inode(lock_path) == (status.st_dev, status.st_ino):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                    return fd
        except BlockingIOError:
            holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(fd)
            raise _served(path, holder) from None
        except OSError:
            os.close(fd)
            raise
        os.close(fd)


def _refuse_if_in_use(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise SocketUnusable(f"{path} exists and is not a socket: choose another path")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return  # left over by a daemon that was killed
        except BlockingIOError:
            raise _served(path, "unknown") from None
        except OSError as error:
            raise _unusable(path, error) from error
        raise _served(path, str(peer_credentials(probe).pid))


def _served(path: Path, pid: str) -> SocketUnusable:
    return SocketUnusable(
        f"{path} is served by process {pid} already: use that pool, stop it, or choose another path"
    )


def _unusable(path: Path, error: OSError) -> SocketUnusable:
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        remedy = "choose a path in a folder that you may write to"
    else:
        remedy = "choose another path"
    return SocketUnusable(f"socket {path} can't be used ({error.strerror}): {remedy}")


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _inode(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return status.st_dev, status.st_ino
