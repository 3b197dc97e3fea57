"""Profiling of a new pair from its first replies, in which every chunk is verified."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgellm.errors import StateDamaged
from edgellm.spec.gates.features import surprise
from edgellm.spec.gates.profile import Profile, build
from edgellm.spec.gates.profile_progress import chunk_from_json, chunk_to_json
from edgellm.spec.gates.profiler import ObservedChunk, Run, observed
from edgellm.spec.protocols import Gate
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision, Round
from edgellm.storage.state import fields_from_json, read_json_lines, write_state

ENOUGH = 64
"""Verified chunks that make a profile."""


class OnlineProfiler:
    """The observations of the first replies so far."""

    def __init__(self, enough: int = ENOUGH) -> None:
        self.enough = enough
        self.chunks = 0
        self._runs: list[Run] = []

    @property
    def ready(self) -> bool:
        return self.chunks >= self.enough

    def add(self, reply: FirstReply) -> None:
        """Add a finished or abandoned reply."""
        if (run := reply.run()) is not None:
            self._runs.append(run)
            self.chunks += len(run.verified)

    def build(self, *, draft_hash: str, verifier_hash: str, gamma: int, layers: tuple[int, ...]) -> Profile:
        """Return the profile built from them. Raises InvalidOption if they are too few."""
        return build(
            self._runs, draft_hash=draft_hash, verifier_hash=verifier_hash, gamma=gamma, layers=layers,
            origin="first replies",
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Keep them for the next process that uses the pair. Raises OSError where that fails."""
        rows = []
        for run in self._runs:
            fields = asdict(run) | {"alone": []}  # here these are the verified chunks
            fields["verified"] = [chunk_to_json(seen) for seen in run.verified]
            rows.append(json.dumps(fields))
        write_state(path, "\n".join(rows))

    def load(self, path: Path) -> None:
        """Load what `save` wrote; do nothing if the file is missing or damaged."""
        try:
            runs = read_json_lines(path, _run) or []
        except StateDamaged:
            return
        self._runs = [*runs, *self._runs]
        self.chunks += sum(len(run.verified) for run in runs)


class FirstReply(Gate):
    """The gate of a first reply: every chunk is verified, and the verdict recorded."""

    def __init__(self, layers: tuple[int, ...] = (), *, improves: bool = False) -> None:
        """Measure the attention of `layers` as importance. `improves`: also a profile that is there already."""
        self.layers, self.improves = layers, improves
        self._seen: list[ObservedChunk] = []
        self._confidence: list[float] = []
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []
        self._so_far = 0.0

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        """See `Gate.decide`."""
        return _FIRST

    def observe(self, state: GenerationState, turn: Round) -> None:
        """See `Gate.observe`."""
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
