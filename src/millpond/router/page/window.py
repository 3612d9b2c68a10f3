"""What the live page remembers: a bounded number of the requests that finished last."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from millpond.router.metrics import main_source
from millpond.router.prompts import GENERATING
from millpond.router.records import Attribution, Record

_SHOWN_MAX: Final = 50
_SAMPLES_MAX: Final = 1000
_TEXT_MAX: Final = 100
"""Of a request's name, which clients choose and may make as long as a head."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request whose tokens the pool's reports tell.

    ``ttft_s`` is None unless it was a stream and the tokens are those of one prompt: others
    have no time that belongs to them. ``source`` is where most of the tokens came from.
    """

    arrived_at: float
    tokens: Attribution
    source: str
    is_moved: bool
    ttft_s: float | None


@dataclass(frozen=True, slots=True)
class Shown:
    """A line of the list of last requests. ``tokens`` is None where nothing was generated."""

    arrived_at: float
    request_id: str
    replica: str | None
    holder: str | None
    is_moved: bool
    status: int | None
    ended: str
    ttft_s: float | None
    tokens: Attribution | None


class Window:
    """The last requests of those that generate, newest last; the older ones are forgotten.

    ``samples`` are only those that are surely attributed, and last longer;
    ``num_unreported`` counts the answers of which that cannot be said.
    """

    def __init__(self, *, shown_max: int = _SHOWN_MAX, samples_max: int = _SAMPLES_MAX) -> None:
        self._shown: deque[Shown] = deque(maxlen=shown_max)
        self._samples: deque[Sample] = deque(maxlen=samples_max)
        self.num_unreported = 0

    @property
    def shown(self) -> Sequence[Shown]:
        """The last requests, however they ended."""
        return tuple(self._shown)

    @property
    def samples(self) -> Sequence[Sample]:
        """The last requests that count."""
        return tuple(self._samples)

    def note(self, record: Record) -> None:
        """Take a finished request."""
        if record.path not in GENERATING:
            return
        tokens = record.attribution
        self._shown.append(
            Shown(
                arrived_at=record.arrived_at,
                request_id=record.request_id[:_TEXT_MAX],
                replica=record.replica,
                holder=record.holder,
                is_moved=record.is_moved,
                status=record.status,
                ended=record.ended.value,
                ttft_s=record.ttft_s,
                tokens=tokens,
            )
        )
        if tokens is None:
            return
        if tokens.source != "pool":
            self.num_unreported += 1
        else:
            ttft_s = record.ttft_s if tokens.is_of_one_prompt else None
            self._samples.append(
                Sample(record.arrived_at, tokens, main_source(tokens), record.is_moved, ttft_s)
            )
