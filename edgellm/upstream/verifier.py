"""A stock server as a verifier with sessions, which notices loss and return."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from edgellm.engine import common_prefix
from edgellm.errors import EdgeError, VerifierBusy, VerifierLost, VerifierSlow
from edgellm.spec.constraint import GrammarState, ReplyGrammar
from edgellm.spec.lost_verifier import RetryDelay, VerdictDeadline, VerdictWork
from edgellm.spec.protocols import Capabilities, Verifier
from edgellm.spec.sampling import Choice
from edgellm.spec.state import GenerationState
from edgellm.spec.types import NO_IDS, Chunk, Ids, Sampling, Verdict
from edgellm.spec.verifier import Session, VerifyRequest
from edgellm.upstream.dialects.served import Upstream
from edgellm.upstream.http_client import HttpClient, ServerRefused
from edgellm.upstream.rows import RowReply, RowRequest, RowsUnusable, Tier
from edgellm.upstream.verdict import Undecided, verdict

_log = logging.getLogger(__name__)
_LATE_SECONDS = 1.0  # seconds between two looks for a late answer
_LATEST = 30.0  # most seconds of waiting for a late answer


@dataclass(frozen=True, slots=True)
class UpstreamTiming:
    """Time limits in seconds: the least deadline of a verdict, and the back-off for a lost server, from `retry` up to
    `retry_most`."""

    least: float = 2.0
    retry: float = 0.2
    retry_most: float = 8.0


class UpstreamLink:
    """The state of a server, up or lost, and its deadlines. `loop_*` are for the loop of its client."""

    def __init__(self, upstream: Upstream, timing: UpstreamTiming) -> None:
        self._upstream = upstream
        self.patience = VerdictDeadline(timing.least)
        self._retry = RetryDelay(timing.retry, timing.retry_most)
        self._up = True
        self._returning: asyncio.Task[None] | None = None
        self._late: asyncio.Task[None] | None = None
        self._round_trip = 0.0
        self._unseen = self._passes = 0  # work of all requests in flight

    def ready(self) -> bool:
        """Return whether the server is up, not paused, and owes no late answer."""
        return self._up and self._late is None and not self._retry.left

    def wait_seconds(self) -> float:
        """Return the seconds until the server may be ready; 0 if it is."""
        late = 0.0 if self._late is None else _LATE_SECONDS
        return max(late, self._retry.left)

    async def ask(self, request: RowRequest, work: VerdictWork) -> RowReply:
        """Return the rows for a request. Raises VerifierBusy, VerifierSlow or VerifierLost.

        The deadline includes other requests in flight, which the server may answer first.
        """
        self._unseen, self._passes = self._unseen + work.unseen, self._passes + work.passes
        try:
            return await self._ask(request, work)
        finally:
            self._unseen, self._passes = self._unseen - work.unseen, self._passes - work.passes

    async def _ask(self, request: RowRequest, work: VerdictWork) -> RowReply:
        limit = self.patience.limit(VerdictWork(self._unseen, self._passes))
        began = perf_counter()
        asked = asyncio.create_task(self._upstream.rows(request))
        try:
            if not (await asyncio.wait((asked,), timeout=limit))[0]:
                self.patience.record_miss()
                if self._late is None:
                    self._late = asyncio.create_task(self._wait_for(asked))
                else:
                    asked.cancel()
                raise VerifierSlow(
                    f"The server of {self._upstream.name} has not answered within {limit:.1f} seconds, many times the"
                    " expected time.",
                    "This device continues alone and tries again by itself; check whether the server is overloaded.",
                )
            reply = asked.result()
        except asyncio.CancelledError:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            raise
        except VerifierBusy as busy:
            self._retry.pause(busy.seconds)
            raise
        except VerifierLost as error:
            of_request = isinstance(error, ServerRefused) and error.of_request
            if not (of_request or isinstance(error, VerifierSlow)):
                self.loop_lost(error)
            raise
        if self._late is not None:  # Another request has taken too long.
            self._late.cancel()
            self._late = None
        seconds = perf_counter() - began
        passes = len(reply.rows) if reply.tier is Tier.CONTINUE else 1
        self.patience.record(VerdictWork(work.unseen, passes), seconds)
        self._retry.reset()
        known = max(0.0, seconds - self._round_trip) if reply.seconds is None else reply.seconds
        return replace(reply, seconds=min(known, seconds))

    async def _wait_for(self, asked: asyncio.Task[RowReply]) -> None:
        """Wait up to `_LATEST` seconds for a late answer: asking again would only cost time."""
        try:
            async with asyncio.timeout(_LATEST):
                await asked
        except TimeoutError:
            _log.debug("an answer of the server of %s has never arrived", self._upstream.name)
        except VerifierBusy as busy:
            self._retry.pause(busy.seconds)
        except VerifierLost as error:
            self.loop_lost(error)
        self._late = None

    async def measure(self) -> None:
        """Check the server, and measure the round trip to it."""
        trips = []
        for _ in range(3):
            began = perf_counter()
            await self._upstream.check()
            trips.append(perf_counter() - began)
        self._round_trip = min(trips)

    def loop_lost(self, error: EdgeError) -> None:
        """Look for the server in the background until it is back."""
        if self._up:
            _log.warning("lost the server of %s: %s", self._upstream.name, error.what)
            self._up = False
            self._returning = asyncio.get_running_loop().create_task(self._come_back())

    async def _come_back(self) -> None:
        while not self._up:
            await asyncio.sleep(self._retry.pause())
            try:
                async with asyncio.timeout(self.patience.limit(VerdictWork(0, 1))):
                    await self._upstream.check()
                self._up = True
            except (EdgeError, TimeoutError) as error:
                _log.debug("not yet: %s", error)

    async def close(self) -> None:
        """Stop looking for the server."""
        self._up = False
        waiting = [task for task in (self._returning, self._late) if task is not None]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """The vocabulary of a server's model: `n` tokens, and which of them end a turn."""

    n: int
    is_eog: Callable[[int], bool]


