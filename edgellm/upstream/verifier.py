"""A stock server as a verifier with sessions, which notices loss and return."""

import asyncio
import logging
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from edgellm.engine import Model, common_prefix
from edgellm.errors import EdgeError, VerifierBusy, VerifierLost, VerifierSlow
from edgellm.spec.protocols import Capabilities, Elsewhere, GenerationState, Session, Verifier, VerifyRequest
from edgellm.spec.sampling import ReplyGrammar
from edgellm.spec.types import NO_IDS, Verdict
from edgellm.spec.verification import RetryDelay, VerdictDeadline, VerdictWork
from edgellm.upstream.dialects.served import Upstream
from edgellm.upstream.http_client import ServerRefused
from edgellm.upstream.rows import RowReply, RowRequest, RowsUnusable, Tier, Undecided, verdict
from edgellm.verifier.in_process import EXTRA_TOKENS

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UpstreamOptions:
    """The settings of a server: the `tier` that it verifies by (None: the best), a file with its key, and times in
    seconds: the `least` deadline of a verdict, and the back-off for a lost server, from `retry` up to `retry_most`."""

    tier: Tier | None = None
    key_file: Path | None = None
    least: float = 2.0
    retry: float = 0.2
    retry_most: float = 8.0


class UpstreamVerifier(Verifier):
    """A stock server that verifies drafts; when lost, it is looked for in the background. Coroutines and `lost` are for
    the loop of its client."""

    extra = EXTRA_TOKENS
    elsewhere: Elsewhere

    def __init__(self, upstream: Upstream, text: Model, options: UpstreamOptions, *, proved: bool) -> None:
        """Take over the client of `upstream`; `text` has the vocabulary of its model, which is `proved` if the server
        has shown its tokens. Raises VerifierLost, VerifierBusy: the server does not answer."""
        self.upstream, self.model, self.proved = upstream, text, proved
        self._deadline = VerdictDeadline(options.least)
        self._retry = RetryDelay(options.retry, options.retry_most)
        self._up = True
        self._returning: asyncio.Task[None] | None = None
        self._asked: list[VerdictWork] = []
        self._round_trip = upstream.client.wait(self._measured())

    @property
    def capabilities(self) -> Capabilities:
        """Return the abilities: penalties and grammars need the likeliest tokens, if the server tells them."""
        upstream = self.upstream
        rules = upstream.steers and upstream.most_top > 0
        positions = upstream.context_length or self.model.n_ctx_train
        return Capabilities(upstream.name, positions, upstream.most_top > 0, rules, rules, upstream.choice)

    def up(self) -> bool:
        """Return whether the server is up, and not paused."""
        return self._up and not self.wait_seconds()

    def wait_seconds(self) -> float:
        """Return the seconds until the server may be up; 0 if it is."""
        return self._retry.left

    async def ask(self, request: RowRequest, work: VerdictWork) -> RowReply:
        """Return the rows for a request. Raises VerifierBusy, VerifierSlow or VerifierLost.

        The deadline includes other requests in flight, which the server may answer first.
        """
        self._asked.append(work)
        limit = self._deadline.limit(
            VerdictWork(sum(one.unseen for one in self._asked), sum(one.passes for one in self._asked))
        )
        began = perf_counter()
        try:
            async with asyncio.timeout(limit):
                reply = await self.upstream.rows(request)
        except VerifierBusy as busy:
            self._retry.pause(busy.seconds)
            raise
        except VerifierLost as error:
            if not (isinstance(error, ServerRefused) and error.of_request):
                self.lost(error)
            raise
        except TimeoutError:
            self._deadline.record_miss()
            self._retry.pause()
            raise VerifierSlow(
                f"The server of {self.upstream.name} has not answered within {limit:.1f} seconds, many times the"
                " expected time.",
                "This device continues alone and tries again by itself; check whether the server is overloaded.",
            ) from None
        finally:
            self._asked.remove(work)
        seconds = perf_counter() - began
        passes = len(reply.rows) if reply.tier is Tier.CONTINUE else 1
        self._deadline.record(VerdictWork(work.unseen, passes), seconds)
        self._retry.reset()
        known = max(0.0, seconds - self._round_trip) if reply.seconds is None else reply.seconds
        return replace(reply, seconds=min(known, seconds))

    async def _measured(self) -> float:
        """Check the server, and return the seconds of a round trip to it."""
        trips = []
        for _ in range(3):
            began = perf_counter()
            await self.upstream.check()
            trips.append(perf_counter() - began)
        return min(trips)

    def lost(self, error: EdgeError) -> None:
        """Look for the server in the background until it is back."""
        if self._up:
            _log.warning("lost the server of %s: %s", self.upstream.name, error.what)
            self._up = False
            self._returning = asyncio.get_running_loop().create_task(self._come_back())

    async def _come_back(self) -> None:
        while not self._up:
            await asyncio.sleep(self._retry.pause())
            try:
                async with asyncio.timeout(self._deadline.limit(VerdictWork(0, 1))):
                    await self.upstream.check()
                self._up = True
            except (EdgeError, TimeoutError) as error:
                _log.debug("not yet: %s", error)

    def open(self, state: GenerationState) -> Session:
        """Open a session, which is ready once the server is back."""
        text = UpstreamText(self)
        return Session(state, text.ask, grammar=self.model.grammar, ready=text.ready)

    def close(self) -> None:
        self.upstream.client.close()


