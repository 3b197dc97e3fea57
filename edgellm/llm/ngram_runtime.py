"""Retrieval for a pair: its draft index, the verifier's cost curve, and the draft model as its own verifier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter, time

import numpy as np

from edgellm import __version__
from edgellm.engine import HEADS, Context, LMHead, Message, Model, head_pays, why_lazy
from edgellm.engine.timing import BUSY, CpuWait, minimum_times, plausible_times
from edgellm.errors import EdgeError
from edgellm.llm.model_loading import verifier_of
from edgellm.spec.draft_length import DRIFT, KNOTS, CostCurve, DraftLengthController
from edgellm.spec.drafters.hybrid import HybridDrafter
from edgellm.spec.ngram.draft_index import DraftIndex, PastConversation, recent
from edgellm.spec.ngram.drafter import RetrievalDrafter
from edgellm.spec.protocols import Drafter, Verifier
from edgellm.spec.state import Filling, Suggestions
from edgellm.spec.types import Ids
from edgellm.storage import History, fingerprint
from edgellm.storage.device_speed import MAX_CHANGE, StoredCurve, curve_path, processor, read_curve, write_curve
from edgellm.verifier.in_process import LocalVerifier

_PREFIX = 16  # positions in the context before a measured decode
_ROUNDS = 12  # fewer if all lengths took the same time twice
_MIN_LENGTHS = 3  # minimum number of measured lengths, however slow the device is
_MAX_SECONDS = 3.0  # time limit: longer decodes are extrapolated
_ORDER = (1, 4, 2, 8, 16, 3, 6, 12, 32, 5, 10, 24, 64, 48)
_QUICK_SECONDS = 0.01  # seconds
SHARED = 0.5
"""Share of waiting that is assumed for decodes that shared the cores."""
_MAX_LOAD = 16.0
"""Maximum slowdown that other programs can explain."""
MAX_INDEXES = 4
"""Number of kept indexes, one per choice of sources."""
LINK_CURVE = CostCurve((1, KNOTS[-1]), (0.05, 0.1))
"""The cost curve of a verifier across a link: a round trip, beside which further rows are cheap."""


class NgramRuntime:
    """Retrieval for one verifier. It is opened with the pair; nothing is measured before it is used."""

    def __init__(self, model: Model, n_ctx: int, threads: int | None, linked: bool, *, history: bool = True) -> None:
        """Use `model`, which verifies in this process, or provides the vocabulary if the verifier is `linked`. Without
        `history`, and while the history is off, measured decode times are not saved."""
        self._history = history
        self.model, self._n_ctx, self._threads, self._linked = model, n_ctx, threads, linked
        self._self_verifier: LocalVerifier | None = None
        self._indexes: dict[tuple[str, ...], DraftIndex] = {}
        self._curve: CostCurve | None = None
        self._path: Path | None = None  # where it is kept
        self._waiting = CpuWait()
        self._verifier: Verifier | None = None  # of the last reply
        self._shared = 0  # decodes of it that shared the cores, before the last correction
        self._conversations: list[PastConversation] = []
        self._texts: list[tuple[str, str]] = []  # not yet tokenised
        self._lock = threading.RLock()  # replies may be written by several threads

    def index(self, sources: tuple[str, ...]) -> DraftIndex:
        """Return the draft index for these sources."""
        with self._lock:
            self._tokenise_pending()
            index = self._indexes.pop(sources, None)
            if index is None:
                index = DraftIndex(sources, self.curve(), continues_word(self.model), cache(self.model.is_eog))
                for conversation in self._conversations:
                    index.add(conversation)
            self._indexes[sources] = index  # most recently used last
            while len(self._indexes) > MAX_INDEXES:
                del self._indexes[next(iter(self._indexes))]
            return index

    def remember(self, conversations: Sequence[tuple[str, str]]) -> None:
        """Add past questions and replies, the oldest first. They are tokenised when needed."""
        self._texts += conversations

    def _tokenise_pending(self) -> None:
        texts, self._texts = self._texts, []
        end = [token] if (token := self.model.end_of_turn) is not None else []
        for question, reply in texts:
            with suppress(EdgeError, UnicodeEncodeError):  # a text that this model cannot read is of no use to it
                prompt = self.model.chat_prompt([Message("user", question)])
                self.add(prompt, [*self.model.tokenize(reply).tolist(), *end])

    def add(self, prompt: Ids, reply: Sequence[int]) -> None:
        """Add a complete reply and its prompt."""
        conversation = PastConversation(prompt.tolist(), reply)
        with self._lock:
            self._conversations = recent([*self._conversations, conversation])
            for index in self._indexes.values():
                index.add(conversation)
            for index in list(self._indexes.values())[-1:]:  # the most recently used one
                index.index_pending()

    def curve(self) -> CostCurve:
        """Return the cost curve, measured once and kept; across a link it starts from a guess."""
        with self._lock:
            if self._curve is None:
                self._curve, self._path = (LINK_CURVE, None) if self._linked else curve_of(self.model, self._threads)
                self._waiting = CpuWait()
            return self._curve

    def track(self, verifier: Verifier) -> None:
        """Track the decodes of `verifier`, to tell a slow curve from shared cores."""
        self._verifier, self._shared = verifier, verifier.shared

    def correct(self, rule: DraftLengthController) -> None:
        """Keep the measured curve if it differs, unless the machine's load explains the difference."""
        with self._lock:
            if self._path is None or self._curve is None or not rule.drifted:
                return
            wait_share, shared = self._waiting.share(), self._verifier.shared if self._verifier is not None else 0
            if shared > self._shared:
                wait_share = max(wait_share, SHARED)
            self._shared = shared
            if wait_share > BUSY and 1.0 <= rule.factor <= _MAX_LOAD:
                return
            curve = replace(rule.corrected(), doubtful=wait_share > BUSY)
            moved = np.log(np.array(curve.seconds) / np.array(self._curve.seconds))
            if np.abs(moved).max() > np.log(1.0 + DRIFT):
                self._curve = curve
                if self._history and History().on:
                    write_curve(self._path, _kept(curve, wait_share))

    @property
    def head_note(self) -> str:
        """Return for which rows the verifier's head is computed, and why; "" across a link."""
        return "" if self._linked else f"; {why_lazy(self.model)[1]}"

    def begin(self, sources: tuple[str, ...]) -> NgramSession | None:
        """Return a retrieval session for one reply; None while another reply uses the index."""
        index = self.index(sources)
        drafter = index.take()
        return None if drafter is None else NgramSession(self, index, drafter)

    def self_verifier(self) -> LocalVerifier:
        """Return the model as the verifier of drafts copied for it."""
        if self._self_verifier is None:
            self._self_verifier = verifier_of(self.model, self._n_ctx, self._threads)
        return self._self_verifier

    def close(self) -> None:
        """Keep the curve if it was corrected, and close the verifier."""
        for index in self._indexes.values():
            self.correct(index.length)
        if self._self_verifier is not None:
            self._self_verifier.close()


