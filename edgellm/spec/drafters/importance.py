"""Importance of drafted tokens (Synera, section 4.2): the attention of later tokens to each.

A chunk of `n` tokens has `n - 1` rows of attention: its last token has not been fed to the model when the gate decides.
"""

import numpy as np

from edgellm.engine import Recorder
from edgellm.spec.types import Floats

_NO_KEYS = slice(0, 0)


class AttentionMeter:
    """A meter of importance from the captured attention, only while drafting."""

    def __init__(self, recorder: Recorder, layers: tuple[int, ...]) -> None:
        """Measure at `layers`, counted from 0, whose attention `recorder` captures."""
        self._layers, self._recorder = layers, recorder
        self._rows: list[list[Floats]] = []  # each token's attention in each layer to the chunk (heads, tokens so far)
        self._cells: list[int] = []  # cells of the chunk's tokens, where sequences share cells
        self._before = np.empty(0, dtype=np.bool_)

    def pause(self) -> None:
        """Record no attention of the tokens decoded from here on (a prefill)."""
        self._recorder.attend(_NO_KEYS if self._recorder.shared else None)

    def start(self, position: int, gamma: int) -> None:
        """Begin a chunk of up to `gamma` tokens at `position`; everything before it has just been decoded."""
        self._rows, self._cells, self._before = [], [], self._recorder.visible()
        self._recorder.attend(slice(None) if self._recorder.shared else slice(position, position + gamma))

    def record(self) -> None:
        """Record the attention of the chunk's next token, which has been decoded.

        The sums are computed once the chunk is full, because the processor's caches are cold right after a decode.
        """
        rows = [self._recorder.attention(layer) for layer in self._layers]
        if self._recorder.shared:  # The chunk's tokens lie anywhere.
            now = self._recorder.visible()
            (new,) = set(np.flatnonzero(now)) - set(np.flatnonzero(self._before))
            self._cells.append(int(new))
            self._before = now
            rows = [layer[:, :, self._cells] for layer in rows]
        self._rows.append([layer[:, 0, : len(self._rows) + 1].copy() for layer in rows])

    def by_layer(self, n: int) -> Floats:
        """Return the importance of the chunk's first `n` tokens in each layer: the mean attention from itself and later
        tokens, (layers, n); 0 for a token that was not fed."""
        fed = len(self._rows)
        sums = np.zeros((len(self._layers), max(n, fed)), dtype=np.float32)
        for seen, layers in enumerate(self._rows, 1):
            for total, rows in zip(sums, layers, strict=True):
                total[:seen] += np.add.reduce(rows, axis=0) / np.float32(len(rows))
        queries: Floats = np.maximum(fed - np.arange(n), 1).astype(np.float32)
        return sums[:, :n] / queries

    def importance(self, n: int) -> Floats:
        """Return the importance of the chunk's first `n` tokens, (n,)."""
        mean: Floats = self.by_layer(n).mean(axis=0)
        return mean
