"""Padding by which llama.cpp computes a row alike, whatever rows are beside it, so that a text is always the same.

A kernel is chosen by the number of rows of a pass, and kernels round differently: a model that has read a text in other
pieces may continue it differently. On processors without flash attention a single row is computed by other kernels than
several rows; with weights laid out for products of four rows, the last rows of a pass that four do not divide are. So
a trial finds the least numbers of rows for which all passes agree to the bit, and each pass is padded to such a number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from edgellm.engine.vocabulary import Floats, Ids

Decode: TypeAlias = Callable[[Ids, int, int], Floats]
"""A function that writes ids (n,) at a position, and returns the logits of the last rows, of as many as given."""


@dataclass(frozen=True, slots=True)
class Padding:
    """Passes of at least `least` rows for each sequence, whose number `multiple` divides."""

    least: int = 1
    multiple: int = 1

    def rows(self, n: int) -> int:
        """Return the rows of a pass over `n` rows of one sequence."""
        return max(self.least, -(-n // self.multiple) * self.multiple)


NONE = Padding()
PADDINGS = (NONE, Padding(2), Padding(4, 4), Padding(8, 8))
"""The paddings that are tried, the cheapest first."""
MOST = 8  # rows that padding adds at most
_WIDTHS, _LONG = (1, 2, 3, 5, 7, 8, 16), (61, 64, 100)
"""Rows of the passes that are tried, which cover the kernels' tiles and what is left over of them."""
_DEEP = 520  # positions before them: some kernels differ only behind the first 512
POSITIONS = _DEEP + max(_LONG)


def agree(decode: Decode, vocabulary: int) -> bool:
    """Return whether all passes over the same rows give the same logits, to the bit."""
    ids = np.random.default_rng(0).integers(0, vocabulary, POSITIONS).astype(np.int32)
    n = max(_WIDTHS)
    decode(ids[:_DEEP], 0, 1)
    found = set()
    for width in _WIDTHS:
        rows = [decode(ids[at : at + width], at, width).copy() for at in range(_DEEP, _DEEP + n, width)]
        found.add(np.concatenate(rows)[:n].tobytes())
    ends = set()
    for width in _LONG:
        part, start = ids[_DEEP + n - width : _DEEP + n], _DEEP + n - width
        rows_of = decode(part, start, n)
        found.add(rows_of.tobytes())
        ends.add(rows_of[-1].tobytes())
        ends.add(decode(part, start, 1).tobytes())
    return len(found) == len(ends) == 1


def kept(key: str, folder: Path, find: Callable[[], Padding | None]) -> Padding | None:
    """Return the padding that `find` finds, None for none; it is kept in `folder` under a hash of `key`."""
    path = folder / f"rows-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    with suppress(OSError, ValueError, TypeError):
        known = json.loads(path.read_text(encoding="utf-8"))
        return None if known is None else Padding(*map(int, known))
    found = find()
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps(found and astuple(found)), encoding="utf-8")
    return found