def curve_of(model: Model, threads: int | None) -> tuple[CostCurve, Path]:
    """Return the cost curve of `model` on this device, measured once and kept, and its file."""
    with Context(model, n_ctx=_PREFIX + KNOTS[-1], threads=threads, lazy=head_pays(model), rolls_back=True) as context:
        path = curve_path(fingerprint(model.path), context.threads)
        if (known := read_curve(path, _device())) is not None and bool(known.heads) == (context.lazy_head is not None):
            return CostCurve(known.rows, known.seconds, known.change, True, known.heads, known.doubtful), path
        waiting = CpuWait()
        curve = measure_curve(context)
        wait_share = max(waiting.share(), SHARED if context.shared else 0.0)
    write_curve(path, _kept(curve, wait_share))
    return replace(curve, doubtful=wait_share > BUSY), path


def _kept(curve: CostCurve, wait_share: float) -> StoredCurve:
    return StoredCurve(curve.rows, curve.seconds, curve.change, curve.heads, time(), wait_share, _device())


def _device() -> str:
    """Return the version and processor that a curve is valid for."""
    return f"edgellm {__version__} on {processor()}"


def measure_curve(context: Context) -> CostCurve:
    """Return the minimum time of a decode of 1, 2, 3 … 64 rows with all their logits, and the additional time after a
    decode of another size. With a lazy head, the heads' times are separate.

    A reply waits for the measurement, so a slow device measures fewer lengths, the most informative ones first, once
    each.
    """
    ids = np.ones(KNOTS[-1], dtype=np.int32)
    context.clear()
    context.fill(())
    context.decode(ids[:_PREFIX])
    if context.lazy_head is not None:
        context.decode_lazy(ids[:2], outputs=2)  # checks whether the context can compute heads lazily
        context.rollback(_PREFIX)
    late = context.lazy_head
    changes: list[float] = []
    singles: list[float] = []

    def timed(rows: int) -> float:
        began = perf_counter()
        if late is None or rows == 1:
            context.decode(ids[:rows], outputs=rows).argmax(axis=1)
        else:
            context.decode_lazy(ids[:rows], outputs=rows)
        taken = perf_counter() - began
        context.rollback(_PREFIX)
        context.reread()
        return taken

    def timed_twice(rows: int) -> float:
        """Return the seconds of a decode; of a quick one, those after another of the same size."""
        fresh = timed(rows)
        if fresh < _QUICK_SECONDS:
            again = timed(rows)
            changes.append(fresh - again)
            return again
        if rows > 1:  # single rows are the reference
            behind, single = timed(1), timed(1)
            changes.append(behind - single)
            singles.append(single)
        return fresh

    # a small model is slower after a much larger decode, which has evicted it from the processor's cache
    order = KNOTS if min(timed(1), timed(1)) < _QUICK_SECONDS else _ORDER
    found = minimum_times(
        timed_twice, order, rounds=_ROUNDS, seconds=_MAX_SECONDS, at_least=_MIN_LENGTHS, clock=perf_counter
    )
    found[1] = min(found[1], *singles) if singles else found[1]
    known = sorted(found)
    seconds = plausible_times(known, [found[rows] for rows in known])
    change = min(max(0.0, float(median(changes or [0.0]))), MAX_CHANGE * seconds[0])
    if late is None:
        return CostCurve(tuple(known), seconds, change, filled=True)
    heads = measure_heads(late.head)
    alone = max(seconds[0] - heads[0], 0.1 * seconds[0])
    return CostCurve(tuple(known), (alone, *seconds[1:]), change, filled=True, heads=heads)


