"""Opening the servers of a gateway, which need not all be there when it starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from edgellm.engine import Model
from edgellm.errors import EdgeError, InvalidOption, VerifierUnreachable
from edgellm.spec.patience import RetryDelay
from edgellm.upstream.gateway.pool import PooledServer, ServerPool
from edgellm.upstream.http_client import ServerURL
from edgellm.upstream.opening import UpstreamOptions, open_upstream

AT_ONCE = 128
"""Requests in flight at a server that does not say how many it computes at once; the others wait here, in turns."""


class PoolOpening:
    """Opens the servers of a pool: some of them at once, and those that are away as soon as they are back."""

    def __init__(
        self, text: Model, options: UpstreamOptions | None = None, on_news: Callable[[str], None] | None = None
    ) -> None:
        """Open them for texts in the vocabulary of `text`. `on_news` is called with a sentence about a server that was
        away, from a thread of its own."""
        self._text, self._options = text, replace(options or UpstreamOptions(), connections=AT_ONCE)
        self._on_news = on_news or (lambda _text: None)
        self._closing = threading.Event()

    def open(self, addresses: Sequence[str]) -> ServerPool:
        """Return a pool of the servers at `addresses` that answer; look for the others in the background. All must have
        one model: those behind the first are asked for its model, unless their address names one.

        Raises what `open_upstream` raises: VerifierUnreachable where none of them answers; InvalidOption also where two
        have different models, or an address comes twice.
        """
        urls = [ServerURL.parse(address) for address in addresses]
        for at, url in enumerate(urls):
            if any(url.base == other.base for other in urls[:at]):
                raise InvalidOption(f"{url} is given twice.", "Name each server once.")
        away: list[tuple[ServerURL, VerifierUnreachable]] = []
        with ExitStack() as closing:
            servers: list[PooledServer] = []
            for url in urls:
                try:
                    servers.append(self._open(url, servers[0].upstream.name if servers else ""))
                    closing.callback(servers[-1].close)
                except VerifierUnreachable as error:
                    away.append((url, error))
            if not servers:
                raise away[0][1]
            closing.pop_all()
        pool = ServerPool(servers)
        if away:
            threading.Thread(target=self._look, args=(pool, away), name="edgellm-opening", daemon=True).start()
        return pool

    def close(self) -> None:
        """Look for servers no longer."""
        self._closing.set()

    def _open(self, url: ServerURL, model: str) -> PooledServer:
        wanted = url.model or model
        opened = open_upstream(f"{url.base}#{wanted}" if wanted else url.base, self._text, self._options)
        if model and opened.verifier.name != model:
            opened.verifier.close()
            raise InvalidOption(
                f"{url} has {opened.verifier.name}, and the server before it {model}.",
                "Give servers of one model: a reply may go on at another one. Serve each model by a gateway of its own,"
                " with its own --port.",
            )
        return PooledServer(opened, min(opened.verifier.upstream.at_once or AT_ONCE, AT_ONCE))

    def _tell(self, news: str) -> None:
        if not self._closing.is_set():
            self._on_news(news)

    def _look(self, pool: ServerPool, away: list[tuple[ServerURL, VerifierUnreachable]]) -> None:
        for _, error in away:
            self._tell(f"{error.what} It is used as soon as it answers.")
        retry = RetryDelay(self._options.timing.retry, self._options.timing.retry_most)
        left = [url for url, _ in away]
        while left and not self._closing.wait(retry.next()):
            url = left.pop(0)
            try:
                server = self._open(url, pool.name)
            except VerifierUnreachable:
                left.append(url)
            except EdgeError as error:
                self._tell(f"{url} is not used. {error.what}")
            else:
                if pool.add(server):
                    self._tell(f"{url} is used now.")
                else:
                    server.close()
                    self._tell(f"{url} is not used: its context is shorter, or it gives fewer log-probabilities.")
