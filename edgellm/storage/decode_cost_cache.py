"""Cost curves that were measured here, one for each model and thread count of this device."""

from __future__ import annotations

import json
import platform
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

from edgellm.engine.timing import BUSY, possible
from edgellm.errors import StateDamaged
from edgellm.places import cache_dir
from edgellm.storage.state import from_json, read_json, write_state

OLDEST = 30 * 86_400.0  # seconds
DOUBTFUL_OLDEST = 600.0
"""Seconds for which a curve is used that was measured while the machine was busy."""
CHANGE_MOST = 4.0
"""The most that a change of the number of rows may cost, in decodes of one row: llama.cpp builds its graph again."""


@dataclass(frozen=True, slots=True)
class KeptCurve:
    """A cost curve as it is kept: `seconds[i]` for a decode of `rows[i]` rows, the cost of a `change`, and the seconds
    of `heads`. It was measured at `taken` (seconds since 1970, UTC), on what `device` says, while the process waited
    for a processor for the share `waited` of its time."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    change: float
    heads: tuple[float, ...]
    taken: float
    waited: float
    device: str

    @property
    def doubtful(self) -> bool:
        """Whether the machine was busy during the measurement."""
        return self.waited > BUSY

    @property
    def sound(self) -> bool:
        """Whether these times are possible on a device."""
        rows, seconds, heads = self.rows, self.seconds, self.heads
        if not (len(rows) == len(seconds) > 0 and rows[0] == 1 and list(rows) == sorted(set(rows))):
            return False
        if not (all(0.0 < taken < inf for taken in (*seconds, *heads)) and self.change >= 0.0):
            return False
        one = seconds[0] + heads[0] if heads else seconds[0]  # a row alone is measured with its head
        return self.change <= CHANGE_MOST * one and possible(rows, (one, *seconds[1:]))


def curve_path(model_hash: str, threads: int) -> Path:
    """Return the file of a curve; its name has the device in it, because several devices may share a home folder."""
    return cache_dir() / "curves" / f"{model_hash[:16]}-{threads}-{platform.node() or 'here'}.json"


def read_curve(path: Path, device: str) -> KeptCurve | None:
    """Return the curve kept for `device`; None where there is none, or it is damaged, impossible or too old."""
    try:
        kept = read_json(path, lambda found: from_json(KeptCurve, found))
    except StateDamaged:
        return None
    if kept is None:
        return None
    young = 0.0 <= time.time() - kept.taken <= (DOUBTFUL_OLDEST if kept.doubtful else OLDEST)
    return kept if young and kept.sound and kept.device == device else None


def keep_curve(path: Path, kept: KeptCurve) -> None:
    """Write a curve to disk. Where that fails, it is measured again next time."""
    with suppress(OSError):
        write_state(path, json.dumps(asdict(kept)))