class UpstreamText:
    """A text that grows at a stock server. The server keeps no session: each request has the whole text."""

    def __init__(self, server: UpstreamVerifier, salt: str = "") -> None:
        """Ask `server`; `salt` as in `RowRequest`."""
        self._server, self._upstream, self._salt = server, server.upstream, salt
        self._asked = NO_IDS  # tokens that the server may have cached
        self._refused = False

    def ready(self) -> bool:
        """Return whether the server can be asked, and has not refused this text."""
        return self._server.up() and not self._refused

    def ask(self, asked: VerifyRequest) -> Future[Verdict]:
        """Ask for a verdict; the request has the whole text."""
        upstream, prefix = self._upstream, asked.prefix
        known = common_prefix(self._asked, prefix)
        text = np.concatenate((prefix, asked.draft.ids))
        request = RowRequest(
            prefix, asked.draft.ids, asked.sampling, upstream.top(asked.sampling, asked.logprobs), asked.extra,
            salt=self._salt,
        )  # fmt: skip
        self._asked = text
        passes = request.places if upstream.tier is Tier.CONTINUE else 1 + asked.extra
        return upstream.client.run(self._verdict(asked, request, VerdictWork(len(text) - known, passes)))

    async def _verdict(self, asked: VerifyRequest, request: RowRequest, work: VerdictWork) -> Verdict:
        try:
            try:
                return await self._judged(request, work, asked.grammar, asked.logprobs)
            except Undecided as undecided:
                steering = undecided.steering
                if steering is None:
                    raise self._refusal() from None
                steered = replace(request, draft=NO_IDS, sampling=undecided.sampling, top=0, extra=0, steering=steering)
                found = await self._judged(steered, VerdictWork(0, 1), asked.grammar)
                if steering.among is not None and int(found.tokens[0]) not in steering.among:
                    raise self._refusal() from None
                return found
        except RowsUnusable as error:
            lost = self._upstream.client.garbled(str(error))
            self._server.lost(lost)
            raise lost from None
        except ServerRefused as error:
            self._refused = error.of_request
            raise

    async def _judged(
        self, request: RowRequest, work: VerdictWork, grammar: ReplyGrammar | None, logprobs: int | None = None
    ) -> Verdict:
        reply = await self._server.ask(request, work)
        model = self._server.model
        return verdict(request, reply, model.n_vocab, logprobs, model.is_eog, grammar)

    def _refusal(self) -> ServerRefused:
        """Return the error for a token that the server cannot decide."""
        return ServerRefused(
            f"The likeliest tokens that {self._upstream.name} tells do not decide the next one by this rule.",
            "Sample greedily, or use a verifier of edgellm.", 422,
        )  # fmt: skip
