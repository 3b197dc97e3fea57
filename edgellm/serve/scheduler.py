"""What the verifier computes next: a pure choice over the requests that wait (Synera, section 4.5, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """Prefill and verification never share a batch: their row counts differ too much."""

    PREFILL = "prefill"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class Limits:
    """`rows` of one batch at most; a prefill advances by `chunk` tokens at a time (Synera: 32).

    A request that has no more than `chunk` unseen tokens needs no prefill: they join its verification.
    """

    rows: int = 512
    chunk: int = 32


@dataclass(frozen=True, slots=True)
class Want:
    """What one request needs: `unseen` tokens (at least 1) before its `drafted` ones are to be decoded."""

    session: int
    unseen: int
    drafted: int


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


def next_batch(wants: Sequence[Want], limits: Limits, after: Kind | None) -> Batch | None:
    """The next batch over `wants` (oldest first), behind a batch of kind `after`; None where nobody wants anything.

    Prefill goes first, as in the paper; but behind a prefill waiting verifications have their turn, so that none
    waits behind more than one chunk of it.
    """
    prefills = [want for want in wants if want.unseen > limits.chunk]
    verifies = [want for want in wants if want.unseen <= limits.chunk]
    if prefills and not (verifies and after is Kind.PREFILL):
        pieces = [Share(want.session, limits.chunk, 0) for want in prefills]
        return Batch(Kind.PREFILL, _fitting(pieces, limits.rows))
    if verifies:
        whole = [Share(want.session, want.unseen + want.drafted, want.drafted + 1) for want in verifies]
        return Batch(Kind.VERIFY, _fitting(whole, limits.rows))
    return None


def _fitting(shares: Sequence[Share], rows: int) -> tuple[Share, ...]:
    """As many of `shares` as fit in `rows`, oldest first; the first one always."""
    taken: list[Share] = []
    left = rows
    for share in shares:
        if taken and share.tokens > left:
            break
        taken.append(share)
        left -= share.tokens
    return tuple(taken)
