"""What the daemon counts, as text for people."""

from collections.abc import Mapping
from typing import cast

Tree = Mapping[str, object]


def tree(parent: Tree, key: str) -> Tree:
    """Return the map below ``key``."""
    return cast("Tree", parent[key])


def number(value: object) -> float:
    """Return a figure of a reply as a number."""
    return float(cast("float", value))


def count(value: object) -> str:
    """Return a count with separators; nothing for None."""
    return "" if value is None else f"{number(value):,.0f}"


def writers(tokens_by_writer: Mapping[str, object]) -> str:
    """Return tokens by writer on one line."""
    return ", ".join(f"{name}: {count(tokens)}" for name, tokens in tokens_by_writer.items())
