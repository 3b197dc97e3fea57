"""The servers behind a gateway: their opening, by their models, though all may be away at the start."""

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from edgellm.engine import Model
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import EdgeError, InvalidOption, VerifierUnreachable, VocabularyMismatch
from edgellm.spec.verification import RetryDelay
from edgellm.upstream.gateway.backend import GatewayBackend, PooledServer
from edgellm.upstream.http_client import CONNECTIONS, ServerURL
from edgellm.upstream.opening import models_at, open_upstream
from edgellm.upstream.verifier import UpstreamOptions


class PoolOpening:
    """The opening of a gateway's servers: some at once, and servers that are away once they are back."""

    def __init__(
        self, tokenizers: Sequence[Path], options: UpstreamOptions | None = None,
        on_news: Callable[[str], None] | None = None,
    ) -> None:  # fmt: skip
        """Open servers with the `tokenizers` of these model files, at least one: each model has the first of them whose
        tokens are proved to be its own. `on_news` is called with a sentence about a server that is away, or was, also
        from the thread of `look`."""
        self._tokenizers, self._options = tuple(tokenizers), options or UpstreamOptions()
        self._on_news = on_news or (lambda _text: None)
        self._closing = threading.Event()
        self._models: dict[str, GatewayBackend] = {}
        self.away: list[ServerURL] = []
        """Servers that have not answered yet."""

    def open(self, addresses: Sequence[str]) -> tuple[GatewayBackend, ...]:
        """Return the models of the servers at `addresses` that answer, each with its servers; `look` finds the others.
        An address without a model means a model of an earlier address, if the server has it, else the server's first.
        Raises InvalidOption: an address is invalid, or comes twice; or it cannot be told which of several tokenizers a
        server has; VocabularyMismatch: no tokenizer is a server's own; ModelNotFound, ModelCorrupt, ModelUnsupported: a
        file has no tokenizer."""
        with ExitStack() as closing:
            for url in _urls(addresses):
                try:
                    self._join(url, lambda model: closing.callback(model.dispose), announced=False)
                except VerifierUnreachable as error:
                    self.away.append(url)
                    self._tell(f"{error} It is used as soon as it answers.")
            for path in () if self._models else self._tokenizers:  # They are checked at the start in any case.
                Model.load(path, TEXT_ONLY).close()
            closing.pop_all()
        return tuple(self._models.values())

    def look(self, on_model: Callable[[GatewayBackend], None]) -> None:
        """Look in the background for the servers that were away, with a back-off. Each is used as soon as it answers;
        `on_model` takes over a new model, in a thread of its own."""
        if self.away:
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
                if not server.verifier.proved and len(self._tokenizers) > 1:
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
        verifier = open_upstream(f"{url.base}#{name}" if name else url.base, text, self._options)
        return PooledServer(verifier, min(verifier.upstream.at_once or CONNECTIONS, CONNECTIONS))

    def _tell(self, news: str) -> None:
        if not self._closing.is_set():
            self._on_news(news)

    def _look(self, on_model: Callable[[GatewayBackend], None]) -> None:
        retry = RetryDelay(self._options.retry, self._options.retry_most)
        while self.away and not self._closing.wait(retry.next()):
            url, *others = self.away
            self.away = [*others, url]
            try:
                self._tell(self._join(url, on_model))
            except VerifierUnreachable:
                continue
            except EdgeError as refused:
                self._tell(f"{url} is not used. {refused.what}")
            self.away = others

    def _join(self, url: ServerURL, on_model: Callable[[GatewayBackend], object], *, announced: bool = True) -> str:
        """Use a server for its model, whose abilities are `announced`, if it is there; return the news."""
        name = self._model(url)
        if (model := self._models.get(name)) is None:
            text, server = self._first(url, name)
            model = self._models[name] = GatewayBackend(text, [server])
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
