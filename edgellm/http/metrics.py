"""Metrics for Prometheus. They contain no text of prompts or replies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from edgellm.http.admission import Admission
from edgellm.http.streaming import TokenTimes
from edgellm.spec.types import Summary

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Family: TypeAlias = tuple[str, str, Sequence[str], Sequence[tuple[Sequence[str], float]]]
"""A metric's name (a counter's with `_total`), its meaning, the names of its labels, and its values by the labels'
values."""


class Metrics:
    """The metrics of one server."""

    def __init__(self, admission: Admission) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("edgellm_requests", "Requests by how they ended", ["outcome"], registry=registry)
        for outcome in ("stop", "length", "cancelled", "failed", "refused"):  # report each from the start
            self._requests.labels(outcome)
        self._prompt = Counter("edgellm_prompt_tokens", "Tokens of prompts", registry=registry)
        self._generated = Counter("edgellm_generation_tokens", "Tokens written", registry=registry)
        running = Gauge("edgellm_requests_running", "Replies being written", registry=registry)
        running.set_function(lambda: admission.running)
        waiting = Gauge("edgellm_requests_waiting", "Requests that wait for a slot", registry=registry)
        waiting.set_function(lambda: admission.waiting)
        self._ttft = Histogram(
            "edgellm_time_to_first_token_seconds", "Time from the request to its first token",
            buckets=_buckets(0.01, 100), registry=registry,
        )  # fmt: skip
        self._latency = Histogram(
            "edgellm_inter_token_latency_seconds", "Time between two tokens of a reply",
            buckets=_buckets(0.001, 2.5), registry=registry,
        )  # fmt: skip
        self._rounds = Counter("edgellm_spec_rounds", "Drafted chunks that were verified", registry=registry)
        self._drafted = Counter("edgellm_spec_draft_tokens", "Drafted tokens that were tested", registry=registry)
        self._accepted = Counter("edgellm_spec_accepted_tokens", "Drafted tokens that were accepted", registry=registry)
        self._accepted_per_position = Counter(
            "edgellm_spec_accepted_per_pos", "Accepted tokens by their position in the chunk", ["position"],
            registry=registry,
        )  # fmt: skip
        self._rtt = Histogram(
            "edgellm_peer_rtt_seconds", "A reply's median wait for a verdict, without the verifier's computing time",
            buckets=_buckets(0.0005, 2.5), registry=registry,
        )  # fmt: skip
        self._bytes = Counter("edgellm_peer_bytes", "Bytes to and from the verifier", ["dir"], registry=registry)
        for direction in ("up", "down"):
            self._bytes.labels(direction)

    def watch_verifier(self, is_up: Callable[[], bool]) -> None:
        """Report from now on whether the verifier on another device is reachable."""
        gauge = Gauge("edgellm_peer_up", "Whether the verifier on another device is reachable", registry=self._registry)
        gauge.set_function(lambda: float(is_up()))

    def add(self, families: Callable[[], Iterable[Family]]) -> None:
        """Report the metrics that `families` yields, too, from now on."""
        self._registry.register(_Collector(families))

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def count_refused(self) -> None:
        """Count a request that was refused before anything was computed for it."""
        self._requests.labels("refused").inc()

    def record_reply(self, summary: Summary | None, times: TokenTimes, failed: bool) -> None:
        """Count a reply that has ended, complete or not. May be called from any thread."""
        self._requests.labels("failed" if failed or summary is None else summary.finish_reason).inc()
        if summary is None:
            return
        self._prompt.inc(summary.prompt_tokens)
        self._generated.inc(summary.tokens)
        self._rounds.inc(summary.chunks_verified)
        self._drafted.inc(summary.tested)
        self._accepted.inc(summary.accepted)
        for position, count in enumerate(summary.accepted_at):
            self._accepted_per_position.labels(str(position)).inc(count)
        if times.first is not None:
            self._ttft.observe(times.first)
        for gap in times.gaps:
            self._latency.observe(gap)
        if summary.rtt_ms is not None:
            self._rtt.observe(summary.rtt_ms / 1e3)
        self._bytes.labels("up").inc(summary.bytes_up)
        self._bytes.labels("down").inc(summary.bytes_down)


def _buckets(least: float, most: float) -> list[float]:
    """Return bounds in seconds, in steps of 1, 2.5 and 5 in each power of ten."""
    steps = (float(f"{step}e{power}") for power in range(-4, 3) for step in (1, 2.5, 5))
    return [step for step in steps if least <= step <= most]


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
