"""Retrieval for a pair: its memory, the verifier's cost curve, and the verifier that a model alone is for itself."""

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
from edgellm.engine import HEADS, Context, LMHead, Message, Model, head_pays, why_late
from edgellm.engine.timing import BUSY, CpuWait, least, repaired
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
from edgellm.storage.device_speed import CHANGE_MOST, KeptCurve, curve_path, keep_curve, processor, read_curve
from edgellm.verifier.in_process import LocalVerifier

_BEHIND = 16  # positions in the context before a measured decode
_ROUNDS = 12  # fewer where all lengths took as long twice
_FEWEST = 3  # lengths that are measured on any device, however slow
_PATIENCE = 3.0  # seconds, after which nothing more is measured: longer decodes count as slow per row as the last
_ORDER = (1, 4, 2, 8, 16, 3, 6, 12, 32, 5, 10, 24, 64, 48)
_QUICK = 0.01  # seconds
SHARED = 0.5
"""Decodes that shared the cores count as if they had waited for this share of their time."""
_LOAD = 16.0
"""Other programs make decodes take up to this many times as long."""
MEMORIES = 4
"""Choices of sources whose memory is kept: each reply may choose its own."""
FAR = CostCurve((1, KNOTS[-1]), (0.05, 0.1))
"""The curve of a verifier across a link: a round trip, beside which the rest of a batch is cheap."""


class NgramRuntime:
    """Retrieval for one verifier. It is opened with the pair; nothing is measured before it is used."""

    def __init__(self, model: Model, n_ctx: int, threads: int | None, linked: bool, *, history: bool = True) -> None:
        """`model` verifies in this process, or, where the verifier is `linked`, has its vocabulary. Without `history`,
        and while the history is off, the times of a reply's decodes are not kept."""
        self._history = history
        self.model, self._n_ctx, self._threads, self._linked = model, n_ctx, threads, linked
        self._itself: LocalVerifier | None = None
        self._memories: dict[tuple[str, ...], DraftIndex] = {}
        self._curve: CostCurve | None = None
        self._path: Path | None = None  # where it is kept
        self._waiting = CpuWait()
        self._verifier: Verifier | None = None  # of the last reply
        self._shared = 0  # decodes of it that shared the cores, before the last correction
        self._past: list[PastConversation] = []
        self._texts: list[tuple[str, str]] = []  # not yet tokenised
        self._lock = threading.RLock()  # replies may be written by several threads

    def memory(self, sources: tuple[str, ...]) -> DraftIndex:
        """Return the memory for drafts from these sources."""
        with self._lock:
            self._read()
            memory = self._memories.pop(sources, None)
            if memory is None:
                memory = DraftIndex(sources, self.curve(), inside_of(self.model), cache(self.model.is_eog))
                for talk in self._past:
                    memory.add(talk)
            self._memories[sources] = memory  # after those that were used before it
            while len(self._memories) > MEMORIES:
                del self._memories[next(iter(self._memories))]
            return memory

    def remember(self, conversations: Sequence[tuple[str, str]]) -> None:
        """Remember past questions and replies, the oldest first. They are read when they are needed."""
        self._texts += conversations

    def _read(self) -> None:
        texts, self._texts = self._texts, []
        end = [token] if (token := self.model.end_of_turn) is not None else []
        for question, reply in texts:
            with suppress(EdgeError, UnicodeEncodeError):  # a text that this model cannot read is of no use to it
                prompt = self.model.chat_prompt([Message("user", question)])
                self.add(prompt, [*self.model.tokenize(reply).tolist(), *end])

    def add(self, prompt: Ids, reply: Sequence[int]) -> None:
        """Remember a complete reply and its prompt."""
        talk = PastConversation(prompt.tolist(), reply)
        with self._lock:
            self._past = recent([*self._past, talk])
            for memory in self._memories.values():
                memory.add(talk)
            for memory in list(self._memories.values())[-1:]:  # the one that was used last
                memory.settle()

    def curve(self) -> CostCurve:
        """Return how long a decode takes, measured once and kept; across a link it is a guess that rounds correct."""
        with self._lock:
            if self._curve is None:
                self._curve, self._path = (FAR, None) if self._linked else curve_of(self.model, self._threads)
                self._waiting = CpuWait()
            return self._curve

    def uses(self, verifier: Verifier) -> None:
        """Correct the curve by the decodes of `verifier` from now on."""
        self._verifier, self._shared = verifier, verifier.shared

    def correct(self, rule: DraftLengthController) -> None:
        """Keep the curve that decodes really followed, if it differs, unless the machine's load explains that."""
        with self._lock:
            if self._path is None or self._curve is None or not rule.drifted:
                return
            waited, shared = self._waiting.share(), self._verifier.shared if self._verifier is not None else 0
            if shared > self._shared:
                waited = max(waited, SHARED)
            self._shared = shared
            if waited > BUSY and 1.0 <= rule.factor <= _LOAD:
                return
            curve = replace(rule.corrected(), doubtful=waited > BUSY)
            moved = np.log(np.array(curve.seconds) / np.array(self._curve.seconds))
            if np.abs(moved).max() > np.log(1.0 + DRIFT):
                self._curve = curve
                if self._history and History().on:
                    keep_curve(self._path, _kept(curve, waited))

    @property
    def heads(self) -> str:
        """A text that says for which rows of a check the verifier's head is computed, and why; "" across a link."""
        return "" if self._linked else f"; {why_late(self.model)[1]}"

    def begin(self, sources: tuple[str, ...]) -> NgramSession | None:
        """Return retrieval for one reply; None while another reply has it."""
        memory = self.memory(sources)
        drafter = memory.take()
        return None if drafter is None else NgramSession(self, memory, drafter)

    def itself(self) -> LocalVerifier:
        """Return the model as a verifier of what is copied for it."""
        if self._itself is None:
            self._itself = verifier_of(self.model, self._n_ctx, self._threads)
        return self._itself

    def close(self) -> None:
        """Keep the curve if it was corrected, and close the verifier."""
        for memory in self._memories.values():
            self.correct(memory.length)
        if self._itself is not None:
            self._itself.close()


