"""A random walk over a context's caches, in which every logit is compared with those of a fresh context.

`Walk.run` decodes texts of random ids, rolls them back, branches and copies them, rejects drafts, and decodes several
sequences in one batch. Whatever is decoded must have the logits that a fresh context gives the same text. Where the two
differ, the text is decoded in other batches, too: experts, sparse attention and tables of functions choose between
numbers, so that a difference of 1e-6 may decide otherwise. What equals none of these is a wrong state.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from edgellm.engine import Context, ContextSpec, Floats, Ids, Model, SeqRows
from edgellm.engine.native import lib
from edgellm.errors import EngineFailed

POSITIONS, WINDOWED = 96, 352  # of a sequence; llama.cpp keeps 256 positions of a sliding window, at least
CLOSE = 1e-3  # of the largest logit; a wrong state differs by 0.005 and more
_SHORT, _LONG = 9, 0.4  # ids of a decode; the latter as a share of the positions
_BATCH = 24  # rows; longer texts are decoded in several batches
_MOST_KEPT = 20  # wrong states that are described


@dataclass(frozen=True, slots=True)
class Setting:
    """A context as it is opened for one of its uses."""

    name: str
    n_seq: int = 1
    unified: bool = True
    rolls_back: bool = False


SETTINGS = (
    Setting("verifier", rolls_back=True),
    Setting("served verifier", n_seq=3, unified=False, rolls_back=True),
    Setting("draft model", n_seq=1),
    Setting("branches", n_seq=4),
    Setting("branches with snapshots", n_seq=4, rolls_back=True),
)


@dataclass
class Outcome:
    """What a walk found: operations by kind, compared rows, those equal in other batches only, and wrong states."""

    operations: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    other_batches: int = 0
    wrong: list[str] = field(default_factory=list)
    n_wrong: int = 0

    def add(self, other: "Outcome") -> None:
        """Add another walk's figures."""
        self.operations += other.operations
        self.rows += other.rows
        self.other_batches += other.other_batches
        self.n_wrong += other.n_wrong
        self.wrong = [*self.wrong, *other.wrong][:_MOST_KEPT]


