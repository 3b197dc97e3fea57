"""Observations of a pair, for the fitting of a profile (Synera, section 5).

Offline, prompts are answered with everything verified, and by the draft model alone (`PairProfiler`). A new pair is
observed in its first replies, in which every chunk is verified (`FirstReply`). Observations are kept in a file, so that
a run can be continued (`RunRecorder`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np

from edgellm.errors import StateDamaged, VerifierBusy
from edgellm.spec.gates.offload_policy import TOKENS, signals, surprise
from edgellm.spec.ngram.sources import MIN_MATCH, ContextLookup, Disagreement, disagreements
from edgellm.spec.protocols import Drafter, Gate
from edgellm.spec.state import DraftRules, GenerationLimits, GenerationState
from edgellm.spec.types import NO_IDS, Chunk, Decision, Ids, Round, Verdict
from edgellm.spec.verifier import Session
from edgellm.storage.state import from_json, read_json_lines, write_state

_EVERY = 20.0  # seconds between two writes of the observations
_MAX_BYTES = 2**30
_BUSY_MARGIN = 1.3  # factor of the wait that the verifier asks for


@dataclass(frozen=True, slots=True)
class Seen:
    """A drafted chunk and its verdict: its `signals` (len(NAMES),), how many of its tokens were `accepted`, and its
    mean importance, or that in each measured layer."""

    signals: tuple[float, ...]
    accepted: int
    importance: tuple[float, ...]

    @property
    def whole(self) -> bool:
        """Return whether all tokens were accepted."""
        return self.accepted == self.signals[TOKENS]


@dataclass(frozen=True, slots=True)
class Run:
    """The observations for one prompt.

    `verified` are the chunks of the fully verified reply, and `with_lookup` those of the reply in which drafts of
    little confidence were the context's tokens, if that differs; `doubt` is the least confidence at which it may. Of
    the draft model's own reply, `alone` has the mean confidence of each chunk, followed by `Seen.importance`, and
    `tokens` the confidence of each token. Then the seconds of each drafted token and of each verification.
    """

    verified: tuple[Seen, ...]
    alone: tuple[tuple[float, ...], ...]
    tokens: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    disagreements: tuple[Disagreement, ...] = ()
    doubt: float = 1.0
    with_lookup: tuple[Seen, ...] = ()

    @property
    def training_chunks(self) -> tuple[Seen, ...]:
        """Return the chunks to fit the gate on."""
        return self.with_lookup or self.verified


class SeenChunks:
    """The observed chunks of a reply."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._so_far = 0.0

    def add(self, chunk: Chunk, written: int, verdict: Verdict, importance: tuple[float, ...]) -> None:
        """Add a chunk behind `written` tokens, and its verdict."""
        found = signals(chunk, written, self._so_far).round(6)
        self.seen.append(Seen(tuple(found.tolist()), verdict.accepted, importance))
        self._so_far += surprise(chunk)


class PairProfiler:
    """A greedy run of prompts through a pair, in chunks of the limits' `gamma`."""

    def __init__(
        self, drafter: Drafter, session: Session, is_eog: Callable[[int], bool], limits: GenerationLimits, *,
        by_layer: bool = False,
    ) -> None:  # fmt: skip
        """Watch the pair write replies. `by_layer`: the drafter tells importance layer by layer."""
        self._by_layer = by_layer
        self._drafter, self._session, self._is_eog, self._limits = drafter, session, is_eog, limits
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []

    def record(self, prompt: Ids, *, context_lookup: bool = True) -> Run:
        """Return the observations for `prompt`. With `context_lookup`, the context's tokens are compared with the draft
        model's; they replace none of them."""
        self._draft_seconds, self._verify_seconds = [], []
        verified, differs, doubt = SeenChunks(), list[Disagreement](), 1.0
        state = self._looking(prompt, 0.0) if context_lookup else GenerationState(prompt, limits=self._limits)
        for chunk, verdict in self._chunks(state, verify=True):
            verified.add(chunk, state.written, verdict, self._importance(chunk))
            differs += disagreements(chunk, verdict)
            doubt = min(doubt, _doubt(chunk))
        state = GenerationState(prompt, limits=self._limits)
        alone, tokens = list[tuple[float, ...]](), list[float]()
        for chunk, _ in self._chunks(state, verify=False):
            alone.append((mean_confidence(chunk), *self._importance(chunk)))
            tokens += chunk.confidence.round(6).tolist()
        return Run(
            tuple(verified.seen), tuple(alone), tuple(tokens),
            tuple(self._draft_seconds), tuple(self._verify_seconds), tuple(differs), doubt,
        )  # fmt: skip

    def with_lookup(self, prompt: Ids, run: Run, below: float) -> Run:
        """Return the run with the verified reply in which drafts of less confidence than `below` are replaced by the
        context's token; the reply is written again only if the drafts change."""
        if run.doubt >= below:
            return run
        verified, state = SeenChunks(), self._looking(prompt, below)
        for chunk, verdict in self._chunks(state, verify=True):
            verified.add(chunk, state.written, verdict, ())
        return replace(run, with_lookup=tuple(verified.seen))

    def _looking(self, prompt: Ids, below: float) -> GenerationState:
        rules = DraftRules(lookup_below=below, context=ContextLookup(prompt))
        return GenerationState(prompt, limits=self._limits, rules=rules)

    def _chunks(self, state: GenerationState, *, verify: bool) -> Iterator[tuple[Chunk, Verdict]]:
        """Write a reply, and yield its chunks before they are committed; not `verify`: the draft model's own reply."""
        while tokens_left := state.tokens_left:
            began = perf_counter()
            chunk = self._drafter.propose(state, min(self._limits.gamma, tokens_left))
            self._draft_seconds.append((perf_counter() - began) / len(chunk))
            verdict = self._verify(state.ids, chunk) if verify else Verdict(len(chunk), NO_IDS)
            yield chunk, verdict
            ids = np.append(chunk.ids[: verdict.accepted], verdict.tokens[:1])
            for token in ids[: state.tokens_left].tolist():
                state.append(token)
            if any(map(self._is_eog, ids.tolist())):
                return

    def _importance(self, chunk: Chunk) -> tuple[float, ...]:
        if not self._by_layer:
            return (mean_importance(chunk),)
        layers = self._drafter.importance_by_layer(len(chunk))  # type: ignore[attr-defined]
        return tuple(layers.mean(axis=1).round(6).tolist())

    def _verify(self, ids: Ids, chunk: Chunk) -> Verdict:
        while True:
            try:
                verdict = self._session.submit(ids, chunk).result()
                break
            except VerifierBusy as busy:  # Every chunk is needed.
                sleep(_BUSY_MARGIN * busy.seconds)
        self._verify_seconds.append(verdict.seconds)
        return verdict


