"""Observations of a pair, for the fitting of a profile (Synera, section 5).

Offline, prompts are answered with everything verified, and by the draft model alone with every chunk tested
(`PairProfiler`); observations are kept, so that a run can be continued (`ProfileProgress`). A new pair is
observed in its first replies, in which every chunk is verified (`OnlineProfiler`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np
import numpy.typing as npt

from edgellm.errors import StateDamaged, VerifierBusy
from edgellm.spec.gates.offload_policy import NAMES, signals, surprise
from edgellm.spec.ngram.sources import MIN_MATCH, ContextLookup, Disagreement, disagreements
from edgellm.spec.protocols import Drafter, Gate
from edgellm.spec.state import DraftRules, GenerationLimits, GenerationState
from edgellm.spec.types import Chunk, Decision, Floats, Ids, Round, Verdict
from edgellm.spec.verifier import Session
from edgellm.storage.state import fields_from_json, read_json_lines, write_state

ENOUGH = 64
"""Verified chunks that make a profile of a new pair."""
IMPORTANCE = [at for at, name in enumerate(NAMES) if "importance" in name]
_EVERY = 20.0  # seconds between two writes of the observations
_MAX_BYTES = 2**30
_CHUNKS = ("verified", "alone")  # fields of a record
_BUSY_MARGIN = 1.3  # factor of the wait that the verifier asks for


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
class LookupRun:
    """A verified reply in which drafts of less confidence than `below` were replaced by the context's token.

    `importance` is as in `PromptRecord`; `conflicts` are the draft model's confidences where the context had another
    token.
    """

    below: float
    chunks: tuple[ObservedChunk, ...]
    importance: tuple[tuple[tuple[float, ...], ...], ...]
    conflicts: tuple[float, ...]

    def holds(self, below: float) -> bool:
        """Return whether the drafts would be the same below another confidence."""
        low, high = sorted((self.below, below))
        return not any(low <= each < high for each in self.conflicts)

    def with_importance(self, layer: int | None) -> tuple[ObservedChunk, ...]:
        """Return the chunks, with the importance of a measured layer unless `layer` is None."""
        return self.chunks if layer is None else _with_importance(self.chunks, self.importance, layer)


@dataclass(frozen=True, slots=True)
class PromptRecord:
    """The observations for one prompt before the layers of importance and the threshold of context lookup are known.

    `verified_importance` and `alone_importance` hold, for each chunk and each measured layer, the signals of importance
    (`offload_policy.NAMES`); empty where nothing was measured. `lookup` is the verified reply with the signals of the
    context, None without context lookup.
    """

    verified: tuple[ObservedChunk, ...]
    alone: tuple[ObservedChunk, ...]
    verified_importance: tuple[tuple[tuple[float, ...], ...], ...]
    alone_importance: tuple[tuple[tuple[float, ...], ...], ...]
    lookup: LookupRun | None
    disagreements: tuple[Disagreement, ...]
    confidence: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]

    def run(self, layer: int | None, *, with_lookup: bool = False) -> Run:
        """Return the observations with the importance of the measured layer at place `layer`; None: without."""
        verified, alone = self.verified, self.alone
        looked_up = self.lookup.with_importance(layer) if with_lookup and self.lookup is not None else ()
        if layer is not None:
            verified = _with_importance(verified, self.verified_importance, layer)
            alone = _with_importance(alone, self.alone_importance, layer)
        return Run(verified, alone, self.confidence, self.draft_seconds, self.verify_seconds, looked_up)


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
    """A greedy run of prompts through a pair, in chunks of `gamma`."""

    def __init__(
        self,
        drafter: Drafter,
        session: Session,
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
            _lookup_run(0.0, seen) if context_lookup else None,
            tuple(found),
            tuple(value for _, _, chunk in alone for value in chunk.confidence.tolist()),
            tuple(self._draft_seconds),
            tuple(self._verify_seconds),
        )

    def with_lookup(self, prompt: Ids, record: PromptRecord, below: float) -> PromptRecord:
        """Return the record with the verified reply in which drafts of less confidence than `below` are replaced by the
        context's token; the reply is written again only if the drafts change."""
        if record.lookup is None or record.lookup.holds(below):
            return record
        return replace(record, lookup=_lookup_run(below, self._verified(self._lookup_state(prompt, below))))

    def run(self, prompt: Ids) -> Run:
        """Return the observations for `prompt`, with the importance that the drafter measures itself."""
        return self.record(prompt, context_lookup=False).run(None)

    def _lookup_state(self, prompt: Ids, below: float) -> GenerationState:
        rules = DraftRules(lookup_below=below, context=ContextLookup(prompt))
        return GenerationState(prompt, limits=self._limits, rules=rules)

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
            except VerifierBusy as busy:  # Every chunk is needed.
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