def curve_of(model: Model, threads: int | None) -> tuple[CostCurve, Path]:
    """Return how long a decode of `model` takes here, measured once and kept, and the file that keeps it."""
    with Context(model, n_ctx=_BEHIND + KNOTS[-1], threads=threads, late=head_pays(model)) as context:
        path = curve_path(fingerprint(model.path), context.threads)
        if (known := read_curve(path, _device())) is not None and bool(known.heads) == (context.late is not None):
            return CostCurve(known.rows, known.seconds, known.change, True, known.heads, known.doubtful), path
        waiting = CpuWait()
        curve = measure_curve(context)
        waited = max(waiting.share(), SHARED if context.shared else 0.0)
    keep_curve(path, _kept(curve, waited))
    return replace(curve, doubtful=waited > BUSY), path


def _kept(curve: CostCurve, waited: float) -> KeptCurve:
    return KeptCurve(curve.rows, curve.seconds, curve.change, curve.heads, time(), waited, _device())


def _device() -> str:
    """Return the program and processor that a curve holds for."""
    return f"edgellm {__version__} on {processor()}"


def measure_curve(context: Context) -> CostCurve:
    """Return the least time of one decode of 1, 2, 3 … 64 rows with all their logits read, and how much longer it
    takes behind one of another number of rows. Where the context decodes late, the heads' time is separate.

    A reply waits for it, so a slow device measures fewer lengths, the most telling ones first, and each once.
    """
    ids = np.ones(KNOTS[-1], dtype=np.int32)
    context.clear()
    context.fill(())
    context.decode(ids[:_BEHIND])
    if context.late is not None:
        context.decode_late(ids[:2], outputs=2)  # finds out whether the context can decode late
        context.rollback(_BEHIND)
    late = context.late
    changes: list[float] = []
    singles: list[float] = []

    def timed(rows: int) -> float:
        began = perf_counter()
        if late is None or rows == 1:
            context.decode(ids[:rows], outputs=rows).argmax(axis=1)
        else:
            context.decode_late(ids[:rows], outputs=rows)
        taken = perf_counter() - began
        context.rollback(_BEHIND)
        return taken

    def settled(rows: int) -> float:
        """Return the seconds of a decode; if it is quick, of one behind another of as many rows."""
        fresh = timed(rows)
        if fresh < _QUICK:
            again = timed(rows)
            changes.append(fresh - again)
            return again
        if rows > 1:  # single rows come in runs, and all others are compared with them
            behind, single = timed(1), timed(1)
            changes.append(behind - single)
            singles.append(single)
        return fresh

    # a small model is slower behind a decode of many more rows, which has taken its place in the processor's cache
    order = KNOTS if min(timed(1), timed(1)) < _QUICK else _ORDER
    found = least(settled, order, rounds=_ROUNDS, seconds=_PATIENCE, at_least=_FEWEST, clock=perf_counter)
    found[1] = min(found[1], *singles) if singles else found[1]
    known = sorted(found)
    seconds = repaired(known, [found[rows] for rows in known])
    change = min(max(0.0, float(median(changes or [0.0]))), CHANGE_MOST * seconds[0])
    if late is None:
        return CostCurve(tuple(known), seconds, change, filled=True)
    heads = measure_heads(late.head)
    alone = max(seconds[0] - heads[0], 0.1 * seconds[0])
    return CostCurve(tuple(known), (alone, *seconds[1:]), change, filled=True, heads=heads)


