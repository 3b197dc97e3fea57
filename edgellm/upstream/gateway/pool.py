"""The servers behind a gateway: the choice among them, and their figures."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace

from edgellm.engine import Model
from edgellm.spec.params import MAX_LOGPROBS
from edgellm.spec.protocols import Capabilities
from edgellm.spec.sampling import Choice
from edgellm.upstream.opening import OpenedUpstream

_UNEVEN = 2  # sessions more than the least busy server that a device's last server, whose cache is warm, may have


class PooledServer:
    """A server of a pool, with the requests `running` there and the `sessions` that it answers. Its owner lets only one
    thread at a time use it."""

    def __init__(self, opened: OpenedUpstream, places: int) -> None:
        """Allow at most `places` requests in flight."""
        self.opened, self.verifier, self.places = opened, opened.verifier, places
        self.url, self.upstream = opened.url, opened.verifier.upstream
        self.running = self.sessions = 0
        self.figures: dict[str, float] = defaultdict(float)
        """Figures so far, by name."""

    @property
    def is_free(self) -> bool:
        """Return whether another request may be sent."""
        return self.running < self.places

    def enter(self) -> None:
        """Note that a request is sent."""
        self.running += 1

    def leave(self, **figures: float) -> None:
        """Note that a request has ended, and add to the figures."""
        self.running -= 1
        for name, amount in figures.items():
            self.figures[name] += amount

    def join(self, sessions: int) -> None:
        """Note that a session begins here (1), or moves away or ends (-1)."""
        self.sessions += sessions


class ServerPool:
    """The servers of a gateway's model, with the rules of use of `PooledServer`, and its tokenizer `text`, which
    renders conversations."""

    def __init__(self, text: Model, servers: Sequence[PooledServer]) -> None:
        """Take over the tokenizer and `servers`, at least one."""
        self.text, self.servers = text, tuple(servers)
        self._lock, self._closed = threading.Lock(), False

    def add(self, server: PooledServer) -> bool:
        """Take over another server; return False if it lacks an announced ability, or the pool is closed. May be called
        from any thread."""
        with self._lock:
            now, then = self.capabilities, _common((*self.servers, server))
            as_able = now.choice.likely == then.choice.likely and now == replace(then, choice=now.choice)
            if self._closed or not as_able:
                return False
            self.servers = (*self.servers, server)
            return True

    @property
    def capabilities(self) -> Capabilities:
        """Return the abilities of every server; of a context, one position is for the token behind a text."""
        return _common(self.servers)

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self.servers[0].upstream.name

    @property
    def identity(self) -> str:
        """Return a hash that stands for the model."""
        return self.servers[0].opened.identity

    @property
    def behind(self) -> str:
        """Return the servers' kinds and tiers, such as "vLLM by score, llama-server by continue"."""
        ways = [f"{server.upstream.dialect} by {server.upstream.tier}" for server in self.servers]
        return ", ".join(dict.fromkeys(ways))

    @property
    def places(self) -> int:
        """Return how many requests may be in flight in all."""
        return sum(server.places for server in self.servers)

    def ready(self) -> bool:
        """Return whether a server takes requests."""
        return any(server.verifier.up() for server in self.servers)

    def wait_seconds(self) -> float:
        """Return the seconds until a server may take requests."""
        return min(server.verifier.wait_seconds() for server in self.servers)

    def home(self, last: PooledServer | None) -> PooledServer:
        """Return the server for a new session of a device: its `last` server, whose cache is warm, unless that is down
        or clearly busier than the least busy server; else the least busy server."""
        up = [server for server in self.servers if server.verifier.up()]
        least = min(
            up or self.servers,
            key=lambda server: ((server.sessions + server.running) / server.places, server.figures["answers"]),
        )
        return least if last not in up or last.sessions > least.sessions + _UNEVEN else last

    def choose(self, home: PooledServer, without: Collection[PooledServer]) -> PooledServer | None:
        """Return the server for a request of a session at `home`: `home` if up and free, else the least loaded free
        server, else one that is up; None if all are down or in `without`."""
        able = [server for server in self.servers if server not in without and server.verifier.up()]
        able = [server for server in able if server.is_free] or able
        return home if home in able else min(able, key=lambda server: server.running / server.places, default=None)

    def abandon(self) -> None:
        """Abandon all requests in flight."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        for server in () if was_closed else self.servers:
            server.verifier.close()

    def close(self) -> None:
        """Abandon all requests in flight, and close the tokenizer."""
        self.abandon()
        self.text.close()


def _common(servers: Sequence[PooledServer]) -> Capabilities:
    every = [server.verifier.capabilities for server in servers]
    logprobs = all(server.upstream.most_top >= MAX_LOGPROBS for server in servers)
    rules = all(one.penalties for one in every)
    likely = min(one.choice.likely or 0 for one in every)
    choice = Choice(likely, any(one.choice.draws_itself for one in every))
    positions = min(one.context_length for one in every) - 1
    return Capabilities(every[0].name, positions, logprobs, rules, rules, choice)
