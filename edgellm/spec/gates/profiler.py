"""Offline profiling of a pair (Synera, section 5): replies with everything verified, and replies of the draft model
alone with every chunk tested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter, sleep

import numpy as np
import numpy.typing as npt

from edgellm.errors import VerifierBusy
from edgellm.spec.gates.features import NAMES, signals, surprise
from edgellm.spec.ngram.sources import MIN_MATCH, ContextLookup, Disagreement, disagreements
from edgellm.spec.protocols import Drafter, VerifierSession
from edgellm.spec.state import DraftRules, GenerationLimits, GenerationState
from edgellm.spec.types import Chunk, Floats, Ids, Verdict

IMPORTANCE = [at for at, name in enumerate(NAMES) if "importance" in name]
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


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The observations for one prompt before the layers of importance and the threshold of context lookup are known.

    `verified_importance` and `alone_importance` hold, for each chunk and each measured layer, the signals of importance
    (see `features.NAMES`); empty where nothing was measured. `matched` are the verified chunks with the signals of the
    context. `lookup_from` is the least confidence of a token for which the context has another one.
    """

    verified: tuple[ObservedChunk, ...]
    alone: tuple[ObservedChunk, ...]
    verified_importance: tuple[tuple[tuple[float, ...], ...], ...]
    alone_importance: tuple[tuple[tuple[float, ...], ...], ...]
    matched: tuple[ObservedChunk, ...]
    disagreements: tuple[Disagreement, ...]
    lookup_from: float
    confidence: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]

    def run(self, layer: int | None, with_lookup: tuple[ObservedChunk, ...] = ()) -> Run:
        """Return the observations with the importance of one of the measured layers, by its place among them; None:
        without."""
        verified, alone = self.verified, self.alone
        if layer is not None:
            verified = _with_importance(verified, self.verified_importance, layer)
            alone = _with_importance(alone, self.alone_importance, layer)
        return Run(verified, alone, self.confidence, self.draft_seconds, self.verify_seconds, with_lookup)


def _with_importance(
    chunks: Sequence[ObservedChunk], by_layer: Sequence[Sequence[Sequence[float]]], layer: int
) -> tuple[ObservedChunk, ...]:
    found = []
    for chunk, layers in zip(chunks, by_layer, strict=True):
        values = chunk.signals.copy()
        values[IMPORTANCE] = layers[layer]
        found.append(replace(chunk, signals=values, importance=layers[layer][0]))
    return tuple(found)


class PairProfiler:
    """Runs prompts through a pair, greedily, in chunks of `gamma`."""

    def __init__(
        self,
        drafter: Drafter,
        session: VerifierSession,
        is_eog: Callable[[int], bool],
        limits: GenerationLimits,
        by_layer: Callable[[int], Floats | None] | None = None,
    ) -> None:
        """Watch the pair write replies within `limits`. `by_layer` returns the importance of the last chunk's first n
        tokens in each measured layer, (layers, n)."""
        self._drafter, self._session, self._is_eog, self._limits = drafter, session, is_eog, limits
        self._by_layer = by_layer
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []

    def record(self, prompt: Ids, context_lookup: bool = True) -> PromptRecord:
        """Return the observations for `prompt`. With `context_lookup`, the context's tokens are compared with the draft
        model's; they replace none of them."""
        self._draft_seconds, self._verify_seconds = [], []
        state = self._lookup_state(prompt, 0.0) if context_lookup else GenerationState(prompt, limits=self._limits)
        seen = self._verified(state)
        alone, so_far = [], 0.0
        state = GenerationState(prompt, limits=self._limits)
        for chunk, importance in self._alone(prompt):
            verdict = self._verify(state.ids, chunk)
            alone.append((observed(chunk, state.written, verdict, so_far), importance, chunk))
            so_far += surprise(chunk)
            self._commit(state, chunk.ids)
        found = [each for item in seen for each in disagreements(item.chunk, item.verdict)]
        return PromptRecord(
            tuple(item.observed(without_match=True) for item in seen),
            tuple(one for one, _, _ in alone),
            tuple(item.importance for item in seen),
            tuple(importance for _, importance, _ in alone),
            tuple(item.observed() for item in seen) if context_lookup else (),
            tuple(found),
            min((_lookup_from(item.chunk) for item in seen), default=1.0),
            tuple(value for _, _, chunk in alone for value in chunk.confidence.tolist()),
            tuple(self._draft_seconds),
            tuple(self._verify_seconds),
        )

    def with_lookup(self, prompt: Ids, record: PromptRecord, lookup_below: float) -> tuple[ObservedChunk, ...]:
        """Return the chunks of the verified reply in which drafts of less confidence than `lookup_below` are replaced
        by the context's token; the reply is written again only if there are any."""
        if record.lookup_from >= lookup_below:
            return record.matched
        return tuple(item.observed() for item in self._verified(self._lookup_state(prompt, lookup_below)))

    def run(self, prompt: Ids) -> Run:
        """Return the observations for `prompt`, with the importance that the drafter measures itself."""
        return self.record(prompt, context_lookup=False).run(None)

    def _lookup_state(self, prompt: Ids, below: float) -> GenerationState:
        rules = DraftRules(lookup_below=below)
        return GenerationState(prompt, limits=self._limits, rules=rules, context=ContextLookup(prompt))

    def _verified(self, state: GenerationState) -> list[_Verified]:
        """Return the chunks of the verifier's own reply."""
        found, so_far = [], 0.0
        while tokens_left := state.tokens_left:
            chunk = self._draft(state, tokens_left)
            importance = self._importance(chunk)
            verdict = self._verify(state.ids, chunk)
            found.append(_Verified(chunk, verdict, state.written, so_far, importance))
            so_far += surprise(chunk)
            if self._commit(state, np.append(chunk.ids[: verdict.accepted], verdict.tokens[:1])):
                break
        return found

    def _importance(self, chunk: Chunk) -> tuple[tuple[float, ...], ...]:
        """Return the signals of importance in each measured layer."""
        layers = None if self._by_layer is None else self._by_layer(len(chunk))
        if layers is None:
            return ()
        least = int(chunk.confidence.argmin())
        return tuple((float(row.mean()), float(row.max()), float(row[least])) for row in layers)

    def _alone(self, prompt: Ids) -> list[tuple[Chunk, tuple[tuple[float, ...], ...]]]:
        """Return the chunks of the draft model's own reply to `prompt`, each with its importance."""
        state, chunks = GenerationState(prompt, limits=self._limits), []
        while tokens_left := state.tokens_left:
            chunk = self._draft(state, tokens_left)
            chunks.append((chunk, self._importance(chunk)))
            if self._commit(state, chunk.ids):
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


@dataclass(frozen=True, slots=True)
class _Verified:
    """A chunk of a verified reply, behind `written` tokens."""

    chunk: Chunk
    verdict: Verdict
    written: int
    so_far: float
    importance: tuple[tuple[float, ...], ...]

    def observed(self, *, without_match: bool = False) -> ObservedChunk:
        chunk = replace(self.chunk, context_match=None) if without_match else self.chunk
        return observed(chunk, self.written, self.verdict, self.so_far)


def _lookup_from(chunk: Chunk) -> float:
    """Return the least confidence of a token for which the context has another one; 1.0 if there is none."""
    match = chunk.context_match
    if match is None:
        return 1.0
    differs = (match.tokens >= 0) & (match.tokens != chunk.ids) & (match.matched >= MIN_MATCH)
    return float(chunk.confidence[differs].min()) if differs.any() else 1.0
