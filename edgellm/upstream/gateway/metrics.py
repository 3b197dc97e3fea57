"""The metrics of a gateway and its servers, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from edgellm.upstream.gateway.backend import GatewayBackend
from edgellm.upstream.gateway.pool import PooledServer

Family: TypeAlias = tuple[str, str, Sequence[str], Sequence[tuple[Sequence[str], float]]]
"""The name of a metric, its help, the names of its labels, and the labels with their values."""

_OF_MODELS = {
    "verdicts": "Verdicts for devices",
    "draft_tokens": "Drafted tokens that were tested",
    "accepted_tokens": "Drafted tokens that were accepted",
    "verified_tokens": "Tokens of verdicts, accepted ones and the servers' own",
    "moved_requests": "Requests that went on at another server",
    "pushed_back_requests": "Requests that were sent back with a time to ask again",
    "waited_seconds": "Time that requests have waited for a place",
}
"""The counters of a `GatewayBackend`, by name."""
_NOW_OF_SERVERS: tuple[tuple[str, str, Callable[[PooledServer], float]], ...] = (
    ("up", "Whether the server takes requests", lambda one: one.verifier.up()),
    ("requests_running", "Requests in flight at the server", lambda one: one.running),
    ("sessions", "Replies of devices that the server verifies", lambda one: one.sessions),
)
_OF_SERVERS = {
    "answers": "Requests that the server has answered",
    "failures": "Requests that the server has lost, delayed or postponed",
    "refusals": "Requests that the server has refused",
    "prefix_tokens": "Tokens before drafts that the server was sent",
    "cached_tokens": "Tokens of these that it had in its cache, as it says",
    "seconds": "Time of all answers together",
}
"""The counters of a `PooledServer`, by name."""


def families(models: Sequence[GatewayBackend], away: int) -> Iterator[Family]:
    """Yield the metrics of a gateway's `models`, then those of each server; `away` servers have not answered yet."""
    for name, about in _OF_MODELS.items():
        counted = [([one.pool.name], one.figures[name]) for one in models]
        yield f"edgellm_gateway_{name}_total", about, ["model"], counted
    waiting = [([one.pool.name], one.waiting) for one in models]
    yield "edgellm_gateway_requests_waiting", "Requests that wait", ["model"], waiting
    yield "edgellm_gateway_servers_awaited", "Servers that have not answered since the gateway began", [], [([], away)]
    servers = [server for model in models for server in model.pool.servers]
    for name, about, value in _NOW_OF_SERVERS:
        now = [([*_place(one), str(one.upstream.tier)], value(one)) for one in servers]
        yield f"edgellm_upstream_{name}", about, ["server", "model", "tier"], now
    for name, about in _OF_SERVERS.items():
        done = [(_place(one), one.figures[name]) for one in servers]
        yield f"edgellm_upstream_{name}_total", about, ["server", "model"], done


def _place(server: PooledServer) -> list[str]:
    return [str(server.url), server.upstream.name]