class UpstreamVerifier(Verifier):
    """A stock server that verifies drafts in the vocabulary `tokens`; when lost, it is looked for in the background."""

    def __init__(
        self, client: HttpClient, upstream: Upstream, tokens: ServedTokens, positions: int,
        timing: UpstreamTiming | None = None, grammar: Callable[[str], GrammarState] | None = None,
    ) -> None:  # fmt: skip
        """Take over `client`, the way to `upstream`. `positions` of a text count if the server does not report them;
        `grammar` compiles JSON schemas, which replies cannot follow without it.

        Raises:
            VerifierLost, VerifierBusy: the server does not answer.
        """
        self.client, self.upstream, self.tokens = client, upstream, tokens
        self._positions, self._grammar = upstream.context_length or positions, grammar
        self.link = UpstreamLink(upstream, timing or UpstreamTiming())
        client.wait(self.link.measure())

    @property
    def capabilities(self) -> Capabilities:
        """Return the abilities: penalties and grammars need the likeliest tokens, if the server tells them."""
        upstream = self.upstream
        rules = upstream.steers and upstream.most_top > 0
        return Capabilities(
            upstream.name, self._positions, upstream.most_top > 0, rules, rules and self._grammar is not None,
            choice_of(upstream),
        )  # fmt: skip

    def up(self) -> bool:
        """Return whether the server is there and takes requests."""
        return self.link.ready()

    def open(self, state: GenerationState) -> Session:
        """Open a session, which is ready once the server is back."""
        text = self.text(state.sampling, grammar=ReplyGrammar.of(state.sampling.constraint, self._grammar))

        def send(request: VerifyRequest) -> Future[Verdict]:
            return text.ask(request.prefix, request.draft, request.extra, request.logprobs)

        return Session(state, send, ready=text.ready)

    def text(self, sampling: Sampling, salt: str = "", grammar: ReplyGrammar | None = None) -> UpstreamText:
        """Return a new text at the server, with tokens drawn by `sampling` and the `grammar`, if any; `salt` as in
        `RowRequest`."""
        return UpstreamText(self, sampling, salt, grammar)

    def wait_seconds(self) -> float:
        """Return the seconds until the server may be up; 0 if it is."""
        return self.link.wait_seconds()

    def close(self) -> None:
        self.client.wait(self.link.close())
        self.client.close()


