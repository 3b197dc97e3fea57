"""What the verifier computes next: a pure choice over the requests that wait (Synera, section 4.5, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import islice


class Kind(Enum):
    """Prefill and verification never share a batch: their row counts differ too much."""

    PREFILL = "prefill"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Limits:
    """`rows` of one batch at most; a prefill advances by `chunk` tokens at a time (Synera: 32), or by `alone` where
    there is one session only: nobody else can wait for a verdict then, and larger pieces are sooner done. A request
    that has no more unseen tokens than such a piece needs no prefill: they join its verification.

    A verification waits behind `ahead` chunks of prefill at most, whoever's they are. `even`: verifications share a
    batch where they have equally many rows; llama.cpp splits a batch of several streams into pieces that are even.
    """

    rows: int = 512
    chunk: int = 32
    ahead: int = 1
    even: bool = True
    alone: int = 128


@dataclass(frozen=True, slots=True)
class Want:
    """What one request needs: `unseen` tokens (at least 1) before its `drafted` ones are to be decoded.

    `since` is the number of prefill batches that had been computed when it came, or was last served. `device` asks;
    `turn` counts the wants of the same device that go first (see `edgellm.serve.fairness`).
    """

    session: int
    unseen: int
    drafted: int
    since: int = 0
    device: str = ""
    turn: int = 0

    @property
    def rows(self) -> int:
        return self.unseen + self.drafted


@dataclass(frozen=True, slots=True)
class Share:
    """The next `tokens` of one session's request; with `outputs` of them, the last ones, as rows of logits."""

    session: int
    tokens: int
    outputs: int
    turn: int = 0

    @property
    def weight(self) -> int:
        """Rows that could be computed in the time that this share takes, about: a further sequence costs two."""
        return self.tokens + 2


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass of the model, over one or more sessions."""

    kind: Kind
    shares: tuple[Share, ...]


def next_batch(
    wants: Collection[Want], limits: Limits, prefills: int, alone: bool = False, budget: int | None = None
) -> Batch | None:
    """The next batch over `wants` (least recently served first), when `prefills` prefill batches have been computed.
    `alone`: there is no session but the one that wants something. `budget`: several devices ask by turns, and beyond
    the first turn a batch is no heavier than that.

    Prefill goes first, as in the paper; but not where one has gone ahead of a waiting verification already. So a
    verification waits behind one prefill batch, of `limits.ahead` chunks; and a prefill waits until the verifications
    that the last one went ahead of are done, and no longer. Where several devices ask, the first in line decides which
    of both is computed, and its device then goes to the end of the line. None where nobody wants anything.
    """
    step = min(limits.alone, limits.rows) if alone else limits.chunk
    most = None  # rows of one request
    if budget is not None:
        most = max(budget, _PORTION if any(want.turn for want in wants) else limits.chunk)
        step = min(step, most)
    prefill: list[Want] = []
    verify: list[Want] = []
    for want in wants:
        (prefill if want.unseen > step else verify).append(want)
    if budget is None:
        verify.sort(key=_since)
        hurry = bool(verify) and verify[0].since < prefills
    else:  # whoever is first in line: requests of others that have waited for longer are none of a device's concern
        hurry = any(want.unseen <= step for want in islice(wants, 1))
    if prefill and not hurry:
        pieces = (Share(want.session, step, 0, want.turn) for want in prefill)
        return Batch(Kind.PREFILL, _fitting(pieces, min(limits.rows, limits.ahead * min(limits.chunk, step)), budget))
    if verify:
        whole = (_verification(want, most) for want in verify)
        if limits.even:
            first = _verification(verify[0], most).tokens
            whole = (share for share in whole if share.tokens == first)
        return Batch(Kind.VERIFY, _fitting(whole, limits.rows, budget))
    return None


def _since(want: Want) -> int:
    return want.since


def _verification(want: Want, most: int | None) -> Share:
    """All of it, or its first `most` drafted tokens: the others are verified when these stand."""
    drafted = min(want.drafted, most or want.drafted)
    return Share(want.session, want.unseen + drafted, drafted + 1, want.turn)


def _fitting(shares: Iterable[Share], rows: int, budget: int | None) -> tuple[Share, ...]:
    """As many of `shares` as fit in `rows`, in their order; the first one always. Beyond the first turn they have to
    fit in `budget` as well, if there is one. Of dozens of requests often only the first few are looked at."""
    taken: list[Share] = []
    weight = 0
    for share in shares:
        rows -= share.tokens
        if budget is not None:
            weight += share.weight
            if taken and share.turn and weight > budget:
                break
        if taken and rows < 0:
            break
        taken.append(share)
    return tuple(taken)


_PORTION = 16  # rows of one request in a batch, where a device asks for several at once beside other devices
