"""What the live page shows, as the JSON that it asks for."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from millpond import __version__
from millpond.router.metrics import tokens_by_source
from millpond.router.page.verdict import Verdict, judge
from millpond.router.page.window import Sample, Shown, Window
from millpond.router.replicas import Replica

_DOTS_MAX: Final = 300
_P90_MIN: Final = 10
"""Of fewer times the 90th percentile is only the longest."""
_SOURCES: Final = ("computed", "local", "pool-own", "pool-other")


@dataclass(frozen=True, slots=True)
class About:
    """The router itself. ``started_at`` and ``now`` are seconds since 1970."""

    policy: str
    identity: str
    started_at: float
    now: float
    has_pool: bool


def page_state(about: About, replicas: Iterable[Replica], window: Window) -> dict[str, object]:
    """Return all that the page shows; docs/ROUTER.md has the fields."""
    samples = window.samples
    verdict = judge(samples, has_pool=about.has_pool, num_unreported=window.num_unreported)
    return {
        "version": __version__,
        "now": about.now,
        "started_at": about.started_at,
        "policy": about.policy,
        "prefix_identity": about.identity,
        "pool": "joined" if about.has_pool else "away",
        "verdict": _verdict(verdict),
        "replicas": [_replica(each) for each in replicas],
        "num_reported": len(samples),
        "reported_since": samples[0].arrived_at if samples else None,
        "prompt_tokens": _prompt_tokens(samples),
        "ttft": _times(samples),
        "requests": [_request(each) for each in reversed(window.shown)],
    }


def _verdict(verdict: Verdict) -> dict[str, object]:
    return {
        "finding": verdict.finding.value,
        "sentence": verdict.sentence,
        "counted": verdict.counted,
        "saved_s": verdict.saved_s,
    }


def _replica(replica: Replica) -> dict[str, object]:
    # Its address is nobody's business who may only send requests.
    return {key: value for key, value in replica.statistics().items() if key != "url"}


def _prompt_tokens(samples: Sequence[Sample]) -> dict[str, dict[str, object]]:
    """Return for each reader the tokens computed, found in its own cache, and by writer."""
    found: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
    for each in samples:
        tokens = each.tokens
        own, writers = found.setdefault(tokens.reader, ({"computed": 0, "local": 0}, {}))
        own["computed"] += tokens.computed_tokens
        own["local"] += tokens.local_tokens
        for writer, num_tokens in tokens.writers.items():
            writers[writer] = writers.get(writer, 0) + num_tokens
    return {
        reader: {**own, "writers": dict(sorted(writers.items()))}
        for reader, (own, writers) in sorted(found.items())
    }


def _times(samples: Sequence[Sample]) -> dict[str, object]:
    """Return times to the first token, by where most of a prompt's tokens came from."""
    timed = [
        (each.source, each.tokens.prompt_tokens, each.ttft_s)
        for each in samples
        if each.ttft_s is not None
    ]
    groups: Mapping[str, list[tuple[int, float]]] = {source: [] for source in _SOURCES}
    for source, num_tokens, ttft_s in timed:
        groups[source].append((num_tokens, ttft_s))
    return {
        "groups": [_group(source, times) for source, times in groups.items() if times],
        "dots": [
            [source, num_tokens, round(1000 * ttft_s, 1)]
            for source, num_tokens, ttft_s in timed[-_DOTS_MAX:]
        ],
    }


def _group(source: str, times: Sequence[tuple[int, float]]) -> dict[str, object]:
    ordered = sorted(ttft_s for _, ttft_s in times)
    p90_s = ordered[math.ceil(0.9 * len(ordered)) - 1] if len(ordered) >= _P90_MIN else None
    return {
        "source": source,
        "num_requests": len(ordered),
        "prompt_tokens_median": round(median(num_tokens for num_tokens, _ in times)),
        "ttft_ms_median": round(1000 * median(ordered), 1),
        "ttft_ms_p90": None if p90_s is None else round(1000 * p90_s, 1),
    }


def _request(shown: Shown) -> dict[str, object]:
    tokens = shown.tokens
    return {
        "arrived_at": round(shown.arrived_at, 3),
        "request_id": shown.request_id,
        "replica": shown.replica,
        "prefix_holder": shown.holder,
        "is_moved": shown.is_moved,
        "status": shown.status,
        "ended": shown.ended,
        "ttft_ms": None if shown.ttft_s is None else round(1000 * shown.ttft_s, 1),
        "attribution": None if tokens is None else tokens.source,
        "tokens": None if tokens is None else tokens_by_source(tokens),
    }
