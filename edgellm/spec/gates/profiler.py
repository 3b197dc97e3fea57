"""Offline profiling of a pair (Synera, section 5): run with everything offloaded, and watch.

A pair is watched writing with everything verified, and the draft model writing alone, with every chunk tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep

import numpy as np
import numpy.typing as npt

from edgellm.errors import VerifierBusy
from edgellm.spec.gates.features import signals, surprise
from edgellm.spec.ngram.sources import ContextLookup, Seen, differed
from edgellm.spec.protocols import Drafter, VerifierSession
from edgellm.spec.state import DraftRules, GenerationLimits, GenerationState
from edgellm.spec.types import Chunk, Ids, Verdict

_LONGER = 1.3  # wait a little longer than told, as a session does


@dataclass(frozen=True, slots=True)
class ObservedChunk:
    """One drafted chunk and what the verifier said of it: `signals` (len(NAMES),); `accepted` of `tokens`."""

    signals: npt.NDArray[np.float64]
    confidence: float
    importance: float
    accepted: int
    tokens: int

    @property
    def whole(self) -> bool:
        return self.accepted == self.tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt: chunks of the fully verified reply, and of the draft model's own reply.

    `confidence` of each token of the draft model's reply; seconds of each drafted token and verification. `heeded` are
    chunks of a verified reply in which the draft model heeded the context, if it was asked to.
    """

    verified: tuple[ObservedChunk, ...]
    alone: tuple[ObservedChunk, ...]
    confidence: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    heeded: tuple[ObservedChunk, ...] = ()

    @property
    def judged(self) -> tuple[ObservedChunk, ...]:
        """Return the chunks that the fitted gate is to judge."""
        return self.heeded or self.verified


class PairProfiler:
    """Runs prompts through a pair, greedily, in chunks of `gamma`."""

    def __init__(
        self, drafter: Drafter, session: VerifierSession, is_eog: Callable[[int], bool], limits: GenerationLimits
    ) -> None:
        """Watch the pair write replies within `limits`."""
        self._drafter, self._session, self._is_eog, self._limits = drafter, session, is_eog, limits
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []

    def run(self, prompt: Ids, lookup_below: float = 0.0) -> Run:
        """Return the observations for `prompt`, see the module. With `lookup_below` one more reply is written, in
        which drafts of less confidence give way to what the context says."""
        self._draft_seconds, self._verify_seconds = [], []
        verified = self._verified(GenerationState(prompt, limits=self._limits))
        heeded = self._verified(self._looking_up(prompt, lookup_below)) if lookup_below else []
        seen, confidence, so_far = [], [], 0.0
        state = GenerationState(prompt, limits=self._limits)
        for chunk in self._alone(prompt):
            verdict = self._verify(state.ids, chunk)
            seen.append(observed(chunk, state.written, verdict, so_far))
            so_far += surprise(chunk)
            confidence += chunk.confidence.tolist()
            self._commit(state, chunk.ids)
        times = tuple(self._draft_seconds), tuple(self._verify_seconds)
        return Run(tuple(verified), tuple(seen), tuple(confidence), *times, tuple(heeded))

    def verified(self, prompt: Ids) -> list[ObservedChunk]:
        """Return the chunks of the verifier's own reply."""
        return self._verified(GenerationState(prompt, limits=self._limits))

    def ask(self, prompt: Ids) -> list[Seen]:
        """Return where the context would have said another token than the draft model, in the verifier's own reply."""
        seen: list[Seen] = []
        self._verified(self._looking_up(prompt, 0.0), seen)
        return seen

    def _looking_up(self, prompt: Ids, below: float) -> GenerationState:
        rules = DraftRules(lookup_below=below)
        return GenerationState(prompt, limits=self._limits, rules=rules, context=ContextLookup(prompt))

    def _verified(self, state: GenerationState, differences: list[Seen] | None = None) -> list[ObservedChunk]:
        """Return the chunks of the verifier's own reply. Where context and draft model differ is added to
        `differences`."""
        seen, so_far = [], 0.0
        while room := state.room:
            chunk = self._draft(state, room)
            verdict = self._verify(state.ids, chunk)
            seen.append(observed(chunk, state.written, verdict, so_far))
            if differences is not None:
                differences += differed(chunk, verdict)
            so_far += surprise(chunk)
            if self._commit(state, np.append(chunk.ids[: verdict.accepted], verdict.tokens[:1])):
                break
        return seen

    def _alone(self, prompt: Ids) -> list[Chunk]:
        """Return the chunks of the draft model's own reply to `prompt`."""
        state, chunks = GenerationState(prompt, limits=self._limits), []
        while room := state.room:
            chunks.append(self._draft(state, room))
            if self._commit(state, chunks[-1].ids):
                break
        return chunks

    def _commit(self, state: GenerationState, ids: Ids) -> bool:
        """Append `ids` as far as there is room; return whether one of them ends the turn."""
        for token in ids[: state.room].tolist():
            state.append(token)
        return any(map(self._is_eog, ids.tolist()))

    def _draft(self, state: GenerationState, room: int) -> Chunk:
        began = perf_counter()
        chunk = self._drafter.propose(state, min(self._limits.gamma, room))
        self._draft_seconds.append((perf_counter() - began) / len(chunk))
        return chunk

    def _verify(self, ids: Ids, chunk: Chunk) -> Verdict:
        while True:
            try:
                verdict = self._session.submit(ids, chunk).result()
                break
            except VerifierBusy as busy:  # a chunk left out of a profile cannot be made up for
                sleep(_LONGER * busy.seconds)
        self._verify_seconds.append(verdict.seconds)
        return verdict


def observed(chunk: Chunk, written: int, verdict: Verdict, so_far: float = 0.0) -> ObservedChunk:
    """Return the signals of a chunk behind `written` tokens, and its verdict; `so_far` as in `signals`."""
    importance = float(chunk.importance.mean()) if len(chunk.importance) else 0.0
    return ObservedChunk(
        signals(chunk, written, so_far=so_far),
        float(chunk.confidence.mean()),
        importance,
        verdict.accepted,
        len(chunk),
    )
