"""Figures that a reply over several devices has proved wrong: they are measured again before the next plan, once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from edgellm.coldstart.plan import PlannedStage
from edgellm.errors import StateDamaged
from edgellm.places import cache_dir
from edgellm.storage.state import from_json, read_json, write_state

FAR = 8.0
"""The factor between measured and planned time from which a figure counts as wrong, and not just the planner's model as
inexact."""
_LEAST = 1e-4  # seconds: shorter times say nothing of a line


@dataclass(frozen=True, slots=True)
class Doubt:
    """A doubt about the figures measured at `taken` (seconds since 1970, UTC). `again`: they are to be measured again;
    else they come from such a new measurement, and are not doubted any more."""

    taken: int
    again: bool


def disproved(found: PlannedStage, planned: PlannedStage) -> Iterator[tuple[str, float, float]]:
    """Yield what a stage did in a time far from what was planned: "computing", "loading" or "network", and the seconds
    that were measured and planned."""
    times = {
        "computing": (found.compute_s, planned.compute_s),
        "loading": (found.load_s, planned.load_s),
        "network": (found.network_s, planned.network_s),
    }
    for what, (took, expected) in times.items():
        shorter, longer = sorted((took, expected))
        if shorter > 0.0 and longer > max(_LEAST, FAR * shorter):
            yield what, took, expected


def doubt(key: str, taken: int) -> bool:
    """Have the figures of `key` that were measured at `taken` measured again; return whether that will be."""
    doubts = read_doubts()
    known = doubts.get(key)
    if known is not None and known.taken == taken and not known.again:
        return False
    _keep({**doubts, key: Doubt(taken, again=True)})
    return True


def settle(key: str, taken: int) -> None:
    """Record that the figures of `key` were measured again, at `taken`."""
    doubts = read_doubts()
    if key in doubts:
        _keep({**doubts, key: Doubt(taken, again=False)})


def read_doubts() -> dict[str, Doubt]:
    """Return all doubts, by device or by both ends of a line; none where the file is damaged."""
    with suppress(StateDamaged):
        return read_json(_path(), lambda found: {key: from_json(Doubt, row) for key, row in found.items()}) or {}
    return {}


def _keep(doubts: Mapping[str, Doubt]) -> None:
    """Write the doubts. If that fails, the figures are doubted again after the next reply."""
    with suppress(OSError):
        write_state(_path(), json.dumps({key: asdict(one) for key, one in doubts.items()}))


def _path() -> Path:
    return cache_dir() / "figures" / "doubts.json"
