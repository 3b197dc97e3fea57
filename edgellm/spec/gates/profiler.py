"""Observations of a pair, for the fitting of a profile (Synera, section 5).

Offline, prompts are answered with everything verified, and by the draft model alone (`PairProfiler`). A new pair is
observed in its first replies, in which every chunk is verified. Observations are kept in a file, so that a run can be
continued (`RunRecorder`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from edgellm.errors import StateDamaged
from edgellm.spec.gates.fitted import signals, surprise
from edgellm.spec.loop import Detokenizer, generate
from edgellm.spec.ngram.sources import ContextLookup, Disagreement, disagreements, dissents
from edgellm.spec.protocols import Drafter, Gate, Verifier
from edgellm.spec.state import DraftRules, GenerationLimits, GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import Chunk, Decision, Ids, Round
from edgellm.state import from_json, read_json_lines, write_state

_EVERY = 20.0  # seconds between two writes of the observations
_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Seen:
    """A drafted chunk and its verdict: its `signals` (len(NAMES),), how many of its tokens were `accepted`, and its
    mean importance, or that in each measured layer."""

    signals: tuple[float, ...]
    accepted: int
    importance: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The observations for one prompt.

    `verified` are the chunks of the fully verified reply, and `with_lookup` those of the reply in which drafts of
    little confidence were the context's tokens, if that differs; `doubt` is the least confidence at which it may. Of
    the draft model's own reply, `alone` has the mean confidence of each chunk, followed by `Seen.importance`, and
    `tokens` the confidence of each token. Then the seconds of each drafted token and of each verification.
    """

    verified: tuple[Seen, ...] = ()
    alone: tuple[tuple[float, ...], ...] = ()
    tokens: tuple[float, ...] = ()
    draft_seconds: tuple[float, ...] = ()
    verify_seconds: tuple[float, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    doubt: float = 1.0
    with_lookup: tuple[Seen, ...] = ()

    @property
    def training_chunks(self) -> tuple[Seen, ...]:
        """Return the chunks to fit the gate on."""
        return self.with_lookup or self.verified


def mean_importance(chunk: Chunk) -> tuple[float, ...]:
    """Return the mean importance of a chunk's tokens; 0 where it was not measured."""
    return (round(float(chunk.importance.mean()), 6) if len(chunk.importance) else 0.0,)


class ObservedReply(Gate):
    """The gate of an observed reply: every chunk is verified, or none, and what is seen of it is recorded."""

    def __init__(
        self, layers: tuple[int, ...] = (), *, improves: bool = False, verifies: bool = True,
        importance: Callable[[Chunk], tuple[float, ...]] = mean_importance,
    ) -> None:  # fmt: skip
        """Have the attention of `layers` measured. `improves`: improve an existing profile. Not `verifies`: the draft
        model writes alone. `importance` returns that of a chunk, or that in each layer."""
        self.layers, self.improves, self._verifies, self._importance = layers, improves, verifies, importance
        self._so_far = 0.0  # surprise of all chunks
        self._verified: list[Seen] = []
        self._alone: list[tuple[float, ...]] = []
        self._tokens: list[float] = []
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []
        self._disagreements: list[Disagreement] = []
        self._doubt = 1.0

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        return Decision(self._verifies, "the pair has no profile yet: every chunk of its first replies is verified")

    def observe(self, state: GenerationState, turn: Round) -> None:
        chunk, verdict = turn.chunk, turn.verdict
        if not len(chunk) or (self._verifies and verdict is None):
            return
        importance = self._importance(chunk)
        self._alone.append((round(float(chunk.confidence.mean()), 6), *importance))
        self._tokens += chunk.confidence.round(6).tolist()
        if fresh := len(chunk) - chunk.ahead:
            self._draft_seconds.append(turn.drafting / fresh)
        if verdict is not None:
            seen = signals(chunk, state.written, self._so_far).round(6).tolist()
            self._verified.append(Seen(tuple(seen), verdict.accepted, importance))
            self._so_far += surprise(chunk)
            self._verify_seconds.append(verdict.seconds)
            self._disagreements += disagreements(chunk, verdict)
            self._doubt = float(chunk.confidence[dissents(chunk)].min(initial=self._doubt))

    def run(self) -> Run | None:
        """Return the observations; None if nothing was drafted. The replies that make a profile are verified, and stand
        for the draft model's own."""
        if not self._draft_seconds:
            return None
        return Run(
            tuple(self._verified), tuple(self._alone), tuple(self._tokens), tuple(self._draft_seconds),
            tuple(self._verify_seconds), tuple(self._disagreements), self._doubt,
        )  # fmt: skip


class _Verified(Drafter):
    """A drafter whose every chunk is needed: a busy verifier is waited for."""

    needs_verdict = True

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        return self._drafter.propose(state, gamma)


class PairProfiler:
    """A greedy run of prompts through a pair, in chunks of the limits' `gamma`."""

    def __init__(
        self, drafter: Drafter, verifier: Verifier, vocabulary: Detokenizer, limits: GenerationLimits, *,
        by_layer: bool = False,
    ) -> None:  # fmt: skip
        """Watch the pair write replies. `by_layer`: the drafter tells importance layer by layer."""
        self._drafter, self._verifier, self._vocabulary, self._limits = drafter, verifier, vocabulary, limits
        self._importance = self._by_layer if by_layer else mean_importance

    def record(self, prompt: Ids, *, context_lookup: bool = True) -> Run:
        """Return the observations for `prompt`. With `context_lookup`, the context's tokens are compared with the draft
        model's; they replace none of them."""
        verified = self._written(prompt, DraftRules(context=ContextLookup(prompt) if context_lookup else None))
        alone = self._written(prompt, DraftRules(), verifies=False)
        seconds = verified.draft_seconds + alone.draft_seconds
        return replace(verified, alone=alone.alone, tokens=alone.tokens, draft_seconds=seconds)

    def with_lookup(self, prompt: Ids, run: Run, below: float) -> Run:
        """Return the run with the verified reply in which drafts of less confidence than `below` are replaced by the
        context's token; the reply is written again only if the drafts change."""
        if run.doubt >= below:
            return run
        again = self._written(prompt, DraftRules(lookup_below=below, context=ContextLookup(prompt)))
        return replace(run, with_lookup=again.verified)

    def _written(self, prompt: Ids, rules: DraftRules, *, verifies: bool = True) -> Run:
        """Write a reply; not `verifies`: the draft model's own."""
        gate = ObservedReply(verifies=verifies, importance=self._importance)
        for _ in generate(
            GenerationState(prompt, limits=self._limits, rules=rules), vocabulary=self._vocabulary, gate=gate,
            drafter=_Verified(self._drafter) if verifies else self._drafter,
            verifier=self._verifier if verifies else None, stats=Summary(),
        ):  # fmt: skip
            pass
        return gate.run() or Run()

    def _by_layer(self, chunk: Chunk) -> tuple[float, ...]:
        layers = self._drafter.importance_by_layer(len(chunk))  # type: ignore[attr-defined]
        return tuple(layers.mean(axis=1).round(6).tolist())


class RunRecorder:
    """Observed replies, kept in a file until they make a profile: figures, and no words of prompts or replies."""

    def __init__(self, path: Path | None, terms: Mapping[str, Any] | None = None) -> None:
        """Go on with the file at `path`, None: keep them only in memory. Runs under other `terms` are ignored."""
        self._path, self._terms, self.runs = path, dict(terms or {}), list[Run]()
        with suppress(StateDamaged, ValueError, TypeError, LookupError):
            rows = path and read_json_lines(path, dict, _MAX_BYTES)
            if rows and rows[0] == self._terms:
                self.runs = [from_json(Run, row) for row in rows[1:]]
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
