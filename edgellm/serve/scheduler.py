"""What the verifier computes next: a pure choice over the requests that wait (Synera, section 4.5, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum


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

    `since` is the number of prefill batches that had been computed when it came, or was last served.
    """

    session: int
    unseen: int
    drafted: int
    since: int = 0

    @property
    def rows(self) -> int:
        return self.unseen + self.drafted


@dataclass(frozen=True, slots=True)
class Share:
    """The next `tokens` of one session's request; with `outputs` of them, the last ones, as rows of logits."""

    session: int
    tokens: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One pass of the model, over one or more sessions."""

    kind: Kind
    shares: tuple[Share, ...]


def next_batch(wants: Iterable[Want], limits: Limits, prefills: int, alone: bool = False) -> Batch | None:
    """The next batch over `wants` (least recently served first), when `prefills` prefill batches have been computed.
    `alone`: there is no session but the one that wants something.

    Prefill goes first, as in the paper; but not where one has gone ahead of a waiting verification already. So a
    verification waits behind one prefill batch, of `limits.ahead` chunks; and a prefill waits until the verifications
    that the last one went ahead of are done, and no longer. None where nobody wants anything.
    """
    step = min(limits.alone, limits.rows) if alone else limits.chunk
    prefill: list[Want] = []
    verify: list[Want] = []
    for want in wants:
        (prefill if want.unseen > step else verify).append(want)
    verify.sort(key=_since)
    if prefill and not (verify and verify[0].since < prefills):
        pieces = [Share(want.session, step, 0) for want in prefill]
        return Batch(Kind.PREFILL, _fitting(pieces, min(limits.rows, limits.ahead * limits.chunk)))
    if verify:
        rows = verify[0].rows
        alike = [want for want in verify if want.rows == rows] if limits.even else verify
        whole = [Share(want.session, want.rows, want.drafted + 1) for want in alike]
        return Batch(Kind.VERIFY, _fitting(whole, limits.rows))
    return None


def _since(want: Want) -> int:
    return want.since


def _fitting(shares: list[Share], rows: int) -> tuple[Share, ...]:
    """As many of `shares` as fit in `rows`, in their order; the first one always."""
    taken = 0
    for share in shares:
        rows -= share.tokens
        if taken and rows < 0:
            break
        taken += 1
    return tuple(shares[:taken])
