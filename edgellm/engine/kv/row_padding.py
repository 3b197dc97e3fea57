"""The padding of passes by which logits do not depend on how a text's ids are batched, and the trial of it."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgellm.engine.vocabulary import Floats, Ids


@dataclass(frozen=True, slots=True)
class Padding:
    """Passes of at least `least` rows for each sequence, whose number `multiple` divides, so that llama.cpp computes a
    row alike, whatever rows are beside it.

    A kernel is chosen by the number of rows of a pass, and kernels round differently: a model that has read a text in
    other pieces may continue it differently. On processors without flash attention a single row is computed by other
    kernels than several rows; with weights laid out for products of four rows, the last rows of a pass that four do not
    divide are. So a trial finds the least numbers of rows for which all passes agree to the bit, and each pass is
    padded to such a number.
    """

    least: int = 1
    multiple: int = 1

    def rows(self, n: int) -> int:
        """Return the rows of a pass over `n` rows of one sequence."""
        return max(self.least, -(-n // self.multiple) * self.multiple)


PADDINGS = (Padding(), Padding(2), Padding(4, 4), Padding(8, 8))
"""The paddings that are tried, the cheapest first."""
MOST_PADDING = PADDINGS[-1].multiple
"""Rows that padding adds at most."""
_WIDTHS, _LONG = (1, 2, 3, 5, 7, 8, 16), (61, 64, 100)
"""Rows of the passes that are tried, which cover the kernels' tiles and what is left over of them."""
DEEP = 520
"""Positions before them: some kernels differ only behind the first 512."""
TRIED_ROWS = DEEP + max(_LONG)


def agree(decode: Callable[[Ids, int, int], Floats], vocabulary: int) -> bool:
    """Return whether all passes over the same rows give the same logits, to the bit. `decode` writes ids (n,) at a
    position, and returns the logits of the last rows, of as many as given."""
    ids = np.random.default_rng(0).integers(0, vocabulary, TRIED_ROWS).astype(np.int32)
    n = max(_WIDTHS)
    decode(ids[:DEEP], 0, 1)
    found = set()
    for width in _WIDTHS:
        rows = [decode(ids[at : at + width], at, width).copy() for at in range(DEEP, DEEP + n, width)]
        found.add(np.concatenate(rows)[:n].tobytes())
    ends = set()
    for width in _LONG:
        part, start = ids[DEEP + n - width : DEEP + n], DEEP + n - width
        rows_of = decode(part, start, n)
        found.add(rows_of.tobytes())
        ends.add(rows_of[-1].tobytes())
        ends.add(decode(part, start, 1).tobytes())
    return len(found) == len(ends) == 1
