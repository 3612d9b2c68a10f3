"""Values as they are written in a file, a variable or a flag: from text to what is meant.

Each function returns the value or raises ``ValueError`` that says what to write; the caller
adds the key, the value and its source.
"""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, cast

from millpond.model.limits import GIB, KIB, MIB, NAME_LENGTH_MAX, POOL_BYTES_MIN

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")
_UNITS: Final = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024 * GIB}


def parse_size(value: object) -> int:
    """Return bytes for a number of bytes or a text such as ``"256MiB"``; else ``ValueError``."""
    if isinstance(value, int) and not isinstance(value, bool):
        written = str(value)
    elif isinstance(value, str):
        written = value.strip()
    else:
        raise ValueError("not a size; write for example 256MiB")
    match = _SIZE.fullmatch(written)
    if match is None or match[2] not in _UNITS:
        raise ValueError("not a size; write a number and B, KiB, MiB, GiB or TiB, as in 256MiB")
    size = float(match[1]) * _UNITS[match[2]]
    if size != int(size):
        raise ValueError("not a whole number of bytes")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Return a size in the largest unit that leaves a whole number; ``parse_size`` reads it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return f"{size_bytes}B"


def pool_size(value: object) -> int:
    """Return the bytes of a pool, which has a least size."""
    size = parse_size(value)
    if size < POOL_BYTES_MIN:
        raise ValueError(f"too small; a pool has at least {format_size(POOL_BYTES_MIN)}")
    return size


def text(value: object) -> str:
    """Return a text that is not blank."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError("not a text")
    return value


def path(value: object) -> Path:
    """Return a path, with ``~`` expanded."""
    if isinstance(value, Path):
        return value
    return Path(text(value)).expanduser()


def name(value: object) -> str:
    """Return a replica's name."""
    written = text(value)
    if len(written) > NAME_LENGTH_MAX or not written.isprintable():
        raise ValueError(f"not a name; use at most {NAME_LENGTH_MAX} printable characters")
    return written


def parse_replica(value: object) -> tuple[str, str]:
    """Return name and address of a text such as ``"a=http://127.0.0.1:8001"``.

    The router reads the rest of an address: ``,events=...``.
    """
    replica, _, url = value.partition("=") if isinstance(value, str) else ("", "", "")
    try:
        return name(replica), text(url)
    except ValueError:
        raise ValueError(
            f"{value!r} is no replica; write for example a=http://127.0.0.1:8001"
        ) from None


_ITEM_ENDS: Final = re.compile(r"\s*,\s*(?!(?:events|replay)=)")


def replicas(value: object) -> dict[str, str]:
    """Return addresses by name, from a list of ``NAME=URL`` or one text with commas between."""
    if isinstance(value, str):
        items: Sequence[object] = _ITEM_ENDS.split(value.strip())
    elif isinstance(value, list | tuple):
        items = cast("Sequence[object]", value)
    else:
        items = ()
    if not items:
        raise ValueError('not a list of replicas; write for example ["a=http://127.0.0.1:8001"]')
    named = [parse_replica(item) for item in items]
    if len(dict(named)) < len(named):
        raise ValueError("two replicas have the same name")
    return dict(named)


_BOOLEANS: Final = {
    **dict.fromkeys(("true", "1", "yes", "on"), True),
    **dict.fromkeys(("false", "0", "no", "off"), False),
}


def boolean(value: object) -> bool:
    """Return a boolean; the words true, yes, on, 1 and their opposites stand for one."""
    word = str(value).lower() if isinstance(value, str | bool) else ""
    if word not in _BOOLEANS:
        raise ValueError("not a boolean; write true or false")
    return _BOOLEANS[word]


def integer(low: int, high: int) -> Callable[[object], int]:
    """Return a parser of whole numbers from ``low`` to ``high``."""

    def parse(value: object) -> int:
        try:
            number = int(value) if isinstance(value, str | int) else None
        except ValueError:
            number = None
        if number is None or isinstance(value, bool) or not low <= number <= high:
            raise ValueError(f"not a whole number from {low} to {high}")
        return number

    return parse


def seconds(low: float, high: float) -> Callable[[object], float]:
    """Return a parser of seconds from ``low`` to ``high``."""
    return _number(low, high, "a number of seconds")


def ratio(low: float) -> Callable[[object], float]:
    """Return a parser of shares from ``low`` to 1."""
    return _number(low, 1, "a share")


def _number(low: float, high: float, what: str) -> Callable[[object], float]:
    def parse(value: object) -> float:
        try:
            number = float(value) if isinstance(value, str | int | float) else math.nan
        except ValueError:
            number = math.nan
        if isinstance(value, bool) or not low <= number <= high:
            raise ValueError(f"not {what} from {low:g} to {high:g}")
        return number

    return parse


def choice(*words: str) -> Callable[[object], str]:
    """Return a parser that accepts ``words`` only."""

    def parse(value: object) -> str:
        if value not in words:
            raise ValueError(f"not one of {', '.join(words)}")
        return cast("str", value)

    return parse
