"""Prompts that were read before: a context restores what an earlier process has kept on disk, and keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from edgellm.engine.kv.sequences import NO_ID
from edgellm.engine.vocabulary import Ids

LEAST = 256
"""Tokens that a restored sequence must save reading, and that a kept one must have beyond those on disk."""


class PromptCache(Protocol):
    """Sequences of one model on disk. A context does without it, so its methods raise nothing."""

    @property
    def epoch(self) -> int:
        """Return a number that changes where the user takes back what contexts hold at that time."""

    def find(self, kind: str, ids: Ids, known: int, *, whole: bool) -> Path | None:
        """Return the file of the sequence that shares the longest beginning with `ids` (n,), if that is longer than
        `known`, of contexts of this `kind`. `whole`: they cannot be cut, so that all of it must be that beginning."""

    def keep(self, kind: str, ids: Ids, size: int, write: Callable[[Path], bool], *, whole: bool) -> None:
        """Keep a sequence of `ids` (n,) and `size` bytes, unless one is there that saves reading nearly as much, and in
        place of those that would. `write` writes it to a file that exists, and returns whether it could."""


class CachedSequence:
    """One context's first sequence, as a prompt cache has it. `kind` is what its state depends on besides the model."""

    def __init__(self, cache: PromptCache, kind: str) -> None:
        self._cache, self._kind = cache, kind
        self._epoch = cache.epoch

    def restore(self, ids: Ids, common: int, load: Callable[[Path], int], *, whole: bool) -> bool:
        """Have `load` restore a sequence that shares `LEAST` more of `ids` (n,) than the `common` ones; return whether
        it was called, and has replaced what the context held. `whole`: it cannot be cut."""
        self._epoch = self._cache.epoch  # from here on the context holds what was asked for now
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
