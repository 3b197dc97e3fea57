"""Metrics for Prometheus of a gateway and its servers, read when somebody asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from edgellm.upstream.gateway.backend import GatewayBackend
from edgellm.upstream.gateway.pool import PooledServer

_Column = tuple[str, str, Callable[[Any], float]]
"""The name of a metric, what it says, and its value for a model or a server."""

_OF_MODELS: tuple[_Column, ...] = (
    ("verdicts", "Verdicts for devices", lambda one: one.figures.verdicts),
    ("draft_tokens", "Drafted tokens that were tested", lambda one: one.figures.drafted),
    ("accepted_tokens", "Drafted tokens that were accepted", lambda one: one.figures.accepted),
    ("verified_tokens", "Tokens of verdicts, accepted ones and the servers' own", lambda one: one.figures.tokens),
    ("moved_requests", "Requests that went on at another server", lambda one: one.figures.moved),
    ("pushed_back_requests", "Requests that were sent back with a time to ask again",
     lambda one: one.figures.pushed_back),
    ("waited_seconds", "Time that requests have waited for a place", lambda one: one.figures.waited),
)  # fmt: skip
_NOW_OF_SERVERS: tuple[_Column, ...] = (
    ("up", "Whether the server takes requests", lambda one: one.verifier.up()),
    ("requests_running", "Requests in flight at the server", lambda one: one.running),
    ("sessions", "Replies of devices that the server verifies", lambda one: one.sessions),
)
_OF_SERVERS: tuple[_Column, ...] = (
    ("answers", "Requests that the server has answered", lambda one: one.figures.answered),
    ("failures", "Requests that the server has lost, delayed or postponed", lambda one: one.figures.failed),
    ("refusals", "Requests that the server has refused", lambda one: one.figures.refused),
    ("prefix_tokens", "Tokens before drafts that the server was sent", lambda one: one.figures.prefix_tokens),
    ("cached_tokens", "Tokens of these that it had in its cache, as it says", lambda one: one.figures.cached_tokens),
    ("seconds", "Time of all answers together", lambda one: one.figures.seconds),
)


class GatewayCollector(Collector):
    """What a gateway and its servers have done for each of its models."""

    def __init__(self, models: Callable[[], Sequence[GatewayBackend]], away: Callable[[], int]) -> None:
        """`away` returns the number of servers that have not answered yet."""
        self._models, self._away = models, away

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics: first those of the gateway, then those of each server."""
        models = {(one.pool.name,): one for one in self._models()}
        waiting: _Column = ("requests_waiting", "Requests that wait", lambda one: one.waiting)
        yield from _families(CounterMetricFamily, "edgellm_gateway", _OF_MODELS, ("model",), models)
        yield from _families(GaugeMetricFamily, "edgellm_gateway", (waiting,), ("model",), models)
        about = "Servers that have not answered since the gateway began"
        yield GaugeMetricFamily("edgellm_gateway_servers_awaited", about, value=self._away())
        servers: list[PooledServer] = [server for model in models.values() for server in model.pool.servers]
        places = {(str(one.url), one.upstream.name, str(one.upstream.tier)): one for one in servers}
        labels = ("server", "model", "tier")
        yield from _families(GaugeMetricFamily, "edgellm_upstream", _NOW_OF_SERVERS, labels, places)
        named = {place[:2]: one for place, one in places.items()}
        yield from _families(CounterMetricFamily, "edgellm_upstream", _OF_SERVERS, labels[:2], named)


def _families(
    kind: type[CounterMetricFamily | GaugeMetricFamily], prefix: str, columns: Sequence[_Column],
    labels: Sequence[str], rows: dict[Any, Any],
) -> Iterator[Metric]:  # fmt: skip
    """Yield a family for each of the `columns`, with a value for each of the `rows` by the values of its labels."""
    for name, about, value in columns:
        family = kind(f"{prefix}_{name}", about, labels=labels)
        for place, one in rows.items():
            family.add_metric(place, float(value(one)))
        yield family
