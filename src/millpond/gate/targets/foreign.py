"""What all targets share: versions that were read, symbols by name, and waiting."""

import importlib
import importlib.metadata
import inspect
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from millpond.gate.errors import CannotTest, NoPackage, UnknownVersion
from millpond.gate.paths import Promise, Room
from millpond.transfer.copies import Direction

_POLL_S: Final = 0.0002
_FAILS_TO_IMPORT: Final = (ImportError, OSError, RuntimeError, AttributeError)
"""What packages raise that were built for another machine or another torch."""


def known_version(distributions: Sequence[str], known: Sequence[str]) -> str:
    """Return the version of the first of ``distributions`` that is installed.

    Raises ``NoPackage`` where none is, ``UnknownVersion`` where it is not among ``known`` (a
    known version stands for all that it is a prefix of: "0.26" for 0.26.1 and 0.26.0+cu130).
    """
    readable = ", ".join(known)
    for name in distributions:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if not any(re.match(rf"{re.escape(one)}(?!\d)", version) for one in known):
            raise UnknownVersion(
                f"{name} {version} is installed; this target knows {readable}: install one of"
                " these beside Millpond"
            )
        return version
    raise NoPackage(
        f"{distributions[0]} is not installed; this target knows {readable}: install one of these"
    )


def symbol(module: str, name: str) -> Any:  # noqa: ANN401 # foreign code has no types here
    """Return what another project's module calls ``name``; ``CannotTest`` without it."""
    try:
        return getattr(importlib.import_module(module), name)
    except _FAILS_TO_IMPORT as error:
        raise CannotTest(
            f"{module}.{name} cannot be had ({type(error).__name__}: {error}); is the package"
            " built for this machine and this torch?"
        ) from error


def expect_parameters(function: Callable[..., Any], *names: str) -> None:
    """Raise ``CannotTest`` unless ``function`` can be called with ``names``, in this order.

    "a|b" stands for either name. Further parameters must have defaults.
    """
    found = list(inspect.signature(function).parameters.values())
    optional = all(
        parameter.default is not inspect.Parameter.empty
        or parameter.kind in {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
        for parameter in found[len(names) :]
    )
    named = len(found) >= len(names) and all(
        parameter.name in name.split("|") for parameter, name in zip(found, names, strict=False)
    )
    if not named or not optional:
        raise CannotTest(
            f"{getattr(function, '__qualname__', function)} takes"
            f" ({', '.join(p.name for p in found)}), not ({', '.join(names)}): this target was"
            " written for another version"
        )


def expect_cuda(room: Room) -> None:
    """Raise ``CannotTest`` unless the room's pages are side by side on the current device."""
    device = room.pages.device
    if device.type != "cuda":
        raise CannotTest(f"the pages are on {device}; this target needs a CUDA device")
    if device.index != torch.cuda.current_device():
        raise CannotTest(f"the pages are on {device}, which is not current, as in an engine")
    if not room.pages.is_contiguous():
        raise CannotTest("the pages are not contiguous")


def expect_registered(host: torch.Tensor) -> torch.Tensor:
    """Return ``host``; raises ``CannotTest`` where CUDA does not know its memory.

    Copies from and to memory that is not registered block the host, and would be judged for
    that instead of for their order.
    """
    if not host.is_pinned():
        raise CannotTest(
            "the target's host memory is not registered with CUDA: raise the limit of locked"
            " memory (ulimit -l)"
        )
    return host


def pinned_pages(room: Room) -> torch.Tensor:
    """Return zeroed host pages, registered, from torch's allocator."""
    size = (room.num_host_pages, room.page_bytes)
    return torch.zeros(size, dtype=torch.uint8, pin_memory=True)


def wait_until(is_done: Callable[[], bool], timeout_s: float) -> bool:
    """Ask until ``is_done``, as an engine does at every step; False when the time ran out."""
    deadline_s = time.monotonic() + timeout_s
    while not is_done():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


class AskedCompletion:
    """A completion that a path's users learn of by asking: ``is_done`` is their question.

    Keeps ``keep`` alive: what the copy still reads (E6).
    """

    def __init__(self, is_done: Callable[[], bool], keep: object = None) -> None:
        self._is_done = is_done
        self._keep = keep

    def is_done(self) -> bool:
        """As ``Completion.is_done``."""
        return self._is_done()

    def wait(self, timeout_s: float) -> bool:
        """As ``Completion.wait``."""
        return wait_until(self._is_done, timeout_s)


def behind_current_stream(keep: object = None) -> AskedCompletion:
    """Return a completion behind all that was enqueued so far to the current stream."""
    event = torch.cuda.Event()
    event.record()
    return AskedCompletion(event.query, keep)


class Target:
    """What the gate asks of a path before it is opened."""

    def __init__(
        self,
        name: str,
        promise: Promise,
        versions: Mapping[str, str],
        directions: Sequence[Direction] = tuple(Direction),
    ) -> None:
        self.name = name
        self.promise = promise
        self.versions: Mapping[str, str] = {**versions, "torch": str(torch.__version__)}
        self.directions = directions