def measure_heads(head: LMHead) -> tuple[float, ...]:
    """Return the least time of the heads of 1, 2, 3 … 64 rows together; those that there is no time to measure, in
    proportion."""

    def timed(rows: int) -> float:
        began = perf_counter()
        head.compute(0, rows)
        head.logits[:rows].argmax(axis=1)
        return perf_counter() - began

    timed(HEADS[0])  # the first one is built
    found = least(timed, HEADS, rounds=_ROUNDS, seconds=_PATIENCE / 3.0, clock=perf_counter)
    last = max(found)
    taken = [found.get(rows, found[last] * rows / last) for rows in HEADS]
    return tuple(np.minimum.accumulate(taken[::-1])[::-1].tolist())


class NgramSession:
    """Retrieval for one reply, to be closed after it."""

    def __init__(self, retrieval: NgramRuntime, memory: DraftIndex, drafter: RetrievalDrafter) -> None:
        self._retrieval, self._memory, self._drafter = retrieval, memory, drafter

    @property
    def suggestions(self) -> Suggestions:
        """Suggestions for the models that write the reply."""
        return self._drafter

    @property
    def filling(self) -> Filling:
        """The numbers of rows that the verifier's decodes are filled up to, and the times of its heads."""
        return self._retrieval.curve().filling()

    def beside(self, model: Drafter | None, gamma: int) -> Drafter:
        """Return a drafter that copies, and asks `model`, if there is one, for up to `gamma` tokens where that is
        better."""
        return self._drafter if model is None else HybridDrafter(self._drafter, model, gamma, self._memory.rounds)

    def verifier(self, given: Verifier | None) -> Verifier:
        """Return the verifier of the reply: the one given, or the model itself."""
        verifier = given or self._retrieval.itself()
        self._retrieval.uses(verifier)
        return verifier

    @property
    def counts(self) -> dict[str, int]:
        """Accepted tokens by source; the dictionary keeps counting."""
        return self._drafter.copied

    def close(self) -> None:
        self._retrieval.correct(self._memory.length)
        self._memory.give()


def inside_of(model: Model) -> Callable[[int], bool]:
    """Return a function that tells whether a token continues a word: it begins with a letter, a digit, or a byte
    beyond ASCII."""

    @cache
    def inside(token: int) -> bool:
        first = model.piece(token)[:1]
        return first.isalnum() or first >= b"\x80"

    return inside
