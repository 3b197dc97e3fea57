"""The servers behind a gateway: their opening, by their models, though all may be away at the start; the choice among
them, and their figures."""

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from edgellm.engine import Model
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import EdgeError, InvalidOption, VerifierUnreachable, VocabularyMismatch
from edgellm.spec.params import MAX_LOGPROBS
from edgellm.spec.protocols import Capabilities
from edgellm.spec.sampling import Choice
from edgellm.spec.verification import RetryDelay
from edgellm.upstream.http_client import CONNECTIONS, ServerURL
from edgellm.upstream.opening import OpenedUpstream, models_at, open_upstream
from edgellm.upstream.verifier import UpstreamOptions

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

    def add(self, server: PooledServer, *, announced: bool = True) -> bool:
        """Take over another server; return False if it lacks an ability that was `announced`, or the pool is closed.
        May be called from any thread."""
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


class PoolOpening:
    """The opening of a gateway's servers: some at once, and servers that are away once they are back."""

    def __init__(
        self, tokenizers: Sequence[Path], options: UpstreamOptions | None = None,
        on_news: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """Open servers with the `tokenizers` of these model files, at least one: each model has the first of them whose
        tokens are proved to be its own. `on_news` is called with a sentence about a server that was away, from the
        thread of `look`."""
        self._tokenizers, self._options = tuple(tokenizers), options or UpstreamOptions()
        self._on_news = on_news or (lambda _text: None)
        self._closing = threading.Event()
        self._models: dict[str, ServerPool] = {}
        self._away: list[tuple[ServerURL, VerifierUnreachable]] = []

    @property
    def away(self) -> tuple[ServerURL, ...]:
        """Return the servers that have not answered yet."""
        return tuple(url for url, _ in self._away)

    def open(self, addresses: Sequence[str]) -> tuple[ServerPool, ...]:
        """Return the models of the servers at `addresses` that answer, each with its servers; `look` finds the others.
        An address without a model means a model of an earlier address, if the server has it, else the server's first.
        Raises InvalidOption: an address is invalid, or comes twice; or it cannot be told which of several tokenizers a
        server has; VocabularyMismatch: no tokenizer is a server's own; ModelNotFound, ModelCorrupt, ModelUnsupported: a
        file has no tokenizer."""
        with ExitStack() as closing:
            for url in _urls(addresses):
                try:
                    self._join(url, lambda model: closing.callback(model.close), announced=False)
                except VerifierUnreachable as error:
                    self._away.append((url, error))
            for path in () if self._models else self._tokenizers:  # They are checked at the start in any case.
                Model.load(path, TEXT_ONLY).close()
            closing.pop_all()
        return tuple(self._models.values())

    def look(self, on_model: Callable[[ServerPool], None]) -> None:
        """Look in the background for the servers that were away, with a back-off. Each is used as soon as it answers;
        `on_model` takes over a new model, in a thread of its own."""
        if self._away:
            threading.Thread(target=self._look, args=(on_model,), name="edgellm-opening", daemon=True).start()

    def close(self) -> None:
        """Stop looking for servers."""
        self._closing.set()

    def _model(self, url: ServerURL) -> str:
        """Return the name of the model to use a server for."""
        if url.model:
            return url.model
        names = models_at(url, self._options)
        return next((name for name in self._models if name in names), names[0] if names else "")

    def _first(self, url: ServerURL, name: str) -> tuple[Model, PooledServer]:
        """Return the first server of a model, and the tokenizer proved to be that server's."""
        mismatch: VocabularyMismatch | None = None
        for path in self._tokenizers:
            with ExitStack() as closing:
                text = Model.load(path, TEXT_ONLY)
                closing.callback(text.close)
                try:
                    server = self._open(url, name, text)
                except VocabularyMismatch as error:
                    mismatch = mismatch or error
                    continue
                closing.callback(server.verifier.close)
                if not server.opened.proved and len(self._tokenizers) > 1:
                    raise InvalidOption(
                        f"The server of {name} at {url} does not show its tokens: which of the {len(self._tokenizers)}"
                        " tokenizers it has cannot be told.",
                        "Serve that model by a gateway of its own, with another --port and one -m.",
                    )
                closing.pop_all()
                return text, server
        what = "" if mismatch is None else mismatch.what
        several = f"None of the {len(self._tokenizers)} tokenizers is that of {name}. " * (len(self._tokenizers) > 1)
        raise VocabularyMismatch(f"{several}{what}", "Name a model with the server's tokenizer with -m.")

    def _open(self, url: ServerURL, name: str, text: Model) -> PooledServer:
        opened = open_upstream(f"{url.base}#{name}" if name else url.base, text, self._options)
        return PooledServer(opened, min(opened.verifier.upstream.at_once or CONNECTIONS, CONNECTIONS))

    def _tell(self, news: str) -> None:
        if not self._closing.is_set():
            self._on_news(news)

    def _look(self, on_model: Callable[[ServerPool], None]) -> None:
        for _, error in self._away:
            self._tell(f"{error} It is used as soon as it answers.")
        retry = RetryDelay(self._options.retry, self._options.retry_most)
        while self._away and not self._closing.wait(retry.next()):
            (url, error), *others = self._away
            self._away = [*others, (url, error)]
            try:
                self._tell(self._join(url, on_model))
            except VerifierUnreachable:
                continue
            except EdgeError as refused:
                self._tell(f"{url} is not used. {refused.what}")
            self._away = others

    def _join(self, url: ServerURL, on_model: Callable[[ServerPool], object], *, announced: bool = True) -> str:
        """Use a server for its model, whose abilities are `announced`, if it is there; return the news."""
        name = self._model(url)
        if (model := self._models.get(name)) is None:
            text, server = self._first(url, name)
            model = self._models[name] = ServerPool(text, [server])
            on_model(model)
            return f"{url} is used now: {model.name} is served from now on."
        server = self._open(url, name, model.text)
        if model.add(server, announced=announced):
            return f"{url} is used now."
        server.verifier.close()
        return f"{url} is not used: its context is shorter, or it gives fewer log-probabilities."


def _urls(addresses: Sequence[str]) -> list[ServerURL]:
    urls = [ServerURL.parse(address) for address in addresses]
    for at, url in enumerate(urls):
        if any(url.base == other.base and url.model == other.model for other in urls[:at]):
            raise InvalidOption(f"{url} is given twice.", "Name each server once, or once for each of its models.")
    return urls
