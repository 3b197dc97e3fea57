"""The servers behind a gateway: the choice among them, and their figures."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from edgellm.spec.params import MAX_LOGPROBS
from edgellm.spec.sampling import Choice
from edgellm.upstream.opening import OpenedUpstream
from edgellm.upstream.rows import RowReply
from edgellm.upstream.verifier import choice_of

_UNEVEN = 2  # sessions more than the least busy server that a device's last server, whose cache is warm, may have


class PooledServer:
    """A server of a pool, with the requests `running` there and the `sessions` that it answers. Its owner lets only one
    thread at a time use it; `count` is for the client's loop."""

    def __init__(self, opened: OpenedUpstream, places: int) -> None:
        """Allow at most `places` requests in flight."""
        self.opened, self.verifier, self.places = opened, opened.verifier, places
        self.url, self.upstream = opened.url, opened.verifier.upstream
        self.running = self.sessions = 0
        self.figures: dict[str, float] = defaultdict(float)
        """Figures so far, by the names of `metrics`."""

    @property
    def is_free(self) -> bool:
        """Return whether another request may be sent."""
        return self.running < self.places

    def enter(self) -> None:
        """Note that a request is sent."""
        self.running += 1

    def leave(self, *, failed: bool, refused: bool) -> None:
        """Note that a request has ended."""
        self.running -= 1
        self.figures["failures"] += failed
        self.figures["refusals"] += refused

    def join(self) -> None:
        """Note that a session begins here."""
        self.sessions += 1

    def part(self) -> None:
        """Note that a session moves away, or ends."""
        self.sessions -= 1

    def count(self, prefix: int, reply: RowReply, seconds: float) -> None:
        """Count an answer about a text of `prefix` tokens."""
        self.figures["answers"] += 1
        self.figures["prefix_tokens"] += prefix
        self.figures["cached_tokens"] += reply.cached or 0
        self.figures["seconds"] += seconds


class ServerPool:
    """Servers of one model, with the rules of use of `PooledServer`."""

    def __init__(self, servers: Sequence[PooledServer]) -> None:
        """Take over `servers`, at least one."""
        self.servers = tuple(servers)
        self._lock, self._closed = threading.Lock(), False

    def add(self, server: PooledServer) -> bool:
        """Take over another server; return False if it lacks an announced ability, or the pool is closed. May be called
        from any thread."""
        with self._lock:
            context = server.verifier.capabilities.context_length > self.context_length
            logprobs = server.upstream.most_top >= MAX_LOGPROBS or not self.reports_logprobs
            rules = server.verifier.capabilities.penalties or not self.applies_rules
            likely = server.upstream.most_top >= (self.choice.likely or 0)
            if self._closed or not (context and logprobs and rules and likely):
                return False
            self.servers = (*self.servers, server)
            return True

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self.servers[0].upstream.name

    @property
    def identity(self) -> str:
        """Return a hash that stands for the model."""
        return self.servers[0].opened.identity

    @property
    def context_length(self) -> int:
        """Return the positions of a text at every server, less one for the token behind a text."""
        return min(server.verifier.capabilities.context_length for server in self.servers) - 1

    @property
    def reports_logprobs(self) -> bool:
        """Return whether verdicts can have as many log-probabilities as devices may ask for."""
        return all(server.upstream.most_top >= MAX_LOGPROBS for server in self.servers)

    @property
    def applies_rules(self) -> bool:
        """Return whether replies can have penalties and follow grammars at every server."""
        return all(server.verifier.capabilities.penalties for server in self.servers)

    @property
    def choice(self) -> Choice:
        """Return the set that tokens are chosen from at every server."""
        found = [choice_of(server.upstream) for server in self.servers]
        return Choice(min(one.likely or 0 for one in found), any(one.draws_itself for one in found))

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
        least = min(
            self._up(),
            key=lambda server: ((server.sessions + server.running) / server.places, server.figures["answers"]),
        )
        if last is None or not last.verifier.up() or last.sessions > least.sessions + _UNEVEN:
            return least
        return last

    def choose(self, home: PooledServer, without: Collection[PooledServer]) -> PooledServer | None:
        """Return the server for a request of a session at `home`: `home` if up and free, else the least loaded free
        server, else one that is up; None if all are down or in `without`."""
        able = [server for server in self._up(without) if server.verifier.up()]
        free = [server for server in able if server.is_free]
        if home in (free or able):
            return home
        return min(free or able, key=lambda server: server.running / server.places, default=None)

    def _up(self, without: Collection[PooledServer] = ()) -> Iterable[PooledServer]:
        left = [server for server in self.servers if server not in without]
        return [server for server in left if server.verifier.up()] or left

    def close(self) -> None:
        """Abandon all requests in flight."""
        with self._lock:
            was_closed, self._closed = self._closed, True
        for server in () if was_closed else self.servers:
            server.verifier.close()