def measure_heads(head: LMHead) -> tuple[float, ...]:
    """Return the minimum time of 1, 2, 3 … 64 head rows; unmeasured ones are extrapolated."""

    def timed(rows: int) -> float:
        began = perf_counter()
        head.compute(0, rows)
        head.logits[:rows].argmax(axis=1)
        return perf_counter() - began

    timed(HEADS[0])  # builds the graph
    found = minimum_times(timed, HEADS, rounds=_ROUNDS, seconds=_MAX_SECONDS / 3.0, clock=perf_counter)
    last = max(found)
    taken = [found.get(rows, found[last] * rows / last) for rows in HEADS]
    return tuple(np.minimum.accumulate(taken[::-1])[::-1].tolist())


class NgramSession:
    """Retrieval for one reply, to be closed after it."""

    def __init__(self, retrieval: NgramRuntime, index: DraftIndex, drafter: RetrievalDrafter) -> None:
        self._retrieval, self._index, self._drafter = retrieval, index, drafter

    @property
    def suggestions(self) -> Suggestions:
        """Return suggestions for the models that write the reply."""
        return self._drafter

    @property
    def filling(self) -> Filling:
        """Return the padding of the verifier's decodes, and the times of its heads."""
        return self._retrieval.curve().filling()

    def hybrid_drafter(self, model: Drafter | None, gamma: int) -> Drafter:
        """Return a drafter that copies, and uses `model`, if given, for up to `gamma` tokens where that is better."""
        return self._drafter if model is None else HybridDrafter(self._drafter, model, gamma, self._index.rounds)

    def verifier(self, given: Verifier | None) -> Verifier:
        """Return the verifier of the reply: the given one, or the model itself."""
        verifier = given or self._retrieval.self_verifier()
        self._retrieval.track(verifier)
        return verifier

    @property
    def counts(self) -> dict[str, int]:
        """Return accepted tokens by source; the dictionary is updated."""
        return self._drafter.copied

    def close(self) -> None:
        self._retrieval.correct(self._index.length)
        self._index.give()


def continues_word(model: Model) -> Callable[[int], bool]:
    """Return a function that returns whether a token continues a word: it begins with a letter, a digit, or a byte
    beyond ASCII."""

    @cache
    def inside(token: int) -> bool:
        first = model.piece(token)[:1]
        return first.isalnum() or first >= b"\x80"

    return inside
