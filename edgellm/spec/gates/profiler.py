"""Offline profiling of a pair (Synera, section 5): replies with everything verified, and replies of the draft model
alone with every chunk tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep

import numpy as np
import numpy.typing as npt

from edgellm.errors import VerifierBusy
from edgellm.spec.gates.features import signals, surprise
from edgellm.spec.ngram.sources import ContextLookup, Disagreement, disagreements
from edgellm.spec.protocols import Drafter, VerifierSession
from edgellm.spec.state import DraftRules, GenerationLimits, GenerationState
from edgellm.spec.types import Chunk, Ids, Verdict

_BUSY_MARGIN = 1.3  # wait a little longer than the verifier asks for, as a session does


@dataclass(frozen=True, slots=True)
class ObservedChunk:
    """One drafted chunk and its verdict: `signals` (len(NAMES),), and `accepted` of `tokens`."""

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
    """The observations for one prompt: chunks of the fully verified reply, and of the draft model's own reply
    (`alone`).

    `confidence` of each token of the draft model's reply; seconds of each drafted token and of each verification.
    `with_lookup` are chunks of a verified reply drafted with context lookup, if that was requested.
    """

    verified: tuple[ObservedChunk, ...]
    alone: tuple[ObservedChunk, ...]
    confidence: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    with_lookup: tuple[ObservedChunk, ...] = ()

    @property
    def training_chunks(self) -> tuple[ObservedChunk, ...]:
        """Return the chunks to fit the gate on."""
        return self.with_lookup or self.verified


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
        """Return the observations for `prompt`. With `lookup_below`, one more reply is written, in which drafts of less
        confidence are replaced by the context's token."""
        self._draft_seconds, self._verify_seconds = [], []
        verified = self._verified(GenerationState(prompt, limits=self._limits))
        with_lookup = self._verified(self._lookup_state(prompt, lookup_below)) if lookup_below else []
        chunks, confidence, so_far = [], [], 0.0
        state = GenerationState(prompt, limits=self._limits)
        for chunk in self._alone(prompt):
            verdict = self._verify(state.ids, chunk)
            chunks.append(observed(chunk, state.written, verdict, so_far))
            so_far += surprise(chunk)
            confidence += chunk.confidence.tolist()
            self._commit(state, chunk.ids)
        times = tuple(self._draft_seconds), tuple(self._verify_seconds)
        return Run(tuple(verified), tuple(chunks), tuple(confidence), *times, tuple(with_lookup))

    def verified_reply(self, prompt: Ids) -> list[ObservedChunk]:
        """Return the chunks of the verifier's own reply."""
        return self._verified(GenerationState(prompt, limits=self._limits))

    def disagreements(self, prompt: Ids) -> list[Disagreement]:
        """Return where the context's token differs from the draft model's, in the verifier's own reply."""
        found: list[Disagreement] = []
        self._verified(self._lookup_state(prompt, 0.0), found)
        return found

    def _lookup_state(self, prompt: Ids, below: float) -> GenerationState:
        rules = DraftRules(lookup_below=below)
        return GenerationState(prompt, limits=self._limits, rules=rules, context=ContextLookup(prompt))

    def _verified(self, state: GenerationState, differences: list[Disagreement] | None = None) -> list[ObservedChunk]:
        """Return the chunks of the verifier's own reply; add disagreements of context and draft model to
        `differences`."""
        chunks, so_far = [], 0.0
        while tokens_left := state.tokens_left:
            chunk = self._draft(state, tokens_left)
            verdict = self._verify(state.ids, chunk)
            chunks.append(observed(chunk, state.written, verdict, so_far))
            if differences is not None:
                differences += disagreements(chunk, verdict)
            so_far += surprise(chunk)
            if self._commit(state, np.append(chunk.ids[: verdict.accepted], verdict.tokens[:1])):
                break
        return chunks

    def _alone(self, prompt: Ids) -> list[Chunk]:
        """Return the chunks of the draft model's own reply to `prompt`."""
        state, chunks = GenerationState(prompt, limits=self._limits), []
        while tokens_left := state.tokens_left:
            chunks.append(self._draft(state, tokens_left))
            if self._commit(state, chunks[-1].ids):
                break
        return chunks

    def _commit(self, state: GenerationState, ids: Ids) -> bool:
        """Append as many of `ids` as fit; return whether one of them ends the turn."""
        for token in ids[: state.tokens_left].tolist():
            state.append(token)
        return any(map(self._is_eog, ids.tolist()))

    def _draft(self, state: GenerationState, tokens_left: int) -> Chunk:
        began = perf_counter()
        chunk = self._drafter.propose(state, min(self._limits.gamma, tokens_left))
        self._draft_seconds.append((perf_counter() - began) / len(chunk))
        return chunk

    def _verify(self, ids: Ids, chunk: Chunk) -> Verdict:
        while True:
            try:
                verdict = self._session.submit(ids, chunk).result()
                break
            except VerifierBusy as busy:  # every chunk is needed
                sleep(_BUSY_MARGIN * busy.seconds)
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
