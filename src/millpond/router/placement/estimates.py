"""How long a first token takes: three constants, kept up to date from what was seen."""

from dataclasses import dataclass
from typing import Final

_WEIGHT: Final = 0.1
"""Of one request in a constant: about the last ten that say something count."""
_TOKENS_MIN: Final = 64
"""Fewer tokens than this say nothing about the time of one."""
_FLOOR_S: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Constants:
    """Seconds of a request that needs nothing, of computing a token, of loading one.

    The defaults are of a 27B model on one H200 and only matter until something was seen.
    """

    base_s: float = 0.05
    prefill_s_per_token: float = 1e-4
    load_s_per_token: float = 2e-6


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens that stand between a request and its first token.

    ``queued`` are computed for others before it; ``computed`` and ``loaded`` are its own.
    """

    queued: int
    computed: int
    loaded: int


class Estimates:
    """Predicts times to the first token, and learns from those that were measured.

    One constant for computing holds for short and long prompts alike, although attention makes
    the last token of a long one dearer: predictions are compared between replicas for the same
    prompt, where that hardly changes the order.
    """

    def __init__(self, constants: Constants = Constants()) -> None:
        self.constants = constants

    def predict_s(self, work: Work) -> float:
        """Return the seconds to the first token."""
        now = self.constants
        return (
            now.base_s
            + (work.queued + work.computed) * now.prefill_s_per_token
            + work.loaded * now.load_s_per_token
        )

    def learn(self, work: Work, ttft_s: float) -> None:
        """Note a measured time: the constant that accounts for most of it moves towards it."""
        now = self.constants
        num_computed = work.queued + work.computed
        prefill_s = num_computed * now.prefill_s_per_token
        load_s = work.loaded * now.load_s_per_token
        base_s, prefill, load = now.base_s, now.prefill_s_per_token, now.load_s_per_token
        if num_computed >= _TOKENS_MIN and prefill_s >= max(base_s, load_s):
            prefill = _moved(prefill, (ttft_s - base_s - load_s) / num_computed)
        elif work.loaded >= _TOKENS_MIN and load_s >= base_s:
            load = _moved(load, (ttft_s - base_s - prefill_s) / work.loaded)
        else:
            base_s = _moved(base_s, ttft_s - prefill_s - load_s)
        self.constants = Constants(base_s, prefill, load)


def _moved(constant: float, seen: float) -> float:
    return max(_FLOOR_S, constant + _WEIGHT * (seen - constant))