def _lookup_run(below: float, seen: Sequence[_Verified]) -> LookupRun:
    """Return the observations of a verified reply whose drafts looked tokens up in the context."""
    return LookupRun(
        below,
        tuple(item.observed() for item in seen),
        tuple(item.importance for item in seen),
        tuple(value for item in seen for value in _conflicts(item.chunk)),
    )


def _conflicts(chunk: Chunk) -> list[float]:
    """Return the model's confidence at each place where the context has another token than the model."""
    match = chunk.context_match
    if match is None:
        return []
    differs = (match.tokens >= 0) & (match.tokens != chunk.ids) & (match.matched >= MIN_MATCH)
    found: list[float] = chunk.confidence[differs | match.copied].tolist()
    return found


def chunk_to_json(chunk: ObservedChunk) -> dict[str, Any]:
    """Return a chunk's fields for JSON."""
    return asdict(chunk) | {"signals": chunk.signals.tolist()}


def chunk_from_json(row: Mapping[str, Any]) -> ObservedChunk:
    """Return a chunk from its JSON. Raise KeyError, TypeError or ValueError if invalid."""
    rest = {name: value for name, value in row.items() if name != "signals"}
    signals = np.array(row["signals"], dtype=np.float64)
    if signals.shape != (len(NAMES),):
        raise ValueError(f"a chunk has {signals.size} features, not {len(NAMES)}")
    if set(rest) != {"confidence", "importance", "accepted", "tokens"}:
        raise ValueError("a chunk has other fields")
    return ObservedChunk(signals, **fields_from_json(ObservedChunk, rest))


