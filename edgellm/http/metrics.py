"""Metrics for Prometheus. They reveal nothing of what was written."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest

from edgellm.http.admission import Admission
from edgellm.http.streaming import TokenTimes
from edgellm.spec.types import Summary

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_AWAY = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one server."""

    def __init__(self, admission: Admission) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("edgellm_requests", "Requests by how they ended", ["outcome"], registry=registry)
        for outcome in ("stop", "length", "cancelled", "failed", "refused"):  # so that each is reported from the start
            self._requests.labels(outcome)
        self._prompt = Counter("edgellm_prompt_tokens", "Tokens of prompts", registry=registry)
        self._generated = Counter("edgellm_generation_tokens", "Tokens written", registry=registry)
        running = Gauge("edgellm_requests_running", "Replies being written", registry=registry)
        running.set_function(lambda: admission.running)
        waiting = Gauge("edgellm_requests_waiting", "Requests that wait for a place", registry=registry)
        waiting.set_function(lambda: admission.waiting)
        self._first = Histogram(
            "edgellm_time_to_first_token_seconds", "From the request to its first token", buckets=_FIRST,
            registry=registry,
        )  # fmt: skip
        self._between = Histogram(
            "edgellm_inter_token_latency_seconds", "Between two tokens of a reply", buckets=_BETWEEN, registry=registry
        )
        self._rounds = Counter("edgellm_spec_rounds", "Drafted chunks that were verified", registry=registry)
        self._drafted = Counter("edgellm_spec_draft_tokens", "Drafted tokens that were tested", registry=registry)
        self._accepted = Counter("edgellm_spec_accepted_tokens", "Of these the accepted ones", registry=registry)
        self._per_place = Counter(
            "edgellm_spec_accepted_per_pos", "Accepted tokens by their place in the chunk", ["position"],
            registry=registry,
        )  # fmt: skip
        self._rtt = Histogram(
            "edgellm_peer_rtt_seconds", "A reply's median wait for a verdict, less the verifier's computing",
            buckets=_AWAY, registry=registry,
        )  # fmt: skip
        self._bytes = Counter("edgellm_peer_bytes", "Bytes over the link", ["dir"], registry=registry)
        for way in ("up", "down"):
            self._bytes.labels(way)

    def watch(self, up: Callable[[], bool]) -> None:
        """Report from now on whether the verifier across the link is there."""
        there = Gauge("edgellm_peer_up", "Whether the verifier across the link is there", registry=self._registry)
        there.set_function(lambda: float(up()))

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def refused(self) -> None:
        """Count a request that was refused before anything was computed for it."""
        self._requests.labels("refused").inc()

    def reply(self, summary: Summary | None, marks: TokenTimes, failed: bool) -> None:
        """Count a reply that is over, whole or not. May be called from any thread."""
        self._requests.labels("failed" if failed or summary is None else summary.finish_reason).inc()
        if summary is None:
            return
        self._prompt.inc(summary.prompt_tokens)
        self._generated.inc(summary.tokens)
        self._rounds.inc(summary.chunks_verified)
        self._drafted.inc(summary.tested)
        self._accepted.inc(summary.accepted)
        for place, count in enumerate(summary.accepted_at):
            self._per_place.labels(str(place)).inc(count)
        if marks.first is not None:
            self._first.observe(marks.first)
        for gap in marks.gaps:
            self._between.observe(gap)
        if summary.rtt_ms is not None:
            self._rtt.observe(summary.rtt_ms / 1e3)
        self._bytes.labels("up").inc(summary.bytes_up)
        self._bytes.labels("down").inc(summary.bytes_down)
