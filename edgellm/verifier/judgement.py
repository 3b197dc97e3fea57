"""The judgement of one request by the verifier's passes over its draft, and its answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from edgellm.engine import Rows, known
from edgellm.errors import EdgeError
from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.sampling import logprobs
from edgellm.spec.types import NO_IDS, Chunk, Ids, Logprobs, Verdict
from edgellm.spec.verification import judge, plausible

NOTHING = Chunk()


@dataclass(slots=True, eq=False)
class Judgement:
    """The partial verdict on a request: `ids` are all tokens before the `remaining` part of the draft, and `passes`
    were computed in `seconds`."""

    request: VerifyRequest
    ids: Ids = field(default_factory=lambda: NO_IDS)
    remaining: Chunk = field(init=False)
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passes: int = 0
    plausible: tuple[bool, ...] = ()
    logprobs: list[Logprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.remaining = self.request.draft

    def judge(self, rows: Rows, drafted: int, is_eog: Callable[[int], bool]) -> bool:
        """Judge the first `drafted` tokens, and the next one if any; return whether another pass is needed.

        `rows` (drafted + 1, n_vocab) are logits: row i predicts place i. Afterwards, the first `computed` tokens of the
        request's sequence are valid. Raises EngineFailed if the logits contain NaN.
        """
        request = self.request
        # The last row judges a further drafted token, if any.
        chunk = self.remaining.part(0, drafted + 1)
        start = request.position + len(request.prefix) + self.accepted + len(self.tokens)
        accepted, token = judge(chunk.ids[:drafted], rows, request.sampling, start, self.ids, request.grammar)
        whole = accepted == drafted < len(chunk) and token == int(chunk.ids[drafted])
        accepted += whole
        self.passes += 1
        extra = bool(self.tokens)  # The draft is the verifier's own, of extra tokens.
        if extra:
            self.tokens.extend(chunk.ids[:accepted].tolist())
        else:
            self.accepted += accepted
            if chunk.retrieved:
                self.plausible += plausible(chunk, rows, accepted)
        drafts_stand = accepted > 0 or (self.accepted > 0 and not extra)
        ended = drafts_stand and is_eog(int((chunk.ids[:accepted] if accepted else self.ids)[-1]))
        continues = whole and not (extra and ended)
        bare = continues or (extra and ended)  # No token of the verifier follows the accepted tokens.
        if not bare:
            self.tokens.append(token)
        needs_pass = continues or (len(self.tokens) <= request.extra and not ended and not is_eog(token))
        request.computed = start + min(accepted, drafted)
        if needs_pass or request.logprobs is not None:
            kept = chunk.ids[:accepted] if bare else np.append(chunk.ids[:accepted], np.int32(token))
            if request.logprobs is not None and len(kept):
                self.logprobs.extend(logprobs(known(rows, len(kept)), kept, request.logprobs))
            self.ids = np.concatenate((self.ids, kept))
            self.remaining = self.remaining.part(drafted + 1, len(self.remaining)) if continues else NOTHING
        return needs_pass

    def verdict(self) -> Verdict:
        """Return the verdict, after the last pass."""
        draft, found = self.request.draft, self.plausible
        # Tokens that were not decoded count as plausible.
        accepted_anyway = (*found, *[True] * (len(draft) - len(found))) if draft.retrieved else None
        return Verdict(
            self.accepted, np.array(self.tokens, np.int32), self.seconds, passes=self.passes,
            plausible=accepted_anyway, logprobs=tuple(self.logprobs),
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Job(Judgement):
    """A request on its way through queue, slot and batches of the engine, until the answer is delivered."""

    deliver: Deliver = lambda _answer: None
    arrival: int = 0  # prefill batches computed before the request arrived, or was last served
    turn: int = 0  # earlier requests of the same device, if devices take turns
    slot: int = -1  # -1 while it waits for one

    @property
    def unseen(self) -> int:
        """Return the number of tokens to compute before the drafted ones; at least 1."""
        return len(self.ids) - self.request.computed

    @property
    def drafted(self) -> int:
        """Return the number of drafted tokens still to be verified."""
        return len(self.remaining)

    @property
    def session(self) -> int:
        return self.request.session

    @property
    def device(self) -> str:
        return self.request.tenant.device


@dataclass(frozen=True, slots=True)
class MissingPrefix:
    """The answer that a session holds only the first `position` tokens: the rest must be sent again."""

    position: int


Answer: TypeAlias = Verdict | MissingPrefix | EdgeError
Deliver: TypeAlias = Callable[[Answer], None]


@dataclass(slots=True)
class Counters:
    """Counters of an engine, which grow. `shared` batches had several sessions, at most `widest` of them.

    `rows` were computed; `copied` tokens came from another session's cache instead. `preemptions` are running requests
    that lost their slot to another device's request.
    """

    batches: int = 0
    prefills: int = 0
    shared: int = 0
    widest: int = 0
    rows: int = 0
    copied: int = 0
    verdicts: int = 0
    verified: int = 0
    evictions: int = 0
    preemptions: int = 0

    def add(self, **amounts: int) -> None:
        """Add these amounts to the counters of their names."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)


def survives(chunk: Chunk) -> list[float]:
    """Return for each token its drafter's probability that it and all before it are accepted; shape (n,)."""
    drafted = 0 if chunk.retrieved else len(chunk) - chunk.tail
    return [*chunk.confidence[:drafted].cumprod().tolist(), *chunk.confidence[drafted:].tolist()]
