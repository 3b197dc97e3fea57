"""The keys and values of a session on their way from the stages of one pipeline to those of another.

They pass through this process. It gives on only what was asked for: one cache of every layer, of the right length.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from edgellm.errors import EngineFailed
from edgellm.mesh.messages import CacheTaken, LayerCache
from edgellm.mesh.pipeline import Pipeline


class CacheTransfer:
    """One session's cache for its first `positions`. `done` fails with EngineFailed if a stage cannot give or take it;
    the text has to be read then."""

    def __init__(self, session: int, positions: int, before: Pipeline, after: Pipeline) -> None:
        """Ask the stages of `before` for it, and give it to those of `after`."""
        self.done: Future[None] = Future()
        self._positions, self._after = positions, after
        self._missing = {layer for record in after.records for layer in record.work.layers}
        self._waiting = len(after.records)
        self._lock = threading.Lock()
        after.expect_caches(session, self._on_taken)
        before.give_caches(session, positions, self._on_given)

    def _on_given(self, cache: LayerCache) -> None:
        with self._lock:
            asked = cache.layer in self._missing and not self.done.done()
            self._missing.discard(cache.layer)
        if not asked:
            return
        if cache.rows is None or cache.rows.positions != self._positions:
            self._fail(f"Layer {cache.layer + 1} has no keys and values to send.")
        else:
            self._after.take_cache(cache)

    def _on_taken(self, taken: CacheTaken) -> None:
        if taken.positions != self._positions:
            self._fail("A device cannot take the keys and values of another.")
            return
        with self._lock:
            self._waiting -= 1
            over = self._waiting == 0 and not self.done.done()
        if over:
            self.done.set_result(None)

    def _fail(self, what: str) -> None:
        with self._lock:
            first = not self.done.done() and self._positions > 0
            self._positions = -1
        if first:
            self.done.set_exception(EngineFailed(what, "They are computed again from the text."))
