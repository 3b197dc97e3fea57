"""Replies that note how they were written, and a judge that finds errors in them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from edgellm.engine import Context, ContextSpec, Model
from edgellm.errors import VerifierUnavailable
from edgellm.spec.loop import merge
from edgellm.spec.protocols import Drafter
from edgellm.spec.sampling import distribution, draw, probability
from edgellm.spec.state import GenerationState
from edgellm.spec.types import GREEDY, Chunk, Floats, Ids, Notice, Round, Sampling, Source, Token, Verdict
from edgellm.spec.verifier import Capabilities, Session, Verifier, VerifyRequest

TOKENS = 64
POSITIONS = 1024
_UNCHECKED = (Source.DRAFT, Source.PARALLEL)
TIE = 1e-3  # logits closer than this may swap ranks with the shape of the batch


@dataclass
class TracedRound:
    """A round: the device's drafts after `prefix`, and the verdict, if one came."""

    prefix: Ids
    chunk: Chunk
    verdict: Verdict | None = None
    drafted: float = 0.0  # seconds
    waited: float = 0.0  # seconds for the verdict, or until the device gave it up
    lost: bool = False


@dataclass(frozen=True)
class Gap:
    """The longest time between two tokens of a reply, and its parts; all in seconds."""

    seconds: float = 0.0
    drafted: float = 0.0
    waited: float = 0.0  # for the verifier
    computed: float = 0.0  # by the verifier's own account; 0 without a verdict
    lost: bool = False  # the verifier was lost meanwhile

    @property
    def rest(self) -> float:
        """Seconds of neither drafting nor waiting: connecting, and delays by other programs."""
        return self.seconds - self.drafted - self.waited


class Traced(Drafter):
    """A drafter that notes every round."""

    def __init__(self, drafter: Drafter, rounds: list[TracedRound]) -> None:
        self._drafter, self._rounds = drafter, rounds

    def begin(self, state: GenerationState) -> None:
        self._drafter.begin(state)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        began = time.perf_counter()
        chunk = self._drafter.propose(state, gamma)
        self._rounds.append(TracedRound(state.ids.copy(), chunk, drafted=time.perf_counter() - began))
        return chunk

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        self._drafter.look_ahead(state, chunk, gamma, until)

    def observe(self, state: GenerationState, turn: Round) -> None:
        self._drafter.observe(state, turn)

    def end(self) -> None:
        self._drafter.end()


class TracedVerifier(Verifier):
    """A verifier whose verdicts are noted, with an optional delay.

    `lost_at` is the length of the text at which it was first lost.
    """

    def __init__(self, verifier: Verifier, pace: float, rounds: list[TracedRound]) -> None:
        self._verifier, self._pace, self._rounds = verifier, pace, rounds
        self.lost_at: int | None = None
        self.slept = 0.0  # seconds

    @property
    def capabilities(self) -> Capabilities:
        own = self._verifier.capabilities
        return Capabilities(own.name, own.context_length, can_be_lost=own.can_be_lost)

    def open(self, state: GenerationState) -> Session:
        session = self._verifier.open(state)

        def ready() -> bool:
            self.wait()
            if not (found := session.ready()):
                self.away()
            return found

        def send(request: VerifyRequest) -> Future[Verdict]:
            noted: Future[Verdict] = Future()
            noted.set_running_or_notify_cancel()
            began = time.perf_counter()

            def settle(pending: Future[Verdict]) -> None:
                error = pending.exception()
                self.waited(time.perf_counter() - began, None if error else pending.result())
                if isinstance(error, VerifierUnavailable):
                    self.away()
                noted.set_exception(error) if error else noted.set_result(pending.result())

            session.submit(request.prefix, request.draft, request.extra).add_done_callback(settle)
            return noted

        return Session(state, send, ready=ready, close=session.close)

    def wait(self) -> None:
        """Wait for the device's delay."""
        began = time.perf_counter()
        time.sleep(self._pace)
        self.slept += time.perf_counter() - began

    def away(self) -> None:
        """Note that the verifier was lost."""
        if self.lost_at is None:
            self.lost_at = len(self._rounds[-1].prefix)

    def waited(self, seconds: float, verdict: Verdict | None) -> None:
        """Note the seconds waited for this round's verdict, which is None if it was lost."""
        now = self._rounds[-1]
        now.waited, now.lost = seconds, verdict is None
        if verdict is not None:
            now.verdict = verdict


class Endless:
    """The draft model's vocabulary, without an end of the turn."""

    def __init__(self, model: Model) -> None:
        self.piece = model.piece

    def is_eog(self, _token: int) -> bool:
        return False


