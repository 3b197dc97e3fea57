"""Replies that note how they were written, and a judge that finds what is wrong with one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from edgellm.engine import Context, Model
from edgellm.errors import VerifierLost
from edgellm.serve.remote import RemoteVerifier
from edgellm.spec.ahead import AheadDrafter
from edgellm.spec.drafter import ModelDrafter
from edgellm.spec.loop import merge
from edgellm.spec.records import GREEDY, Chunk, Ids, Notice, Sampling, Source, Token, Verdict

TOKENS = 64
POSITIONS = 1024
_UNCHECKED = (Source.DRAFT, Source.PARALLEL)
TIE = 1e-3  # logits closer than this may change places with the shape of the batch


@dataclass
class Round:
    """What the device drafted after `prefix`, and the verdict, if one came."""

    prefix: Ids
    chunk: Chunk
    verdict: Verdict | None = None


class Traced:
    """Drafter, verifier and session in one, over real ones, that note every round; perhaps slow to ask.

    `lost_at` is the length of the text where the verifier was first found to be away.
    """

    def __init__(self, drafter: ModelDrafter | AheadDrafter, verifier: RemoteVerifier, pace: float) -> None:
        self._drafter, self._session, self._pace = drafter, verifier.open(GREEDY), pace
        self.rounds: list[Round] = []
        self.lost_at: int | None = None
        self.slept = 0.0  # seconds
        self.name, self.context_length = verifier.name, verifier.context_length

    def open(self, _sampling: Sampling) -> Traced:
        return self

    def draft(self, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:
        self.rounds.append(Round(prefix.copy(), self._drafter.draft(prefix, gamma, sampling)))
        return self.rounds[-1].chunk

    def look_ahead(
        self, prefix: Ids, chunk: Chunk, *, gamma: int, sampling: Sampling, until: Callable[[], bool]
    ) -> None:
        if isinstance(self._drafter, AheadDrafter):
            self._drafter.look_ahead(prefix, chunk, gamma=gamma, sampling=sampling, until=until)

    def ready(self) -> bool:
        began = time.perf_counter()
        time.sleep(self._pace)
        self.slept += time.perf_counter() - began
        if not (ready := self._session.ready()):
            self._away()
        return ready

    def _away(self) -> None:
        if self.lost_at is None:
            self.lost_at = len(self.rounds[-1].prefix)

    def submit(self, prefix: Ids, chunk: Chunk, extra: int = 0) -> Traced:
        self._pending = self._session.submit(prefix, chunk, extra)
        return self

    def done(self) -> bool:
        return self._pending.done()

    def result(self) -> Verdict:
        try:
            self.rounds[-1].verdict = verdict = self._pending.result()
        except VerifierLost:
            self._away()
            raise
        return verdict

    def close(self) -> None:
        self._session.close()


class Endless:
    """The draft model's alphabet, without an end of the turn."""

    def __init__(self, model: Model) -> None:
        self.piece = model.piece

    def is_eog(self, _token: int) -> bool:
        return False


@dataclass
class Written:
    """One reply."""

    prompt: Ids
    tokens: list[Token] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0
    lost_at: int | None = None

    @property
    def ids(self) -> Ids:
        return np.array([token.id for token in self.tokens], dtype=np.int32)


class Judge:
    """Finds out what is wrong with a reply, if anything."""

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
        until = TOKENS if reply.lost_at is None else reply.lost_at - len(reply.prompt)
        if not np.array_equal(reply.ids[:until], undisturbed.ids[:until]):
            found.append("the text before the hit is not the undisturbed one")
        return found

    def _strangers(self, reply: Written, whole: Ids, verified: bool) -> list[str]:
        """Tokens that the model that their source names would not have written."""
        places = [i for i, token in enumerate(reply.tokens) if (token.source not in _UNCHECKED) == verified]
        if not places:
            return []
        with Context(self._models[verified], n_ctx=POSITIONS, threads=1) as context:
            rows = context.decode(whole[:-1], outputs=len(reply.tokens))
            gaps = {i: float(rows[i].max() - rows[i, reply.tokens[i].id]) for i in places}
        return [f"token {i} is not {'the verifier' if verified else 'the draft model'}'s: its logit is {gap:.3g} below"
                for i, gap in gaps.items() if gap > TIE]  # fmt: skip
