"""Cost curves that were measured here, one for each model and thread count of this device."""

from __future__ import annotations

import json
import platform
from contextlib import suppress
from math import inf
from pathlib import Path

from edgellm.store.places import cache_dir


def curve_path(model_hash: str, threads: int) -> Path:
    """The file of a curve; it names the device too, because a home folder may serve several."""
    return cache_dir() / "curves" / f"{model_hash[:16]}-{threads}-{platform.node() or 'here'}.json"


def read_curve(path: Path) -> tuple[tuple[int, ...], tuple[float, ...], float, tuple[float, ...]] | None:
    """Rows, seconds, the cost of a change and the heads' seconds of a curve that was kept; None where there is none, or
    it is damaged."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        rows, seconds = tuple(map(int, kept["rows"])), tuple(map(float, kept["seconds"]))
        change, heads = float(kept["change"]), tuple(map(float, kept["heads"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    sound = len(rows) == len(seconds) > 0 and rows[0] == 1 and min(seconds) > 0.0 <= change < inf
    sound = sound and list(rows) == sorted(set(rows)) and all(0.0 < price < inf for price in heads)
    return (rows, seconds, change, heads) if sound else None


def keep_curve(
    path: Path, rows: tuple[int, ...], seconds: tuple[float, ...], change: float, heads: tuple[float, ...]
) -> None:
    """Keeps a curve. Where that fails it is measured anew next time."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".partial")
        kept = {"rows": rows, "seconds": seconds, "change": change, "heads": heads}
        partial.write_text(json.dumps(kept), encoding="utf-8")
        partial.replace(path)


def forget_curve(path: Path) -> None:
    """A curve that has turned out wrong is measured anew."""
    with suppress(OSError):
        path.unlink(missing_ok=True)