@dataclass
class Written:
    """A reply, and how it was written."""

    prompt: Ids
    tokens: list[Token] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    rounds: list[TracedRound] = field(default_factory=list)
    seconds: float = 0.0
    lost_at: int | None = None
    sampling: Sampling = GREEDY
    gap: Gap = Gap()

    @property
    def ids(self) -> Ids:
        return np.array([token.id for token in self.tokens], dtype=np.int32)


class Judge:
    """Finds errors in a reply."""

    def __init__(self, draft: Model, verifier: Model) -> None:
        self._models = {True: verifier, False: draft}

    def problems(self, reply: Written, undisturbed: Written) -> list[str]:
        found = []
        if len(reply.tokens) != TOKENS:
            found.append(f"{len(reply.tokens)} tokens of {TOKENS}")
        whole = np.concatenate((reply.prompt, reply.ids))
        text = reply.prompt
        for done in reply.rounds:
            if not np.array_equal(done.prefix, text):
                found.append("a round began with another text than the rounds before it had written")
            text = np.concatenate((text, np.array([token for token, *_ in merge(done.chunk, done.verdict)], np.int32)))
        if not np.array_equal(text[: len(reply.prompt) + TOKENS], whole):
            found.append("the reply is not what its rounds have written")
        for verified in (True, False):
            found += self._strangers(reply, whole, verified)
        if not reply.sampling.greedy:
            found += self._replay(reply, text)
        until = TOKENS if reply.lost_at is None else reply.lost_at - len(reply.prompt)
        if not np.array_equal(reply.ids[:until], undisturbed.ids[:until]):
            found.append("the text before the hit is not the undisturbed one")
        return found

    def _strangers(self, reply: Written, whole: Ids, verified: bool) -> list[str]:
        """Return errors for tokens that the model named by their source would not have written."""
        places = [i for i, token in enumerate(reply.tokens) if (token.source not in _UNCHECKED) == verified]
        if not places:
            return []
        with Context(self._models[verified], ContextSpec(n_ctx=POSITIONS, threads=1)) as context:
            rows = context.decode(whole[:-1], outputs=len(reply.tokens))
            if not reply.sampling.greedy:
                return [f"token {i} cannot have been drawn by {'the verifier' if verified else 'the draft model'}"
                        for i in places if not _drawable(rows[i], reply.tokens[i].id, reply.sampling)]  # fmt: skip
            gaps = {i: float(rows[i].max() - rows[i, reply.tokens[i].id]) for i in places}
        return [f"token {i} is not {'the verifier' if verified else 'the draft model'}'s: its logit is {gap:.3g} below"
                for i, gap in gaps.items() if gap > TIE]  # fmt: skip

    def _replay(self, reply: Written, text: Ids) -> list[str]:
        """Return errors for verdicts that do not follow again from the seed, the drafts and the verifier's logits."""
        start = len(reply.prompt)
        with Context(self._models[True], ContextSpec(n_ctx=POSITIONS, threads=1)) as context:
            rows = context.decode(text[:-1], outputs=len(text) - start).copy()
        found = []
        for number, done in enumerate(reply.rounds):
            if done.verdict is None:
                continue
            at, accepted, own = len(done.prefix), done.verdict.accepted, int(done.verdict.tokens[0])
            drafted = done.chunk.ids.tolist()
            if drafted[accepted : accepted + 1] == [own]:
                found.append(f"round {number}: token {accepted} was rejected, and is the verifier's own")
            for place, token in enumerate([*drafted[:accepted], own], start=at):
                if not _first(rows[place - start], token, reply.sampling, place):
                    found.append(f"round {number}: token {place - start} of the reply is not what the seed draws")
        return found


def _first(row: Floats, token: int, sampling: Sampling, position: int) -> bool:
    """Return whether `token` is drawn from the logits `row` (n_vocab,), or would be by one as much likelier as a batch
    of another shape may make it."""
    near = row.copy()
    near[token] += TIE
    return draw(distribution(near, sampling), sampling.seed, position) == token


def _drawable(row: Floats, token: int, sampling: Sampling) -> bool:
    """Return whether `token` can be drawn from the logits `row` (n_vocab,); tokens on the edge of the cut-off count."""
    near = row.copy()
    near[token] += TIE
    return probability(distribution(near, sampling), token) > 0.0


def longest_gap(moments: Sequence[tuple[float, int]], rounds: Sequence[TracedRound]) -> Gap:
    """Return the longest time between two tokens, given the second and the round of each."""
    longest = Gap()
    for (before, _), (now, number) in pairwise(moments):
        if now - before > longest.seconds:
            done = rounds[number]
            computed = done.verdict.seconds if done.verdict is not None else 0.0
            longest = Gap(now - before, done.drafted, done.waited, computed, done.lost)
    return longest
