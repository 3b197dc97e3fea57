"""Importance of drafted tokens (Synera, section 4.2): the attention of later tokens to each.

Attention comes as the engine records it, one array (heads, queries, keys) per layer; a study of several layers stacks
them to (layers, heads, queries, keys), and chooses layers and heads by indexing. Query `q` of such rows is the token at
position `first + q`, key `k` the token at position `k`. A chunk of `n` tokens has `n - 1` rows: its last token has not
been fed to the model when the gate decides.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgellm.spec.types import Floats


class ColumnSums:
    """An accumulator of the importance of a chunk's tokens, from attention rows recorded while the tokens are
    drafted.

    The sum is computed once the chunk is full, because the processor's caches are cold right after a decode.
    """

    def __init__(self, n: int, layers: int = 1) -> None:
        """Expect at most `n` tokens, measured in `layers` layers."""
        self._n, self._layers = n, layers
        self._rows: list[list[Floats]] = []

    def add(self, layers: Sequence[Floats]) -> None:
        """Keep the next token's attention to the chunk, itself included, in each layer: shapes (heads, 1, keys).

        Key 0 is the chunk's first token; there may be more keys than the chunk has tokens.
        """
        seen = len(self._rows) + 1
        self._rows.append([rows[:, 0, :seen].copy() for rows in layers])

    def importance(self, n: int) -> Floats:
        """Return for each of the first `n` tokens the mean attention from itself and later tokens, (n,); 0 where none
        has been fed."""
        mean: Floats = self.by_layer(n).mean(axis=0)
        return mean

    def by_layer(self, n: int) -> Floats:
        """Return the importance in each layer, (layers, n)."""
        sums = np.zeros((self._layers, self._n), dtype=np.float32)
        for seen, layers in enumerate(self._rows, 1):
            for total, rows in zip(sums, layers, strict=True):
                total[:seen] += np.add.reduce(rows, axis=0) / np.float32(len(rows))
        return sums[:, :n] / _at_least_one(len(self._rows) - np.arange(n))


def importance(rows: Floats, first: int, n: int, *, own: bool = True) -> Floats:
    """Return the importance from whole rows (layers, heads, queries, keys), for the tokens at `first` to `first + n -
    1`.

    It is the column sum over the queries at and behind each token, divided by their number, averaged over heads and
    layers; shape (n,). Without `own` a token's attention to itself is left out of both.
    """
    queries = rows.shape[2]
    seen = np.tri(queries, n, 0 if own else -1, dtype=np.float32)  # Query q sees the tokens up to q.
    block = rows[..., first : first + n].mean(axis=(0, 1), dtype=np.float32)
    columns = np.zeros(n, dtype=np.float32)
    columns[: block.shape[1]] = (block * seen[:, : block.shape[1]]).sum(axis=0)
    columns /= _at_least_one(seen.sum(axis=0))
    return columns


def _at_least_one(counts: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Floats:
    divisors: Floats = np.maximum(counts, 1).astype(np.float32)
    return divisors
