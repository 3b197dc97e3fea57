"""The file of a profile under way: what was observed so far, prompt by prompt, so that it can be continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np

from edgellm.errors import StateDamaged
from edgellm.spec.gates.features import NAMES
from edgellm.spec.gates.profiler import ObservedChunk, PromptRecord
from edgellm.storage.state import fields_from_json, read_json_lines, write_state

_EVERY = 20.0  # seconds between two writes
_MAX_BYTES = 2**30
_CHUNKS = ("verified", "alone", "matched")  # fields of a record


def chunk_to_json(chunk: ObservedChunk) -> dict[str, Any]:
    """Return a chunk's fields for JSON."""
    return asdict(chunk) | {"signals": chunk.signals.tolist()}


def chunk_from_json(row: Mapping[str, Any]) -> ObservedChunk:
    """Return what `chunk_to_json` wrote. Raise KeyError, TypeError or ValueError for anything else."""
    rest = {name: value for name, value in row.items() if name != "signals"}
    signals = np.array(row["signals"], dtype=np.float64)
    if signals.shape != (len(NAMES),):
        raise ValueError(f"a chunk has {signals.size} features, not {len(NAMES)}")
    if set(rest) != {"confidence", "importance", "accepted", "tokens"}:
        raise ValueError("a chunk has other fields")
    return ObservedChunk(signals, **fields_from_json(ObservedChunk, rest))


class ProfileProgress:
    """The records of the first prompts of a run. It holds figures, and no words of prompts or replies."""

    def __init__(self, path: Path | None, terms: Mapping[str, Any]) -> None:
        """Keep them at `path`, None: only in memory. Records of a run with other `terms` are not used."""
        self._path, self._terms = path, dict(terms)
        self.records = self._load()
        self._written, self._written_at = len(self.records), monotonic()

    def add(self, record: PromptRecord) -> None:
        """Add the record of the next prompt."""
        self.records.append(record)
        if monotonic() - self._written_at > _EVERY:
            self.save()

    def save(self) -> bool:
        """Write the records to the file, and return whether they are there."""
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
    return found | {"disagreements": [asdict(each) for each in record.disagreements]}


def _from_json(row: Mapping[str, Any]) -> PromptRecord:
    chunks = {name: tuple(map(chunk_from_json, row[name])) for name in _CHUNKS}
    rest = fields_from_json(PromptRecord, {name: value for name, value in row.items() if name not in _CHUNKS})
    return PromptRecord(**(rest | chunks))
