"""Why an effect is what it is, by where the tokens came from and by nothing else."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from millpond.bench.effects import Effect
from millpond.bench.observations import WHOLE
from millpond.bench.tokens import Tokens

_BROUGHT: Final = {
    "other": "loaded that other replicas wrote",
    "own": "loaded that the replica itself wrote",
    "found": "found in its own cache or in the one compared",
}
_PERCENT: Final = 100
_LEAST: Final = 0.005
"""Of a prompt: less is not worth a word."""


def cause_of(effect: Effect, tokens: Iterable[Tokens]) -> str:
    """Return what the cache changed for the tokens of an effect's requests."""
    mine = [each for each in tokens if each.group == effect.group]
    if effect.part != WHOLE:
        mine = [each for each in mine if each.part == effect.part]
    base = _shares([each for each in mine if each.cache == effect.base])
    other = _shares([each for each in mine if each.cache == effect.other])
    if base is None or other is None:
        return "where the tokens came from was not told"
    brought = [
        f"{_percent(other[name])} {words}" for name, words in _BROUGHT.items() if name in other
    ]
    loaded = ", ".join(brought) or "nothing loaded"
    before, after = base.get("computed", 0.0), other.get("computed", 0.0)
    if abs(before - after) < _LEAST:
        return f"the tokens do not explain it: {_percent(after)} computed in both, {loaded}"
    return f"{_percent(before)} of the tokens computed without, {_percent(after)} with; {loaded}"


def _shares(tokens: Sequence[Tokens]) -> Mapping[str, float] | None:
    """Return sources by their share of all tokens; None where not everything is told."""
    total = sum(each.total for each in tokens)
    if not total or any(each.unknown for each in tokens):
        return None
    names = ("computed", "local", *_BROUGHT)
    shares = {name: sum(getattr(each, name) for each in tokens) / total for name in names}
    return {name: share for name, share in shares.items() if share >= _LEAST}


def _percent(share: float) -> str:
    return f"{_PERCENT * share:.0f} %"
