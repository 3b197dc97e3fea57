"""A pair without a profile is profiled from its first replies, in which every chunk is verified."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.errors import StateDamaged
from edgellm.spec.gates.features import NAMES, surprise
from edgellm.spec.gates.profile import Profile, build
from edgellm.spec.gates.profiler import Observed, Run, observed
from edgellm.spec.types import Chunk, Verdict
from edgellm.storage.state import fields_from_json, read_json_lines, write_state

ENOUGH = 64
"""Verified chunks that make a profile."""


class FirstReplies:
    """What was seen in them so far."""

    def __init__(self, enough: int = ENOUGH) -> None:
        self.enough = enough
        self.chunks = 0
        self._runs: list[Run] = []

    @property
    def ready(self) -> bool:
        return self.chunks >= self.enough

    def begin(self) -> FirstReply:
        """Watches one more reply."""
        return FirstReply()

    def add(self, reply: FirstReply) -> None:
        """A reply is over, or was left."""
        if (run := reply.run()) is not None:
            self._runs.append(run)
            self.chunks += len(run.verified)

    def build(self, *, draft_hash: str, verifier_hash: str, gamma: int, layers: tuple[int, ...]) -> Profile:
        """The profile that they amount to. Raises InvalidOption where they are too few."""
        return build(
            self._runs, draft_hash=draft_hash, verifier_hash=verifier_hash, gamma=gamma, layers=layers,
            origin="first replies",
        )  # fmt: skip

    def save(self, path: Path) -> None:
        """Keep them for the next process that uses the pair. Raises OSError where that fails."""
        rows = []
        for run in self._runs:
            fields = asdict(run) | {"alone": []}  # which are the verified ones here
            fields["verified"] = [{**seen, "signals": seen["signals"].tolist()} for seen in fields["verified"]]
            rows.append(json.dumps(fields))
        write_state(path, "\n".join(rows))

    def load(self, path: Path) -> None:
        """Take up what `save` wrote; where that is not there or damaged, nothing."""
        try:
            runs = read_json_lines(path, _run) or []
        except StateDamaged:
            return
        self._runs = [*runs, *self._runs]
        self.chunks += sum(len(run.verified) for run in runs)


class FirstReply:
    """One of the first replies under way; `watch` is for the loop."""

    def __init__(self) -> None:
        self._seen: list[Observed] = []
        self._confidence: list[float] = []
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []
        self._so_far = 0.0

    def watch(self, chunk: Chunk, written: int, verdict: Verdict | None, drafting: float, _waiting: float) -> None:
        """A `Watch`."""
        if not len(chunk) or verdict is None:
            return
        self._seen.append(observed(chunk, written, verdict, self._so_far))
        self._so_far += surprise(chunk)
        self._confidence += chunk.confidence.tolist()
        if fresh := len(chunk) - chunk.ahead:
            self._draft_seconds.append(drafting / fresh)
        self._verify_seconds.append(verdict.seconds)

    def run(self) -> Run | None:
        """As what `Watcher.run` returns; None where nothing was verified."""
        if not self._seen or not self._draft_seconds:
            return None
        seen = tuple(self._seen)
        times = tuple(self._draft_seconds), tuple(self._verify_seconds)
        return Run(seen, seen, tuple(self._confidence), *times)


def _run(fields: dict[str, Any]) -> Run:
    """Return one line of the file. Raises whatever is raised over other JSON."""
    seen = tuple(_observed(dict(row)) for row in fields["verified"])
    times = fields_from_json(Run, {name: fields[name] for name in ("confidence", "draft_seconds", "verify_seconds")})
    return Run(verified=seen, alone=seen, **times)


def _observed(row: dict[str, Any]) -> Observed:
    signals = np.array(row.pop("signals"), dtype=np.float64)
    if signals.shape != (len(NAMES),):
        raise ValueError("chunks of another version")
    if set(row) != {"confidence", "importance", "accepted", "tokens"}:
        raise ValueError("no chunk")
    return Observed(signals, **fields_from_json(Observed, row))
