"""Metrics for Prometheus. They contain no text of prompts or replies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from edgellm.http.admission import Admission
from edgellm.http.streaming import TokenTimes
from edgellm.spec.types import Summary

if TYPE_CHECKING:
    from edgellm.services.server.gateway_server import GatewayServer
    from edgellm.upstream.gateway.pool import PooledServer

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TTFT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80)
_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
_RTT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


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
            "edgellm_time_to_first_token_seconds", "Time from the request to its first token", buckets=_TTFT_BUCKETS,
            registry=registry,
        )  # fmt: skip
        self._latency = Histogram(
            "edgellm_inter_token_latency_seconds", "Time between two tokens of a reply", buckets=_LATENCY_BUCKETS,
            registry=registry,
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
            buckets=_RTT_BUCKETS, registry=registry,
        )  # fmt: skip
        self._bytes = Counter("edgellm_peer_bytes", "Bytes to and from the verifier", ["dir"], registry=registry)
        for direction in ("up", "down"):
            self._bytes.labels(direction)

    def watch_verifier(self, is_up: Callable[[], bool]) -> None:
        """Report from now on whether the verifier on another device is reachable."""
        gauge = Gauge("edgellm_peer_up", "Whether the verifier on another device is reachable", registry=self._registry)
        gauge.set_function(lambda: float(is_up()))

    def watch_gateway(self, gateway: GatewayServer) -> None:
        """Report from now on what a gateway does for each of its models."""
        self._registry.register(GatewayCollector(gateway))

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


class GatewayCollector(Collector):
    """What a gateway and its servers have done for each of its models, read when somebody asks."""

    def __init__(self, gateway: GatewayServer) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics: first those of the gateway, then those of each server."""
        models = self._gateway.backends
        done = [one.figures for one in models]
        for name, about, values in (
            ("verdicts", "Verdicts for devices", [one.verdicts for one in done]),
            ("draft_tokens", "Drafted tokens that were tested", [one.drafted for one in done]),
            ("accepted_tokens", "Drafted tokens that were accepted", [one.accepted for one in done]),
            ("verified_tokens", "Tokens of verdicts, accepted ones and the servers' own", [one.tokens for one in done]),
            ("moved_requests", "Requests that went on at another server", [one.moved for one in done]),
            (
                "pushed_back_requests",
                "Requests that were sent back with a time to ask again",
                [one.pushed_back for one in done],
            ),
            ("waited_seconds", "Time that requests have waited for a place", [one.waited for one in done]),
        ):
            counter = CounterMetricFamily(f"edgellm_gateway_{name}", about, labels=["model"])
            for model, value in zip(models, values, strict=True):
                counter.add_metric([model.pool.name], value)
            yield counter
        waiting = GaugeMetricFamily("edgellm_gateway_requests_waiting", "Requests that wait", labels=["model"])
        for model in models:
            waiting.add_metric([model.pool.name], model.waiting)
        yield waiting
        away = GaugeMetricFamily(
            "edgellm_gateway_servers_awaited", "Servers that have not answered since the gateway began"
        )
        away.add_metric([], len(self._gateway.away))
        yield away
        yield from self._servers([one for model in models for one in model.pool.servers])

    def _servers(self, servers: Sequence[PooledServer]) -> Iterator[Metric]:
        gauges = (
            ("up", "Whether the server takes requests", [float(one.up()) for one in servers]),
            ("requests_running", "Requests in flight at the server", [one.running for one in servers]),
            ("sessions", "Replies of devices that the server verifies", [one.sessions for one in servers]),
        )
        for name, about, values in gauges:
            gauge = GaugeMetricFamily(f"edgellm_upstream_{name}", about, labels=["server", "model", "tier"])
            for one, value in zip(servers, values, strict=True):
                gauge.add_metric([str(one.url), one.upstream.name, one.upstream.tier], value)
            yield gauge
        done = [one.figures for one in servers]
        counters = (
            ("answers", "Requests that the server has answered", [one.answered for one in done]),
            ("failures", "Requests that the server has lost, delayed or postponed", [one.failed for one in done]),
            ("refusals", "Requests that the server has refused", [one.refused for one in done]),
            ("prefix_tokens", "Tokens before drafts that the server was sent", [one.prefix_tokens for one in done]),
            (
                "cached_tokens",
                "Tokens of these that it had in its cache, as it says",
                [one.cached_tokens for one in done],
            ),
            ("seconds", "Time of all answers together", [one.seconds for one in done]),
        )
        for name, about, values in counters:
            counter = CounterMetricFamily(f"edgellm_upstream_{name}", about, labels=["server", "model"])
            for one, value in zip(servers, values, strict=True):
                counter.add_metric([str(one.url), one.upstream.name], value)
            yield counter
