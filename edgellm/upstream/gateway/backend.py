"""Sessions of devices, answered by a model's stock servers: one request of each session at a time, the sessions in
parallel.

A session belongs to one server, whose cache has its text. When that server fails, the same request goes to another;
without another, the device is told when to ask again. Every request has the whole text and is answered once, so that
no failure loses or repeats tokens.
"""

import secrets
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from time import monotonic, perf_counter
from typing import TypeAlias

from edgellm.engine import Model
from edgellm.errors import EdgeError, EngineFailed, VerifierBusy, VerifierLost, VerifierUnavailable
from edgellm.rpc.channel import HEARTBEAT_SECONDS
from edgellm.spec.params import MAX_LOGPROBS
from edgellm.spec.protocols import Capabilities, Elsewhere, VerifyRequest, begun
from edgellm.spec.sampling import Choice
from edgellm.spec.types import Verdict
from edgellm.upstream.http_client import ServerRefused
from edgellm.upstream.verifier import UpstreamText, UpstreamVerifier
from edgellm.verifier.scheduler import DeviceTurns
from edgellm.verifier.worker import VerifierBackend

_FIRST = 0.1  # seconds of an answer, before others are known
_UNEVEN = 2  # sessions more than the least busy server that a device's last server, whose cache is warm, may have


class PooledServer:
    """A server of a pool, and its figures by name: the requests `running` there and the `sessions` that it answers now,
    and the other ones so far. Its owner lets only one thread at a time use it."""

    def __init__(self, verifier: UpstreamVerifier, places: int) -> None:
        """Allow at most `places` requests in flight."""
        self.verifier, self.upstream, self.places = verifier, verifier.upstream, places
        self.figures: dict[str, float] = defaultdict(float)

    @property
    def is_free(self) -> bool:
        """Return whether another request may be sent."""
        return self.figures["running"] < self.places