class ProfileProgress:
    """The records of the first prompts of a run: figures, and no words of prompts or replies."""

    def __init__(self, path: Path | None, terms: Mapping[str, Any]) -> None:
        """Keep the records at `path`, None: only in memory. Records of a run with other `terms` are ignored."""
        self._path, self._terms = path, dict(terms)
        self.records = self._load()
        self._written, self._written_at = len(self.records), monotonic()

    def add(self, record: PromptRecord) -> None:
        """Add the record of the next prompt."""
        self.records.append(record)
        if monotonic() - self._written_at > _EVERY:
            self.save()

    def save(self) -> bool:
        """Write the records to the file, and return whether the file has all of them."""
        if self._path is None or not self.records:
            return False
        if self._written == len(self.records):
            return True
        lines = [json.dumps(self._terms), *(json.dumps(_to_json(record)) for record in self.records)]
        try:
            write_state(self._path, "\n".join(lines))
        except OSError:
            return False
        self._written, self._written_at = len(self.records), monotonic()
        return True

    def remove(self) -> None:
        """Remove the file: the profile is complete."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _load(self) -> list[PromptRecord]:
        if self._path is None:
            return []
        try:
            rows = read_json_lines(self._path, dict, _MAX_BYTES) or [{}]
            return [_from_json(row) for row in rows[1:]] if rows[0] == self._terms else []
        except (StateDamaged, ValueError, TypeError, LookupError):
            return []


def _to_json(record: PromptRecord) -> dict[str, Any]:
    found = {each.name: getattr(record, each.name) for each in fields(PromptRecord)}
    found |= {name: [chunk_to_json(chunk) for chunk in found[name]] for name in _CHUNKS}
    if record.lookup is not None:
        found["lookup"] = asdict(record.lookup) | {"chunks": [chunk_to_json(one) for one in record.lookup.chunks]}
    return found | {"disagreements": [asdict(each) for each in record.disagreements]}


def _from_json(row: Mapping[str, Any]) -> PromptRecord:
    chunks: dict[str, Any] = {name: _chunks_from_json(row[name]) for name in _CHUNKS}
    chunks["lookup"] = None
    if (lookup := row["lookup"]) is not None:
        rest = {name: value for name, value in lookup.items() if name != "chunks"}
        chunks["lookup"] = LookupRun(chunks=_chunks_from_json(lookup["chunks"]), **fields_from_json(LookupRun, rest))
    rest = {name: value for name, value in row.items() if name not in chunks}
    return PromptRecord(**(fields_from_json(PromptRecord, rest) | chunks))


def _chunks_from_json(rows: Sequence[Mapping[str, Any]]) -> tuple[ObservedChunk, ...]:
    return tuple(map(chunk_from_json, rows))


class OnlineProfiler:
    """The observations of the first replies so far."""

    def __init__(self) -> None:
        self.chunks = 0
        self._runs: list[Run] = []

    @property
    def ready(self) -> bool:
        return self.chunks >= ENOUGH

    def add(self, reply: FirstReply) -> None:
        """Add a finished or abandoned reply."""
        if (run := reply.run()) is not None:
            self._runs.append(run)
            self.chunks += len(run.verified)

    @property
    def runs(self) -> tuple[Run, ...]:
        """Return the observed replies for `fitting.build`."""
        return tuple(self._runs)

    def save(self, path: Path) -> None:
        """Write the replies for the next process that uses the pair. Raises OSError if that fails."""
        rows = []
        for run in self._runs:
            fields = asdict(run) | {"alone": []}  # `alone` equals `verified` here
            fields["verified"] = [chunk_to_json(seen) for seen in run.verified]
            rows.append(json.dumps(fields))
        write_state(path, "\n".join(rows))

    def load(self, path: Path) -> None:
        """Load a saved file; do nothing if it is missing or damaged."""
        try:
            runs = read_json_lines(path, _run) or []
        except StateDamaged:
            return
        self._runs = [*runs, *self._runs]
        self.chunks += sum(len(run.verified) for run in runs)


class FirstReply(Gate):
    """The gate of a first reply: every chunk is verified, and the verdict recorded."""

    def __init__(self, layers: tuple[int, ...] = (), *, improves: bool = False) -> None:
        """Measure the attention of `layers` as importance. `improves`: improve an existing profile."""
        self.layers, self.improves = layers, improves
        self._seen: list[ObservedChunk] = []
        self._confidence: list[float] = []
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []
        self._so_far = 0.0

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        return _FIRST

    def observe(self, state: GenerationState, turn: Round) -> None:
        chunk, verdict = turn.chunk, turn.verdict
        if not len(chunk) or verdict is None:
            return
        self._seen.append(observed(chunk, state.written, verdict, self._so_far))
        self._so_far += surprise(chunk)
        self._confidence += chunk.confidence.tolist()
        if fresh := len(chunk) - chunk.ahead:
            self._draft_seconds.append(turn.drafting / fresh)
        self._verify_seconds.append(verdict.seconds)

    def run(self) -> Run | None:
        """Return the reply as `PairProfiler.run` does; None if nothing was verified."""
        if not self._seen or not self._draft_seconds:
            return None
        seen = tuple(self._seen)
        times = tuple(self._draft_seconds), tuple(self._verify_seconds)
        return Run(seen, seen, tuple(self._confidence), *times)


_FIRST = Decision(True, "the pair has no profile yet: every chunk of its first replies is verified")


def _run(fields: dict[str, Any]) -> Run:
    """Return one line of the file as a run. Invalid JSON raises KeyError, TypeError or ValueError."""
    seen = tuple(map(chunk_from_json, fields["verified"]))
    times = fields_from_json(Run, {name: fields[name] for name in ("confidence", "draft_seconds", "verify_seconds")})
    return Run(verified=seen, alone=seen, **times)
