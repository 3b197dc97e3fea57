"""The ids of a context's sequences, the ids that a batch appends, and sequences that are kept on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from edgellm.engine.vocabulary import Floats, Ids, common_prefix
from edgellm.errors import ContextFull, InvalidOption

NO_ID = -1
"""The id of a position that an embedding row filled instead of a token, or a cache from elsewhere."""


class Sequences:
    """`n_seq` sequences of at most `n_ctx` ids, numbered from 0."""

    def __init__(self, n_seq: int, n_ctx: int) -> None:
        self._n_ctx = n_ctx
        self._ids = np.zeros((n_seq, n_ctx), dtype=np.int32)
        self.lengths = [0] * n_seq

    def known(self, seq: int) -> int:
        """Return `seq` if there is such a sequence; raise InvalidOption otherwise."""
        if not 0 <= seq < len(self.lengths):
            raise InvalidOption(f"There is no sequence {seq}.", f"Sequences are numbered 0 to {len(self.lengths) - 1}.")
        return seq

    def check_fits(self, seq: int, n: int) -> int:
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


@dataclass(frozen=True, slots=True)
class SeqRows:
    """Ids to append to sequence `seq`; logits are wanted of the last `outputs` of them. Float32 rows (n, n_embd) may be
    `embedded` in place of ids, as they enter the first layer."""

    seq: int
    ids: Ids
    outputs: int = 1
    embedded: Floats | None = None

    @classmethod
    def of_embedded(cls, rows: Floats, seq: int = 0, outputs: int = 1) -> SeqRows:
        """Return embedding rows (n, n_embd) to append; their ids are `NO_ID`."""
        return cls(seq, np.full(len(rows), NO_ID, dtype=np.int32), outputs, rows)

    def part(self, start: int, end: int, outputs: int) -> SeqRows:
        """Return the rows from `start` up to before `end`."""
        return SeqRows(
            self.seq, self.ids[start:end], outputs, None if self.embedded is None else self.embedded[start:end]
        )


def split(rows: Sequence[SeqRows], most: int) -> tuple[list[SeqRows], list[SeqRows]]:
    """Return beginnings of at most `most` ids each, without logits, to be decoded one by one first; and the rest.

    The rest, one entry for each of `rows`, fits one batch of `most` rows. `rows` must ask for at most `most` rows of
    logits in all.
    """
    heads, rest = [], []
    total = sum(len(r.ids) for r in rows)
    for r in rows:
        at, n = 0, len(r.ids)
        while total > most and n - at > r.outputs:
            size = min(most, n - at - r.outputs)
            heads.append(r.part(at, at + size, 0))
            total, at = total - size, at + size
        rest.append(r.part(at, n, r.outputs))
    return heads, rest


LEAST = 256
"""Least tokens that a restored sequence saves reading, and that a kept sequence has beyond those on disk."""


class PromptCache(Protocol):
    """Sequences of one model on disk. A context does without it, so its methods raise nothing. `kind` names all that a
    sequence's state depends on besides the model."""

    @property
    def epoch(self) -> int:
        """Return a number that changes when the user revokes what contexts hold."""

    def find(self, kind: str, ids: Ids, known: int, *, whole: bool) -> Path | None:
        """Return the file of the sequence with the longest common prefix with `ids` (n,), if longer than `known`, of
        contexts of this `kind`. `whole`: it cannot be cut, so all of it must be a prefix of `ids`."""

    def keep(self, kind: str, ids: Ids, size: int, write: Callable[[Path], bool], *, whole: bool) -> None:
        """Keep a sequence of `ids` (n,) and `size` bytes, unless a kept sequence saves nearly as much reading; replace
        sequences that it makes needless. `write` writes it to an existing file, and returns whether it could."""