@dataclass(slots=True, eq=False)
class _Reply:
    """A reply of a device, and its text at each server that was asked."""

    salt: str
    home: PooledServer
    texts: dict[PooledServer, UpstreamText] = field(default_factory=dict)
    asked: "_Asked | None" = None


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that is not answered yet."""

    session: _Reply
    request: VerifyRequest
    arrived: float = field(default_factory=perf_counter)
    answer: Future[Verdict] = field(default_factory=begun)
    turn: int = 0
    failed: set[PooledServer] = field(default_factory=set)
    refusal: VerifierLost | None = None
    verdict: Future[Verdict] | None = None

    @property
    def device(self) -> str:
        return self.request.tenant.device


class GatewayBackend(VerifierBackend):
    """A model's servers behind a gateway, with a tokenizer `text`, which renders conversations."""

    def __init__(self, text: Model, servers: Sequence[PooledServer]) -> None:
        """Take over the tokenizer and `servers`, at least one."""
        self.text, self.servers = text, tuple(servers)
        self.figures: dict[str, float] = defaultdict(float)
        """Figures so far, by the names of `_OF_MODELS`."""
        self._lock = threading.RLock()  # A finished future calls back at once.
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[int, _Reply] = {}
        self._last: dict[str, PooledServer] = {}  # server of each device's last session
        self._waiting: list[_Asked] = []
        self._turns = DeviceTurns()
        self._closed = False

    def add(self, server: PooledServer, *, announced: bool = True) -> bool:
        """Take over another server; return False if it lacks an ability that was `announced`, or this is closed. May be
        called from any thread."""
        with self._lock:
            now, then = self.capabilities, _common((*self.servers, server))
            as_able = now.choice.likely == then.choice.likely and now == replace(then, choice=now.choice)
            if self._closed or (announced and not as_able):
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
    def elsewhere(self) -> Elsewhere:
        """Return what is known of the servers together."""
        first, *_ = every = [server.verifier.elsewhere for server in self.servers]
        address, finding = ", ".join(one.address for one in every), "; ".join(one.finding for one in every)
        return replace(first, address=address, up=self.ready, finding=finding, notices=())

    @property
    def behind(self) -> str:
        """Return the servers' kinds and tiers, such as "vLLM by score, llama-server by continue"."""
        ways = [f"{server.upstream.dialect} by {server.upstream.tier}" for server in self.servers]
        return ", ".join(dict.fromkeys(ways))

    @property
    def places(self) -> int:
        """Return how many requests may be in flight in all."""
        return sum(server.places for server in self.servers)

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a place at a server."""
        return len(self._waiting)

    @property
    def steps(self) -> int:
        """Return heartbeats: time counts as progress, as each server has its own deadline for a request, and reports
        nothing before it answers."""
        return int(monotonic() / HEARTBEAT_SECONDS)

    def ready(self) -> bool:
        return any(server.verifier.up() for server in self.servers)

    def wait_seconds(self) -> float:
        turns = 1.0 + len(self._waiting) / self.places
        answers, seconds = (sum(one.figures[name] for one in self.servers) for name in ("answers", "seconds"))
        away = min(server.verifier.wait_seconds() for server in self.servers)
        return max(away, turns * (_FIRST + seconds) / (1.0 + answers))

    def start(self) -> None:
        """Do nothing: servers answer from the beginning."""

    def submit(self, request: VerifyRequest) -> Future[Verdict]:
        """Ask for a verdict, and give up an unanswered request of the session."""
        with self._lock:
            if self._closed:
                raise _ended()
            session = self._session(request)
            self._drop(session)
            self._turns.record_request(request.tenant.device)
            asked = session.asked = _Asked(session, request)
            self._waiting.append(asked)
            self._fill()
            return asked.answer

    def end_session(self, session: int) -> None:
        with self._lock:
            if (found := self._sessions.pop(session, None)) is not None:
                found.home.figures["sessions"] -= 1
                self._drop(found)

    def close(self) -> None:
        """Answer all requests with an error, and abandon those in flight."""
        with self._lock:
            was_closed, self._closed = self._closed, True
            open_requests = [session.asked for session in self._sessions.values() if session.asked is not None]
            for asked in open_requests:
                self._fail(asked, _ended())
            self._waiting.clear()
        for server in () if was_closed else self.servers:
            server.verifier.close()

    def dispose(self) -> None:
        """Close this, and the tokenizer."""
        self.close()
        self.text.close()

    def _session(self, request: VerifyRequest) -> _Reply:
        found = self._sessions.get(request.session)
        if found is None:
            home = self._home(self._last.get(request.tenant.device))
            self._last[request.tenant.device] = home
            home.figures["sessions"] += 1
            salt = request.tenant.cache_salt  # Servers' caches get an unguessable one.
            salted = blake2b(salt.encode(), key=self._secret, digest_size=16).hexdigest() if salt else ""
            found = self._sessions[request.session] = _Reply(salted, home)
        return found

    def _home(self, last: PooledServer | None) -> PooledServer:
        """Return the server for a new session of a device: its `last` server, whose cache is warm, unless that is down
        or clearly busier than the least busy server; else the least busy server."""
        up = [server for server in self.servers if server.verifier.up()]
        least = min(
            up or self.servers, key=lambda server: (_busy(server, "sessions", "running"), server.figures["answers"])
        )
        return least if last not in up or last.figures["sessions"] > least.figures["sessions"] + _UNEVEN else last

    def _choose(self, home: PooledServer, without: Collection[PooledServer]) -> PooledServer | None:
        """Return the server for a request of a session at `home`: `home` if up and free, else the least loaded free
        server, else one that is up; None if all are down or in `without`."""
        able = [server for server in self.servers if server not in without and server.verifier.up()]
        able = [server for server in able if server.is_free] or able
        return home if home in able else min(able, key=lambda server: _busy(server, "running"), default=None)

    def _drop(self, session: _Reply) -> None:
        asked, session.asked = session.asked, None
        if asked is None:
            return
        if asked.verdict is not None:
            asked.verdict.cancel()
        elif asked in self._waiting:
            self._waiting.remove(asked)

    def _send(self, asked: _Asked, server: PooledServer) -> None:
        session, request = asked.session, asked.request
        if server is not session.home:
            session.home.figures["sessions"] -= 1
            server.figures["sessions"] += 1
            session.home = server
            self._last[request.tenant.device] = server
        text = session.texts.get(server)
        if text is None:
            text = session.texts[server] = UpstreamText(server.verifier, session.salt)
        began = perf_counter()
        self.figures["waited_seconds"] += began - asked.arrived
        server.figures["running"] += 1
        asked.verdict = text.ask(request)
        asked.verdict.add_done_callback(partial(self._done, asked, server, began))

    def _done(self, asked: _Asked, server: PooledServer, began: float, verdict: Future[Verdict]) -> None:
        """Handle a verdict, or the failure of a server; called from the loop of its client."""
        with self._lock:
            seconds = perf_counter() - began
            error = None if verdict.cancelled() else verdict.exception()
            refusal = error if isinstance(error, ServerRefused) and error.of_request else None
            server.figures["running"] -= 1
            if error is not None:
                server.figures["failures" if refusal is None else "refusals"] += 1
            elif not verdict.cancelled():
                read = {"prefix_tokens": len(asked.request.prefix), "cached_tokens": verdict.result().cached}
                _add(server.figures, answers=1, **read, seconds=seconds)
            if asked.session.asked is asked:
                if verdict.cancelled():
                    self._fail(asked, _ended())
                elif error is None:
                    self._settle(asked, verdict.result())
                elif isinstance(error, VerifierUnavailable):
                    self._move(asked, server, refusal)
                else:
                    self._fail(asked, error if isinstance(error, EdgeError) else _failed(error))
            self._fill()

    def _settle(self, asked: _Asked, verdict: Verdict) -> None:
        draft, accepted = asked.request.draft, verdict.accepted
        verified = accepted + len(verdict.tokens)
        _add(self.figures, verdicts=1, draft_tokens=len(draft), accepted_tokens=accepted, verified_tokens=verified)
        asked.session.asked = None
        asked.answer.set_result(verdict)

    def _move(self, asked: _Asked, server: PooledServer, refusal: VerifierLost | None) -> None:
        """Move an unanswered request to another server."""
        asked.failed.add(server)
        asked.refusal = refusal or asked.refusal
        asked.verdict, asked.arrived = None, perf_counter()
        if len(asked.failed) < len(self.servers):
            self.figures["moved_requests"] += 1
        self._waiting.append(asked)

    def _push_back(self, asked: _Asked) -> None:
        if asked.refusal is not None:  # The request would be refused again.
            self._fail(asked, asked.refusal)
            return
        self.figures["pushed_back_requests"] += 1
        seconds = self.wait_seconds()
        self._fail(asked, VerifierBusy("The servers behind the gateway are busy or away.", "Ask again.", seconds))

    def _fail(self, asked: _Asked, error: EdgeError) -> None:
        asked.session.asked = None
        asked.answer.set_exception(error)

    def _fill(self) -> None:
        """Send waiting requests while there are places, those of the least recently served devices first, and push back
        those for which no server is up."""
        waiting = self._turns.order(self._waiting)
        while waiting:
            asked = waiting.pop(0)
            server = self._choose(asked.session.home, asked.failed)
            if server is not None and not server.is_free:
                continue
            self._waiting.remove(asked)
            if server is None:
                self._push_back(asked)
            else:
                self._turns.record_batch([asked.device])
                self._send(asked, server)
            waiting = self._turns.order(self._waiting)  # A finished future may have changed them.


def _busy(server: PooledServer, *what: str) -> float:
    """Return what a server does in shares of its places."""
    return sum(server.figures[name] for name in what) / server.places


def _add(figures: dict[str, float], **amounts: float) -> None:
    for name, amount in amounts.items():
        figures[name] += amount


def _common(servers: Sequence[PooledServer]) -> Capabilities:
    every = [server.verifier.capabilities for server in servers]
    logprobs = all(server.upstream.most_top >= MAX_LOGPROBS for server in servers)
    rules = all(one.penalties for one in every)
    likely = min(one.choice.likely or 0 for one in every)
    choice = Choice(likely, any(one.choice.draws_itself for one in every))
    positions = min(one.context_length for one in every) - 1
    return Capabilities(every[0].name, positions, logprobs, rules, rules, choice)


def _ended() -> EngineFailed:
    return EngineFailed("The gateway has ended.", "Start it again.")


def _failed(error: BaseException) -> EngineFailed:
    return EngineFailed(f"The gateway failed ({type(error).__name__}).", "Report this.")


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
    ("requests_running", "Requests in flight at the server", lambda one: one.figures["running"]),
    ("sessions", "Replies of devices that the server verifies", lambda one: one.figures["sessions"]),
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
        counted = [([one.name], one.figures[name]) for one in models]
        yield f"edgellm_gateway_{name}_total", about, ["model"], counted
    waiting = [([one.name], one.waiting) for one in models]
    yield "edgellm_gateway_requests_waiting", "Requests that wait", ["model"], waiting
    yield "edgellm_gateway_servers_awaited", "Servers that have not answered since the gateway began", [], [([], away)]
    servers = [server for model in models for server in model.servers]
    for name, about, value in _NOW_OF_SERVERS:
        now = [([*_place(one), str(one.upstream.tier)], value(one)) for one in servers]
        yield f"edgellm_upstream_{name}", about, ["server", "model", "tier"], now
    for name, about in _OF_SERVERS.items():
        done = [(_place(one), one.figures[name]) for one in servers]
        yield f"edgellm_upstream_{name}_total", about, ["server", "model"], done


def _place(server: PooledServer) -> list[str]:
    return [server.verifier.elsewhere.address, server.upstream.name]