class Walk:
    """A walk through one context of a model, which `seed` determines."""

    def __init__(self, model: Model, setting: Setting, seed: int) -> None:
        self._model, self._setting = model, setting
        self._rng = np.random.default_rng(seed)
        self._positions = WINDOWED if lib.llama_model_n_swa(model.owned.pointer) > 0 else POSITIONS
        spec = ContextSpec(
            n_ctx=self._positions, n_seq=setting.n_seq, n_batch=_BATCH, threads=1, unified=setting.unified,
            rolls_back=setting.rolls_back,
        )  # fmt: skip
        self._context = Context(model, spec)
        self._batches: list[list[int]] = [[] for _ in range(setting.n_seq)]  # by which a sequence was decoded
        self._last = ""
        self.outcome = Outcome()

    def run(self, operations: int, most_wrong: int | None = None) -> Outcome:
        """Do as many operations, or fewer once `most_wrong` wrong states were met, and return what was found."""
        steps: Sequence[tuple[Callable[[], None], float]] = (
            (self._decode, 0.35), (self._roll_back, 0.3), (self._draft, 0.15), (self._copy, 0.1),
            (self._together, 0.09), (self._clear, 0.01),
        )  # fmt: skip
        chances = np.array([chance for _, chance in steps])
        with self._context:
            for at in self._rng.choice(len(steps), size=operations, p=chances):
                try:
                    steps[at][0]()
                except EngineFailed as error:  # llama.cpp refuses positions that do not follow what it holds
                    self._note_wrong(error.what, *range(self._setting.n_seq))
                self.outcome.operations[self._last.split()[0]] += 1
                if self.outcome.n_wrong == most_wrong:
                    break
        return self.outcome

    def _any(self) -> int:
        return int(self._rng.integers(self._setting.n_seq))

    def _ids(self, most: int) -> Ids:
        return self._rng.integers(0, self._model.n_vocab, int(self._rng.integers(1, most + 1))).astype(np.int32)

    def _few(self) -> int:
        return int(self._rng.choice((1, _SHORT, int(_LONG * self._positions)), p=(0.35, 0.5, 0.15)))

    def _room(self, seq: int, n: int) -> None:
        """Roll a sequence back where `n` more ids do not fit."""
        if self._context.length(seq) + n > self._positions:
            self._to(seq, int(self._rng.integers(0, self._positions - n + 1)))

    def _to(self, seq: int, length: int) -> None:
        self._context.rollback(length, seq)
        left = length
        kept = []
        for n in self._batches[seq]:
            kept.append(min(n, left))
            left -= kept[-1]
        self._batches[seq] = [n for n in kept if n]

    def _decode(self) -> None:
        seq, ids = self._any(), self._ids(self._few())
        outputs = int(self._rng.integers(1, min(len(ids), _BATCH) + 1))
        self._room(seq, len(ids))
        self._last = f"decode of {len(ids)} ids, {outputs} rows, sequence {seq} after {self._context.length(seq)}"
        self._append(seq, ids, outputs)

    def _append(self, seq: int, ids: Ids, outputs: int) -> None:
        found = self._context.decode(ids, seq=seq, outputs=outputs).copy()
        self._batches[seq].append(len(ids))
        self._check(seq, found)

    def _roll_back(self) -> None:
        seq = self._any()
        now = self._context.length(seq)
        most = min(now, _SHORT) if self._rng.random() < 0.8 else now
        dropped = int(self._rng.integers(0, most + 1))
        self._last = f"rollback by {dropped}, sequence {seq} of {now}"
        self._to(seq, now - dropped)

    def _draft(self) -> None:
        """Decode a text of which the cache has a beginning, and then single ids, as a draft model does."""
        seq = self._any()
        text = self._context.cached(seq)[: self._context.length(seq) - int(self._rng.integers(0, 4))]
        text = np.concatenate((text[: self._positions - 8], self._ids(3)))
        before = self._context.length(seq)
        start = self._context.sync(text, seq)
        self._last = f"draft in sequence {seq} of {before}, synced to {start} of {len(text)}"
        self._to(seq, start)
        self._append(seq, text[start:], 1)
        for _ in range(int(self._rng.integers(1, 5))):
            self._append(seq, self._ids(1), 1)

    def _copy(self) -> None:
        src, dst = self._any(), self._any()
        length = self._context.length(src)
        if self._setting.unified and self._rng.random() < 0.7:
            self._last = f"branch from sequence {src} of {length} to {dst}"
            self._context.branch(src, dst)
        else:
            length = int(self._rng.integers(0, length + 1))
            self._last = f"copy of {length} positions of sequence {src} to {dst}"
            self._context.copy_prefix(src, dst, length)
        self._batches[dst] = list(self._batches[src])
        self._to(dst, length)

    def _together(self) -> None:
        seqs = self._rng.permutation(self._setting.n_seq)[: int(self._rng.integers(1, self._setting.n_seq + 1))]
        equal = self._rng.random() < 0.5  # numbers of ids, which llama.cpp computes together
        n = int(self._rng.integers(1, 7))
        rows = []
        for seq in map(int, np.sort(seqs) if equal else seqs):
            ids = self._ids(6)
            ids = np.resize(ids, n) if equal else ids
            self._room(seq, len(ids))
            rows.append(SeqRows(seq, ids, int(self._rng.integers(1, len(ids) + 1))))
        self._last = "batch of " + ", ".join(
            f"{len(one.ids)} ids in sequence {one.seq} after {self._context.length(one.seq)}" for one in rows
        )
        found = [view.copy() for view in self._context.decode_rows(rows)]
        for one, logits in zip(rows, found, strict=True):
            self._batches[one.seq].append(len(one.ids))
            self._check(one.seq, logits)

    def _clear(self) -> None:
        seq = self._any()
        self._last = f"clear of sequence {seq}"
        self._context.clear(seq)
        self._batches[seq] = []

    def _check(self, seq: int, found: Floats) -> None:
        """Compare the last rows of a sequence; where its state is wrong, note that and clear it."""
        ids, outputs, apart = self._context.cached(seq).copy(), len(found), float("inf")
        self.outcome.rows += outputs
        for number, batches in enumerate(self._other_batches(seq, len(ids))):
            apart = min(apart, _difference(found, fresh(self._model, ids, batches, outputs)))
            if apart <= CLOSE:
                self.outcome.other_batches += number > 0
                return
        self._note_wrong(f"{apart:.2g} of the largest logit away", seq)

    def _note_wrong(self, what: str, *seqs: int) -> None:
        """Note a wrong state, and clear these sequences."""
        self.outcome.n_wrong += 1
        if len(self.outcome.wrong) < _MOST_KEPT:
            self.outcome.wrong.append(f"{self._setting.name}: {self._last}: {what}")
        for seq in seqs:
            self._context.clear(seq)
            self._batches[seq] = []

    def _other_batches(self, seq: int, n: int) -> Iterator[list[int]]:
        """Yield ways to decode `n` ids in batches: at once, as the sequence was, one by one, and in halves."""
        yield [n]
        yield list(self._batches[seq])
        yield [1] * n
        half = max(n // 2, 1)
        yield [half, n - half] if n > 1 else [1]


def fresh(model: Model, ids: Ids, batches: Sequence[int], outputs: int) -> Floats:
    """Return the logits (outputs, n_vocab) that a new context has for the last ids, decoded in these batches."""
    rows: list[Floats] = []
    with Context(model, ContextSpec(n_ctx=len(ids), n_batch=len(ids), threads=1)) as context:
        at = 0
        for n in batches:
            wanted = max(0, min(n, at + n - (len(ids) - outputs)))
            logits = context.decode(ids[at : at + n], outputs=wanted)
            rows.append(logits.copy())
            at += n
    return np.concatenate(rows)


def _difference(found: Floats, expected: Floats) -> float:
    """Return the largest difference by the largest expected logit; infinite where one is no number."""
    apart = float(np.abs(found - expected).max()) / float(np.abs(expected).max())
    return apart if np.isfinite(apart) else float("inf")


def walk(model: Model, operations: int) -> Outcome:
    """Walk through a context of each setting, with equal parts of the operations, and return what was found."""
    outcome = Outcome()
    for number, setting in enumerate(SETTINGS):
        part = operations * (number + 1) // len(SETTINGS) - operations * number // len(SETTINGS)
        outcome.add(Walk(model, setting, number).run(part))
    return outcome
