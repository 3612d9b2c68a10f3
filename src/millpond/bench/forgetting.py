"""Having caches forget: the engines' own, and those that replicas share beside the pool."""

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import httpx

from millpond.launch.rivals import Rival, VllmFs
from millpond.model.errors import RequestTimedOut, SetupError

_ANSWER_S_MAX: Final = 60.0
_WAIT_S_MAX: Final = 60.0
_POLL_S: Final = 0.02


class Forgets(Protocol):
    """A cache that replicas share."""

    def flush(self) -> None:
        """Forget every prefix; raises ``ExpectedError`` where it can't be told to."""
        ...


@dataclass(frozen=True, slots=True)
class LmcacheMemory:
    """The memory of LMCache's server at ``url``."""

    url: str

    def flush(self) -> None:
        """Forget every prefix, once nothing is being written.

        Raises ``SetupError`` for what is no server of LMCache, ``RequestTimedOut`` after a
        minute of writes.
        """
        deadline = time.monotonic() + _WAIT_S_MAX
        try:
            while self._num_written() > 0:
                if time.monotonic() > deadline:
                    raise RequestTimedOut(f"LMCache still writes after {_WAIT_S_MAX:g} s")
                time.sleep(_POLL_S)
            answer = httpx.post(f"{self.url}/cache/clear", timeout=_ANSWER_S_MAX, trust_env=False)
            answer.raise_for_status()
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise SetupError(
                f"{self.url} can't forget its prefixes ({error!r}): it is no server of LMCache, "
                "or of a version that is not known here; 0.5.3 is"
            ) from error

    def _num_written(self) -> int:
        answer = httpx.get(f"{self.url}/status", timeout=_ANSWER_S_MAX, trust_env=False)
        answer.raise_for_status()
        return int(answer.json()["storage_manager"]["l1_manager"]["write_locked_count"])


@dataclass(frozen=True, slots=True)
class TieredFiles:
    """What replicas at ``urls`` keep in their own memory and in files below ``folder``."""

    urls: Sequence[str]
    folder: Path

    def flush(self) -> None:
        """Forget every prefix; raises as ``flush_engine`` does."""
        for url in self.urls:
            flush_engine(url, with_connector=True)  # writes to files end before it answers
        deadline = time.monotonic() + _WAIT_S_MAX
        while entries := list(self.folder.iterdir()) if self.folder.exists() else []:
            # An engine may still touch a folder while it is removed: then it is there again.
            for path in entries:
                _remove(path)
            if time.monotonic() > deadline:
                raise RequestTimedOut(f"{entries[0]} can't be removed in {_WAIT_S_MAX:g} s")
            time.sleep(_POLL_S)


def _remove(path: Path) -> None:
    """Remove a file or a folder, as far as it goes."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def memory_of(rival: Rival, urls: Sequence[str]) -> Forgets:
    """Return what has to forget of a rival's cache that replicas at ``urls`` share."""
    if isinstance(rival, VllmFs):
        return TieredFiles(urls, rival.files)
    return LmcacheMemory(rival.url)


def flush_engine(url: str, *, with_connector: bool = False) -> None:
    """Have an engine forget every prefix, and with ``with_connector`` what its connector has.

    It refuses while blocks are held, as by copies that have not ended: then it is asked again.
    Raises ``SetupError`` where it can't be told to, ``httpx.HTTPError`` where it is away, and
    ``RequestTimedOut`` where it refuses for a minute.
    """
    deadline = time.monotonic() + _WAIT_S_MAX
    params = {"reset_external": "true"} if with_connector else None
    while True:
        answer = httpx.post(
            f"{url}/reset_prefix_cache", params=params, timeout=_ANSWER_S_MAX, trust_env=False
        )
        if answer.status_code in (404, 405):
            raise SetupError(
                f"{url} can't forget its prefixes, and what one period left would speed up the "
                "next: start it with VLLM_SERVER_DEV_MODE=1"
            )
        answer.raise_for_status()
        if not _refused(answer):
            return
        if time.monotonic() > deadline:
            raise RequestTimedOut(f"{url} still holds blocks after {_WAIT_S_MAX:g} s")
        time.sleep(_POLL_S)


def _refused(answer: httpx.Response) -> bool:
    """Return whether blocks were held; what is no vLLM may answer with anything, or nothing."""
    try:
        return answer.json() == {"success": False}
    except ValueError:
        return False