def mean_confidence(chunk: Chunk) -> float:
    """Return the mean confidence of a chunk's tokens."""
    return round(float(chunk.confidence.mean()), 6)


def mean_importance(chunk: Chunk) -> float:
    """Return the mean importance of a chunk's tokens; 0 where it was not measured."""
    return round(float(chunk.importance.mean()), 6) if len(chunk.importance) else 0.0


def _doubt(chunk: Chunk) -> float:
    """Return the least confidence at a place where the context has another token than the model."""
    match = chunk.context_match
    if match is None:
        return 1.0
    differs = (match.tokens >= 0) & (match.tokens != chunk.ids) & (match.matched >= MIN_MATCH)
    return float(chunk.confidence[differs].min(initial=1.0))


class RunRecorder:
    """Observed replies, kept in a file until they make a profile: figures, and no words of prompts or replies."""

    def __init__(self, path: Path | None, terms: Mapping[str, Any] | None = None) -> None:
        """Go on with the file at `path`, None: keep them only in memory. Runs under other `terms` are ignored."""
        self._path, self._terms = path, dict(terms or {})
        self.runs = self._load()
        self._written, self._written_at = len(self.runs), monotonic()

    @property
    def chunks(self) -> int:
        """Return the number of verified chunks."""
        return sum(len(run.verified) for run in self.runs)

    def add(self, run: Run) -> None:
        """Add the next run. The file is written now and then."""
        self.runs.append(run)
        if monotonic() - self._written_at > _EVERY:
            self.save()

    def save(self) -> bool:
        """Write the file, and return whether it has all runs."""
        if self._path is None or not self.runs:
            return False
        if self._written < len(self.runs):
            try:
                write_state(self._path, "\n".join(map(json.dumps, (self._terms, *map(asdict, self.runs)))))
            except OSError:
                return False
            self._written, self._written_at = len(self.runs), monotonic()
        return True

    def remove(self) -> None:
        """Remove the file: the profile is complete."""
        self._written = 0
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)

    def _load(self) -> list[Run]:
        if self._path is None:
            return []
        try:
            rows = read_json_lines(self._path, dict, _MAX_BYTES) or [{}]
            return [from_json(Run, row) for row in rows[1:]] if rows[0] == self._terms else []
        except (StateDamaged, ValueError, TypeError, LookupError):
            return []


class FirstReply(Gate):
    """The gate of a first reply: every chunk is verified, and the verdict recorded."""

    def __init__(self, layers: tuple[int, ...] = (), *, improves: bool = False) -> None:
        """Measure the attention of `layers` as importance. `improves`: improve an existing profile."""
        self.layers, self.improves = layers, improves
        self._verified = SeenChunks()
        self._alone: list[tuple[float, ...]] = []
        self._tokens: list[float] = []
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        return _FIRST

    def observe(self, state: GenerationState, turn: Round) -> None:
        chunk, verdict = turn.chunk, turn.verdict
        if not len(chunk) or verdict is None:
            return
        importance = (mean_importance(chunk),)
        self._verified.add(chunk, state.written, verdict, importance)
        self._alone.append((mean_confidence(chunk), *importance))
        self._tokens += chunk.confidence.tolist()
        if fresh := len(chunk) - chunk.ahead:
            self._draft_seconds.append(turn.drafting / fresh)
        self._verify_seconds.append(verdict.seconds)

    def run(self) -> Run | None:
        """Return the reply as `PairProfiler.record` does; None if nothing was verified."""
        if not self._draft_seconds:
            return None
        times = tuple(self._draft_seconds), tuple(self._verify_seconds)
        return Run(tuple(self._verified.seen), tuple(self._alone), tuple(self._tokens), *times)


_FIRST = Decision(True, "the pair has no profile yet: every chunk of its first replies is verified")
