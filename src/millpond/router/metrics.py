"""Prometheus metrics of the router; docs/ROUTER.md lists them."""

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from millpond.router.placement.estimates import Estimates
from millpond.router.records import Attribution, Record
from millpond.router.replicas import Replicas, State

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PREFIX: Final = "millpond_router_"
_TTFT_BUCKETS: Final = (
    *(0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0),
    *(3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)


def main_source(attribution: Attribution) -> str:
    """Return where most of a prompt's tokens came from."""
    tokens = tokens_by_source(attribution)
    return max(tokens, key=lambda source: tokens[source])


def tokens_by_source(attribution: Attribution) -> dict[str, int]:
    """Return a prompt's tokens: computed, local, and from the pool by who had written them."""
    return {
        "computed": attribution.computed_tokens,
        "local": attribution.local_tokens,
        "pool-own": attribution.own_tokens,
        "pool-other": attribution.other_tokens,
    }


class Metrics:
    """Counts finished requests; load and states are read when somebody asks."""

    def __init__(self, replicas: Replicas, estimates: Estimates) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Now(replicas, estimates))
        self._estimates = estimates
        self._requests = self._counter("requests", "Requests.", "replica", "policy", "status")
        self._ended = self._counter("ended", "Requests by how they ended.", "ended")
        self._retries = self._counter("retries", "Replicas tried in vain for a request.", "replica")
        self._prefixed = self._counter(
            "prefixed_requests", "Requests whose prefix some replica was thought to hold.", "policy"
        )
        self._moved = self._counter(
            "moved_requests", "Those of them that another replica served.", "policy"
        )
        self._tokens = self._counter(
            "prompt_tokens", "Prompt tokens by source.", "replica", "source", "attribution"
        )
        self._loaded = self._counter(
            "loaded_tokens", "Prompt tokens loaded from the pool.", "writer", "reader"
        )
        self._saved = self._counter(
            "prefill_saved_seconds", "Estimated prefill time of tokens that were not computed."
        )
        self._ttft = Histogram(
            _PREFIX + "ttft_seconds",
            "Time to the first byte of a stream, by where most prompt tokens came from.",
            ("policy", "source"),
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )

    def add(self, record: Record) -> None:
        """Count a finished and attributed request."""
        status = "" if record.status is None else str(record.status)
        self._requests.labels(record.replica or "", record.policy, status).inc()
        self._ended.labels(record.ended.value).inc()
        for replica in record.tried[:-1]:
            self._retries.labels(replica).inc()
        if record.holder is not None:
            self._prefixed.labels(record.policy).inc()
            self._moved.labels(record.policy).inc(record.is_moved)
        if record.attribution is not None and not record.attribution.is_ambiguous:
            self._add_tokens(record, record.attribution)

    def text(self) -> bytes:
        """Return everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def _add_tokens(self, record: Record, attribution: Attribution) -> None:
        for source, tokens in tokens_by_source(attribution).items():
            self._tokens.labels(attribution.reader, source, attribution.source).inc(tokens)
        for writer, tokens in attribution.writers.items():
            self._loaded.labels(writer, attribution.reader).inc(tokens)
        num_saved = attribution.local_tokens + attribution.loaded_tokens
        self._saved.inc(num_saved * self._estimates.constants.prefill_s_per_token)
        if record.ttft_s is not None:
            self._ttft.labels(record.policy, main_source(attribution)).observe(record.ttft_s)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, documentation, labels, registry=self._registry)


class _Now(Collector):
    """Gauges of what is now."""

    def __init__(self, replicas: Replicas, estimates: Estimates) -> None:
        self._replicas = replicas
        self._estimates = estimates

    def collect(self) -> Iterator[GaugeMetricFamily]:
        running = _gauge("replica_running_requests", "Requests at a replica.", "replica")
        queued = _gauge(
            "replica_queued_tokens", "Prompt tokens ahead of their first byte.", "replica"
        )
        ready = _gauge("replica_ready", "Whether a replica is ready.", "replica")
        draining = _gauge("replica_draining", "Whether a replica gets nothing new.", "replica")
        for replica in self._replicas:
            running.add_metric([replica.name], replica.num_running)
            queued.add_metric([replica.name], replica.queued_tokens)
            ready.add_metric([replica.name], replica.state is State.READY)
            draining.add_metric([replica.name], replica.is_draining)
        yield from (running, queued, ready, draining)
        constants = self._estimates.constants
        yield _single("base_seconds", "Learnt: a request that needs nothing.", constants.base_s)
        yield _single(
            "prefill_seconds_per_token", "Learnt: computing one.", constants.prefill_s_per_token
        )
        yield _single("load_seconds_per_token", "Learnt: loading one.", constants.load_s_per_token)


def _gauge(name: str, documentation: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, documentation, labels=[label])


def _single(name: str, documentation: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, documentation, value=value)
