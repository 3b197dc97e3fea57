"""The pipeline that takes over next: it loads, and reads the texts so far, while the present pipeline writes tokens.

Stages of one device share their weights, so only layers that the device lacks are loaded. The present pipeline does not
depend on the next: if that is lost, it is forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from time import perf_counter

from edgellm.engine import Ids, common_prefix
from edgellm.layer_range import StageShare
from edgellm.mesh.messages import StageAnswer
from edgellm.mesh.pipeline import Pipeline
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
    """A `pipeline` over `shares`, on its way. Not thread-safe."""

    def __init__(self, shares: Sequence[StageShare], pipeline: Pipeline) -> None:
        self.shares, self.pipeline = tuple(shares), pipeline
        self._began, self._loaded_at, self._ready_at = perf_counter(), 0.0, 0.0
        self._reading: dict[int, tuple[Ids, Future[StageAnswer]]] = {}  # texts that are or were read

    @property
    def loaded(self) -> bool:
        """Return whether all layers are loaded."""
        if not self._loaded_at and all(record.whole for record in self.pipeline.records):
            self._loaded_at = perf_counter()
        return self._loaded_at > 0.0

    @property
    def busy(self) -> bool:
        """Return whether it loads, or reads a text that was given to it."""
        return not self.loaded or not all(reading.done() for _, reading in self._reading.values())

    def stands(self, lost: Collection[str]) -> bool:
        """Return whether it has lost no stage, and needs none of the `lost` devices."""
        return self.pipeline.lost is None and not any(share.name in lost for share in self.shares)

    def held(self, slot: int) -> Ids:
        """Return the tokens that every stage's cache holds for a sequence."""
        text, reading = self._reading.get(slot, (NO_IDS, None))
        return text if reading is not None and reading.done() and reading.exception() is None else NO_IDS

    def read(self, slot: int, text: Ids, rows: int) -> None:
        """Begin to read a text, in parts of `rows` tokens, if none is being read for the sequence."""
        if len(text) and slot not in self._reading:
            kept = text.copy()
            request = VerifyRequest(slot, GREEDY, len(text), NO_IDS, Chunk())
            self._reading[slot] = kept, self.pipeline.ask(slot, 0, kept, request, rows)

    def ready(self, texts: Mapping[int, tuple[Ids, Ids]], rows: int) -> bool:
        """Return whether the pipeline may take over: all layers are loaded, and the texts read as far as they were when
        reading began. Begin now to read unread texts, unless the present pipeline, too, has nearly all of them to read.
        `texts`: the text of every open reply, and the part that the present pipeline holds."""
        if not self.loaded:
            return False
        for slot, (text, held) in texts.items():
            missing = len(text) - common_prefix(self.held(slot), text)
            if missing > len(text) - common_prefix(held, text) + CATCH_UP:
                self.read(slot, text, rows)
        if self.busy:
            return False
        self._ready_at = perf_counter()
        return True

    def taken(self, tokens: int) -> TakeOver:
        """Return the record of the take-over, which happens now."""
        now = perf_counter()
        return TakeOver(self.shares, self._began, self._loaded_at or now, self._ready_at or now, now, tokens)