class UpstreamText:
    """A text that grows at a stock server. The server keeps no session: each request has the whole text."""

    def __init__(self, server: UpstreamVerifier, sampling: Sampling, salt: str, grammar: ReplyGrammar | None) -> None:
        self._server, self._upstream = server, server.upstream
        self._sampling, self._salt, self._grammar = sampling, salt, grammar
        self._id = secrets.token_hex(16)
        self._asked = self._prefix = NO_IDS  # tokens that the server may have cached
        self._refused = False

    def ready(self) -> bool:
        """Return whether the server can be asked, and has not refused this text."""
        return self._server.link.ready() and not self._refused

    def ask(
        self, prefix: Ids, chunk: Chunk, extra: int = 0, logprobs: int | None = None,
        report: Callable[[RowReply], None] | None = None,
    ) -> Future[Verdict]:  # fmt: skip
        """Ask for a verdict on `chunk` after `prefix`, as `Session.submit`, and with `logprobs` for those of its tokens
        and of that many others. `report` is called with the server's reply in the loop of its client."""
        known = common_prefix(self._asked, prefix)
        text = np.concatenate((prefix, chunk.ids))
        if common_prefix(self._prefix, prefix) < len(self._prefix):  # A rolled back text may repeat requests.
            self._id = secrets.token_hex(16)
        top = likeliest(self._upstream, self._sampling, logprobs)
        request = RowRequest(
            prefix, chunk.ids, self._sampling, top, extra, self._id, repeats=known >= len(prefix), salt=self._salt
        )
        self._asked, self._prefix = text, prefix
        passes = request.places if self._upstream.tier is Tier.CONTINUE else 1 + extra
        return self._server.client.run(
            self._verdict(chunk, request, VerdictWork(len(text) - known, passes), logprobs, report)
        )

    async def _verdict(
        self, chunk: Chunk, request: RowRequest, work: VerdictWork, logprobs: int | None,
        report: Callable[[RowReply], None] | None,
    ) -> Verdict:  # fmt: skip
        reply = await self._rows(request, work)
        try:
            try:
                found = self._judged(chunk, request, reply, logprobs)
            except Undecided as undecided:
                request = self._steered(request, undecided)
                reply = await self._rows(request, VerdictWork(0, 1))
                found = self._judged(Chunk(), request, reply, None)
                among = None if undecided.steering is None else undecided.steering.among
                if among is not None and int(found.tokens[0]) not in among:
                    raise self._refusal() from None
        except RowsUnusable as error:
            lost = self._server.client.garbled(str(error))
            self._server.link.loop_lost(lost)
            raise lost from None
        if report is not None:
            report(reply)
        return found

    async def _rows(self, request: RowRequest, work: VerdictWork) -> RowReply:
        try:
            return await self._server.link.ask(request, work)
        except ServerRefused as error:
            self._refused = error.of_request
            raise

    def _judged(self, chunk: Chunk, request: RowRequest, reply: RowReply, logprobs: int | None) -> Verdict:
        return verdict(
            chunk, request, reply, self._server.tokens.n, logprobs, self._server.tokens.is_eog, self._grammar
        )

    def _steered(self, request: RowRequest, undecided: Undecided) -> RowRequest:
        """Return the request for the first token alone. Raise ServerRefused without a possible steering."""
        if undecided.steering is None:
            raise self._refusal()
        return replace(
            request, draft=NO_IDS, sampling=undecided.sampling, top=0, extra=0, repeats=True,
            steering=undecided.steering,
        )  # fmt: skip

    def _refusal(self) -> ServerRefused:
        """Return the error for a token that the server cannot decide, and ask no more about this text."""
        self._refused = True
        return ServerRefused(
            f"The likeliest tokens that {self._upstream.name} tells do not decide the next one by this rule.",
            "Sample greedily, or use a verifier of edgellm.", 422,
        )  # fmt: skip


def likeliest(upstream: Upstream, sampling: Sampling, logprobs: int | None) -> int:
    """Return how many likeliest tokens rows must include, for reported log-probabilities and for draws here, if the
    server answers with enough."""
    if sampling.ruled:
        return upstream.most_top
    here = not sampling.greedy and choice_of(upstream).draws_alike(sampling)
    wanted = sampling.top_k if here else 0
    return max(wanted, 0 if logprobs is None else min(max(1, logprobs), upstream.most_top))


def choice_of(upstream: Upstream) -> Choice:
    """Return the set that the tokens of a server are chosen from."""
    return Choice(upstream.most_top, draws_itself=upstream.tier is Tier.CONTINUE)
