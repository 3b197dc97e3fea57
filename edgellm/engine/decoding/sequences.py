"""Ids and length of every sequence in a context's cache. Pure book-keeping, nothing native."""

from __future__ import annotations

import numpy as np

from edgellm.engine.types import Ids, common_prefix
from edgellm.errors import ContextFull, InvalidOption


class Sequences:
    """`n_seq` sequences of at most `n_ctx` ids, numbered from 0."""

    def __init__(self, n_seq: int, n_ctx: int) -> None:
        self._n_ctx = n_ctx
        self._ids = np.zeros((n_seq, n_ctx), dtype=np.int32)
        self.lengths = [0] * n_seq

    def known(self, seq: int) -> int:
        """Return `seq` if there is such a sequence; raise InvalidOption otherwise."""
        if not 0 <= seq < len(self.lengths):
            raise InvalidOption(f"There is no sequence {seq}.", f"They go from 0 to {len(self.lengths) - 1}.")
        return seq

    def room(self, seq: int, n: int) -> int:
        """Return the length of a sequence if `n` more ids fit; raise ContextFull otherwise."""
        length = self.lengths[self.known(seq)]
        if length + n > self._n_ctx:
            raise ContextFull(
                f"{length} of {self._n_ctx} positions are taken; {n} more do not fit.",
                "Shorten the conversation, or open a longer context.",
            )
        return length

    def view(self, seq: int) -> Ids:
        """Return the ids of a sequence, read-only."""
        view = self._ids[seq, : self.lengths[self.known(seq)]]
        view.flags.writeable = False
        return view

    def note(self, seq: int, ids: Ids) -> int:
        """Write ids after the end of a sequence, and return its length, which grows only once they are decoded."""
        start = self.lengths[seq]
        self._ids[seq, start : start + len(ids)] = ids
        return start

    def copy(self, src: int, dst: int) -> None:
        """Make `dst` equal to `src`."""
        n = self.lengths[src]
        self._ids[dst, :n] = self._ids[src, :n]
        self.lengths[dst] = n

    def common(self, seq: int, ids: Ids) -> int:
        """Return how many ids a sequence and `ids` share from the start."""
        return common_prefix(self._ids[seq, : self.lengths[self.known(seq)]], np.asarray(ids))
