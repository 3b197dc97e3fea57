"""Models made of arithmetic, with the protocols' faces: for what the real pair cannot be made to do on command."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from edgellm.errors import EdgeError, VerifierLost
from edgellm.spec import protocols
from edgellm.spec.protocols import Capabilities, Drafter, GenerationState, Session, Verifier, VerifyRequest
from edgellm.spec.sampling import distribution, draw
from edgellm.spec.types import NO_IDS, Chunk, Floats, Ids, Verdict
from edgellm.spec.verification import judge

EOG = 0


def at(written: int, most: int = 10**9) -> GenerationState:
    """A reply of which so many of at most so many tokens are written."""
    state = GenerationState(limits=protocols.GenerationLimits(most, written + 1))
    for _ in range(written):
        state.append(1)
    return state


Logits = Callable[[Ids], Floats]  # of the token after a prefix


class Letters:
    """An alphabet: token 0 ends the turn, the others are the letters a, b, c ..."""

    def piece(self, token: int) -> bytes:
        return b"" if token == EOG else bytes([96 + token])

    def is_eog(self, token: int) -> bool:
        return token == EOG


def markov(seed: int, n_vocab: int, sharpness: float = 1.5) -> Logits:
    """Logits that depend on the last token."""
    table = (np.random.default_rng(seed).normal(size=(n_vocab, n_vocab)) * sharpness).astype(np.float32)
    return lambda prefix: table[prefix[-1]]


def chain(seed: int, n_vocab: int = 20, eog_at: int | None = None, like: Logits | None = None) -> Logits:
    """A greedy model whose next token depends on every token before: a lost or repeated one changes all that follows.

    It ends the turn at length `eog_at`. With `like` it agrees with that model three times in four.
    """

    def logits(prefix: Ids) -> Floats:
        mixed = hash((seed, *prefix.tolist()))
        row = np.zeros(n_vocab, dtype=np.float32)
        if len(prefix) == eog_at:
            row[EOG] = 5.0
        elif like is not None and mixed // 64 % 4:
            return like(prefix)
        else:
            row[1 + mixed % (n_vocab - 1)] = 5.0
        return row

    return logits


@dataclass
class FakeDrafter(Drafter):
    logits: Logits
    prefixes: list[Ids] = field(default_factory=list)
    silent: bool = False
    copies: bool = False

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        prefix, sampling = state.ids, state.sampling
        self.prefixes.append(prefix.copy())
        if self.silent:
            return Chunk()
        assert gamma >= 1
        ids: list[int] = []
        while len(ids) < gamma and EOG not in ids:
            found = distribution(self.logits(np.append(prefix, ids).astype(np.int32)), sampling)
            ids.append(draw(found, sampling.seed, len(prefix) + len(ids)))
        sure = np.full(len(ids), 0.5, dtype=np.float32)
        return Chunk(np.array(ids, dtype=np.int32), sure, retrieved=self.copies)


@dataclass
class FakeVerifier(Verifier):
    """Gives an `error` for the verdicts whose number (from 0) is in `lost`, and is away for `absence` looks after
    each. A verdict is there after so many `looks`."""

    logits: Logits
    lost: Iterable[int] = ()
    absence: int = 2
    context_length: int = 10_000
    error: EdgeError = VerifierLost("Unplugged.", "Plug it in.")
    looks: int = 0
    sessions: list["FakeReply"] = field(default_factory=list)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("fake", self.context_length)

    def open(self, state: GenerationState) -> Session:
        self.sessions.append(FakeReply(self))
        return Session(state, self.sessions[-1].send, ready=self.sessions[-1].ready, close=self.sessions[-1].close)


class Late(Future[Verdict]):
    """A verdict that is settled once it has been looked for more than `patience` times, or is waited for."""

    def __init__(self, settle: Callable[[Future[Verdict]], None], patience: int) -> None:
        super().__init__()
        self._settle, self._patience = settle, patience

    def done(self) -> bool:
        self._patience -= 1
        if self._patience < 0 and not super().done():
            self._settle(self)
        return super().done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._patience = 0
        self.done()
        return super().exception(timeout)


@dataclass
class FakeReply:
    verifier: FakeVerifier
    asked: int = 0
    away: int = 0
    closed: bool = False
    seen: Ids = field(default_factory=lambda: NO_IDS)

    def ready(self) -> bool:
        self.away = max(0, self.away - 1)
        return not self.away

    def send(self, request: VerifyRequest) -> Future[Verdict]:
        prefix = request.prefix
        assert not self.closed
        assert not self.away
        assert len(prefix) + len(request.draft) <= self.verifier.context_length
        assert np.array_equal(prefix[: len(self.seen)], self.seen)  # what was said stays said
        self.seen = prefix.copy()
        self.asked += 1
        pending = Late(lambda found: self.settle(found, request), self.verifier.looks)
        if not self.verifier.looks:
            self.settle(pending, request)
        return pending

    def settle(self, found: Future[Verdict], request: VerifyRequest) -> None:
        try:
            found.set_result(self.verdict(request))
        except EdgeError as error:
            found.set_exception(error)

    def verdict(self, request: VerifyRequest) -> Verdict:
        verifier, prefix, chunk, sampling = self.verifier, request.prefix, request.draft, request.sampling
        if self.asked - 1 in verifier.lost:
            self.away = 1 + verifier.absence
            raise verifier.error
        text = np.concatenate((prefix, chunk.ids))
        n = len(prefix)
        rows = np.stack([verifier.logits(text[: n + i]) for i in range(len(chunk) + 1)])
        accepted, answer = judge(chunk.ids, rows, sampling, n)
        text, tokens = np.append(text[: n + accepted], answer).astype(np.int32), [answer]
        while accepted + len(tokens) <= request.extra and tokens[-1] != EOG:
            answer = judge(NO_IDS, verifier.logits(text)[None], sampling, len(text))[1]
            text, tokens = np.append(text, answer).astype(np.int32), [*tokens, answer]
        return Verdict(accepted, np.array(tokens, dtype=np.int32), 0.001, 10, 20, len(tokens))

    def close(self) -> None:
        self.closed = True


class Listed:
    """A grammar that allows some tokens, whatever the text."""

    def __init__(self, *allowed: int) -> None:
        self._mask = np.isin(np.arange(100_000), allowed)

    def mask(self, _text: Any) -> Any:
        return self._mask

    def forced(self, _text: Any) -> bytes:
        raise NotImplementedError
