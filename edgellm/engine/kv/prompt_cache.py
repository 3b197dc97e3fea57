"""A prompt cache on disk: a context restores sequences that an earlier process kept, and keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from edgellm.engine.kv.sequences import NO_ID
from edgellm.engine.vocabulary import Ids

LEAST = 256
"""Least tokens that a restored sequence saves reading, and that a kept sequence has beyond those on disk."""


class PromptCache(Protocol):
    """Sequences of one model on disk. A context does without it, so its methods raise nothing."""

    @property
    def epoch(self) -> int:
        """Return a number that changes when the user revokes what contexts hold."""

    def find(self, kind: str, ids: Ids, known: int, *, whole: bool) -> Path | None:
        """Return the file of the sequence with the longest common prefix with `ids` (n,), if longer than `known`, of
        contexts of this `kind`. `whole`: it cannot be cut, so all of it must be a prefix of `ids`."""

    def keep(self, kind: str, ids: Ids, size: int, write: Callable[[Path], bool], *, whole: bool) -> None:
        """Keep a sequence of `ids` (n,) and `size` bytes, unless a kept sequence saves nearly as much reading; replace
        sequences that it makes needless. `write` writes it to an existing file, and returns whether it could."""


class CachedSequence:
    """One context's first sequence in a prompt cache. `kind` names all that its state depends on besides the model."""

    def __init__(self, cache: PromptCache, kind: str) -> None:
        self._cache, self._kind = cache, kind
        self._epoch = cache.epoch

    def restore(self, ids: Ids, common: int, load: Callable[[Path], int], *, whole: bool) -> bool:
        """Have `load` restore a sequence that shares at least `LEAST` more of `ids` (n,) than the `common` first ids;
        return whether `load` was called, and has replaced the context's contents. `whole`: it cannot be cut."""
        self._epoch = self._cache.epoch  # the context's new contents belong to this epoch
        if len(ids) - common < LEAST:
            return False
        found = self._cache.find(self._kind, ids, common + LEAST - 1, whole=whole)
        if found is not None:
            load(found)
        return found is not None

    def keep(self, ids: Ids, size: int, save: Callable[[Path], bool], *, whole: bool) -> None:
        """Keep the sequence, which holds `ids` (n,) in `size` bytes and which `save` writes to a file, if that may save
        reading."""
        if len(ids) >= LEAST and self._epoch == self._cache.epoch and not (ids == NO_ID).any():
            self._cache.keep(self._kind, ids, size, save, whole=whole)
