"""Metrics for Prometheus. They contain no text of prompts or replies."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from edgellm.http.admission import Admission
from edgellm.spec.stats import Summary

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Family: TypeAlias = tuple[str, str, Sequence[str], Sequence[tuple[Sequence[str], float]]]
"""A metric's name (a counter's with `_total`), its meaning, the names of its labels, and its values by the labels'
values."""
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts", "generation_tokens": "Tokens written",
    "spec_rounds": "Drafted chunks that were verified", "spec_draft_tokens": "Drafted tokens that were tested",
    "spec_accepted_tokens": "Drafted tokens that were accepted",
}  # fmt: skip


class Metrics:
    """The metrics of one server."""

    def __init__(self, admission: Admission) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("edgellm_requests", "Requests by how they ended", ["outcome"], registry=registry)
        for outcome in ("stop", "length", "cancelled", "failed", "refused"):  # report each from the start
            self._requests.labels(outcome)
        self._counters = {name: Counter(f"edgellm_{name}", about, registry=registry)
                          for name, about in _COUNTERS.items()}  # fmt: skip
        self._gauge("requests_running", "Replies being written", lambda: admission.running)
        self._gauge("requests_waiting", "Requests that wait for a slot", lambda: admission.waiting)
        self._ttft = self._histogram("time_to_first_token", "Time from the request to its first token", 0.01, 100)
        self._latency = self._histogram("inter_token_latency", "Time between two tokens of a reply", 0.001, 2.5)
        self._rtt = self._histogram(
            "peer_rtt", "A reply's median wait for a verdict, without the verifier's computing time", 0.0005, 2.5
        )
        self._accepted_at = Counter(
            "edgellm_spec_accepted_per_pos", "Accepted tokens by their position in the chunk", ["position"],
            registry=registry,
        )  # fmt: skip
        self.rtt_ms: float | None = None  # from the last reply that reported a round trip
        self._bytes = Counter("edgellm_peer_bytes", "Bytes to and from the verifier", ["dir"], registry=registry)
        for direction in ("up", "down"):
            self._bytes.labels(direction)

    def watch_verifier(self, is_up: Callable[[], bool]) -> None:
        """Report from now on whether the verifier on another device is reachable."""
        self._gauge("peer_up", "Whether the verifier on another device is reachable", is_up)

    def add(self, families: Callable[[], Iterable[Family]]) -> None:
        """Report the metrics that `families` yields, too, from now on."""
        self._registry.register(_Collector(families))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def count_refused(self) -> None:
        """Count a request that was refused before anything was computed for it."""
        self._requests.labels("refused").inc()

    def record_reply(self, summary: Summary, times: Sequence[float], failed: bool) -> None:
        """Count a reply, in any thread. `times` are those of the request and of each token, in seconds."""
        self._requests.labels("failed" if failed else summary.finish_reason).inc()
        counted = (summary.prompt_tokens, summary.tokens, summary.chunks_verified, summary.tested, summary.accepted)
        for counter, count in zip(self._counters.values(), counted, strict=True):
            counter.inc(count)
        for position, count in enumerate(summary.accepted_at):
            self._accepted_at.labels(str(position)).inc(count)
        for number, (earlier, later) in enumerate(pairwise(times)):
            (self._latency if number else self._ttft).observe(later - earlier)
        if summary.rtt_ms is not None:
            self.rtt_ms = summary.rtt_ms
            self._rtt.observe(summary.rtt_ms / 1e3)
        self._bytes.labels("up").inc(summary.bytes_up)
        self._bytes.labels("down").inc(summary.bytes_down)

    def _gauge(self, name: str, about: str, value: Callable[[], float]) -> None:
        Gauge(f"edgellm_{name}", about, registry=self._registry).set_function(lambda: float(value()))

    def _histogram(self, name: str, about: str, least: float, most: float) -> Histogram:
        """Return a histogram of seconds, with bounds in steps of 1, 2.5 and 5 in each power of ten."""
        steps = [float(f"{step}e{power}") for power in range(-4, 3) for step in (1, 2.5, 5)]
        buckets = [step for step in steps if least <= step <= most]
        return Histogram(f"edgellm_{name}_seconds", about, buckets=buckets, registry=self._registry)


class _Collector(Collector):
    """A collector that reads its metrics when asked."""

    def __init__(self, families: Callable[[], Iterable[Family]]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for name, about, labels, values in self._families():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, about, labels=labels)
            for place, value in values:
                family.add_metric(place, value)
            yield family
