"""The pipeline that takes over next: it loads, and reads the texts so far, while the present pipeline writes tokens.

Stages of one device share their weights, so only layers that the device lacks are loaded. The present pipeline does not
depend on the next: if that is lost, it is forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

from edgellm.engine import Ids, common_prefix
from edgellm.errors import EngineFailed
from edgellm.layer_range import StageShare
from edgellm.mesh.messages import CacheTaken, LayerCache, StageAnswer, StageSpec
from edgellm.mesh.pipeline import Pipeline, StageHost
from edgellm.spec.types import GREEDY, NO_IDS, Chunk
from edgellm.spec.verifier import VerifyRequest

CATCH_UP = 8
"""Most tokens that the next pipeline may still have to read, beyond the present pipeline, when it takes over: so short
a pass takes hardly longer than a pass of one token."""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """A pipeline that has taken over, with `perf_counter` times: when it began to load, was seen to have loaded and to
    have read the text, and took over, at the end of a text of `tokens` tokens."""

    shares: tuple[StageShare, ...]
    began: float
    loaded: float
    ready: float
    at: float
    tokens: int


class NextPipeline:
    """A pipeline over `shares`, on its way. Not thread-safe."""

    def __init__(
        self, shares: Sequence[StageShare], stages: Sequence[tuple[StageHost, StageSpec]], *, direct: bool,
        sends_caches: bool = False,
    ) -> None:  # fmt: skip
        """Start the stages, which begin to load. `sends_caches`: the present pipeline's keys and values are sent, where
        possible, and not computed again from the texts."""
        self.shares, self._sends = tuple(shares), sends_caches
        self.began, self._loaded_at, self._ready_at = perf_counter(), 0.0, 0.0
        self.pipeline = Pipeline(stages, direct=direct)
        self._texts: dict[int, Ids] = {}
        self._reading: dict[int, Future[StageAnswer] | Future[None]] = {}
        self._sent: set[int] = set()  # sequences whose caches are sent, not read

    @property
    def loaded(self) -> bool:
        """Return whether all layers are loaded."""
        if not self._loaded_at and all(record.whole for record in self.pipeline.records):
            self._loaded_at = perf_counter()
        return self._loaded_at > 0.0

    @property
    def settled(self) -> bool:
        """Return whether no text is being read, and no cache is on its way."""
        return all(reading.done() for reading in self._reading.values())

    @property
    def takes_caches(self) -> bool:
        """Return whether caches are on their way to its stages, where they would replace the present caches."""
        return not all(self._reading[slot].done() for slot in self._sent)

    @property
    def busy(self) -> bool:
        """Return whether it loads, or reads a text that was given to it."""
        return not self.loaded or not self.settled

    def held(self, slot: int) -> Ids:
        """Return the tokens that every stage's cache holds for a sequence."""
        reading = self._reading.get(slot)
        failed = reading is None or not reading.done() or reading.exception() is not None
        return NO_IDS if failed else self._texts[slot]

    def read(self, slot: int, text: Ids, rows: int) -> None:
        """Begin to read a text, in parts of `rows` tokens, if none is being read for the sequence."""
        if not len(text) or slot in self._reading:
            return
        self._texts[slot] = text.copy()
        request = VerifyRequest(slot, GREEDY, len(text), NO_IDS, Chunk())
        self._reading[slot] = self.pipeline.ask(slot, 0, self._texts[slot], request, rows)

    def _bring(self, slot: int, text: Ids, rows: int, present: Pipeline) -> None:
        """Begin to send the present pipeline's cache of a text, all but its last token, or to read the text."""
        if self._sends and len(text) > 1:
            self._texts[slot] = text[:-1].copy()
            self._reading[slot] = CacheTransfer(slot, len(text) - 1, present, self.pipeline).done
            self._sent.add(slot)
        else:
            self.read(slot, text, rows)

    def ready(self, texts: Mapping[int, tuple[Ids, Ids]], rows: int, present: Pipeline) -> bool:
        """Return whether the pipeline may take over: all layers are loaded, and the texts read as far as they were when
        reading began. Begin now to read unread texts, unless the present pipeline, too, has nearly all of them to read.
        `texts`: the text of every open reply, and the part that the present pipeline holds."""
        if not self.loaded:
            return False
        for slot in list(self._sent):
            if self._reading[slot].done() and self._reading[slot].exception() is not None:
                self._sends = False
                self._sent.discard(slot)
                del self._reading[slot]
        ready = True
        for slot, (text, held) in texts.items():
            missing = len(text) - common_prefix(self.held(slot), text)
            if slot not in self._reading and missing > len(text) - common_prefix(held, text) + CATCH_UP:
                self._bring(slot, text, rows, present)
                ready = False
        ready &= self.settled
        if ready:
            self._ready_at = perf_counter()
        return ready

    def taken(self, tokens: int) -> TakeOver:
        """Return the record of the take-over, which happens now."""
        now = perf_counter()
        return TakeOver(self.shares, self.began, self._loaded_at or now, self._ready_at or now, now, tokens)


class CacheTransfer:
    """One session's keys and values for its first `positions`, on their way from one pipeline's stages to another's,
    through this process, which passes on only what was asked for: one cache of every layer, of the right length. `done`
    fails with EngineFailed if a stage cannot give or take it; then the text has to be read."""

    def __init__(self, session: int, positions: int, before: Pipeline, after: Pipeline) -> None:
        """Ask the stages of `before` for the caches, and give them to the stages of `after`."""
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
