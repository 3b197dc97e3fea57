"""How much trying may cost: lookups, and drafts that turn out to be wrong."""

from __future__ import annotations

WINDOW = 256
"""Tokens over which trying costs at most a hundredth of the time, where nothing is right."""
CREDIT = 8.0
"""What may be spent after a draft that was right, at least, in decodes of one row."""
MOST_SAVED = 16.0
"""What drafts have saved, and may be spent on further ones, at most."""
LEAST = 0.5
"""A draft may always cost this, if so much is left: two or three tokens, which show whether more will pay."""
_MOST_LOSS = 2.0  # that is believed: it is estimated by a curve, which may be wrong
_KEPT = 1.0 - 1.0 / 64.0  # of a credit, per token


class Bucket:
    """A token bucket, in the time of decodes of one row: every written token adds `share`, up to `full`."""

    def __init__(self, share: float, full: float, debt: float, first: float) -> None:
        """Start with `first`. What is likely to pay may make a `debt` of so much."""
        self._share, self.full, self._debt = share, full, debt
        self.left = first
        """What may be spent now; negative after debt."""

    def earn(self, tokens: int) -> None:
        """Add what `tokens` written tokens allow; what is left of a credit fades."""
        if self.left > self.full:
            self.left = self.full + (self.left - self.full) * _KEPT**tokens
        else:
            self.left = min(self.full, self.left + self._share * tokens)

    def spend(self, decodes: float) -> None:
        """Take what has been spent. More debt than is allowed is forgiven: a disturbance must not end all trying."""
        self.left = max(-self._debt, self.left - decodes)

    def credit(self, saved: float) -> None:
        """Add what a draft has `saved`; as drafts are right, there is a credit for more of them."""
        self.left = min(MOST_SAVED, max(self.left, 0.0) + saved)
        self.left = max(CREDIT, self.left)

    def limit(self, debts: int = 0) -> float:
        """Return how much may be spent at once, with so many `debts`: the more, the likelier it is to pay."""
        return self.left + debts * self._debt


class Allowance:
    """An account of what trying has cost, kept from reply to reply.

    Lookups and drafts are paid for out of a bucket each, so that wrong drafts do not end the lookups by which right
    ones are found. Where nothing is right, any `WINDOW` tokens cost at most what the buckets hold, the debt, and what
    is added meanwhile: less than a hundredth of the time. A draft that was right, or that would have been, gives
    credit: then the estimates by which drafts are chosen are trusted, which are made to gain.
    """

    def __init__(self) -> None:
        self.lookups = Bucket(0.001, full=0.3, debt=0.15, first=0.8)
        self.drafts = Bucket(0.0015, full=0.8, debt=0.0, first=0.8)

    def earn(self, tokens: int) -> None:
        """Add what `tokens` written tokens allow."""
        self.lookups.earn(tokens)
        self.drafts.earn(tokens)

    def settle(self, loss: float) -> None:
        """Account for a draft that has cost `loss` decodes of one row; negative: that has saved them."""
        if loss > 0.0:
            self.drafts.spend(min(loss, _MOST_LOSS))
        elif loss < 0.0:
            self.drafts.credit(-loss)
            self.lookups.credit(-loss)

    @property
    def draft(self) -> float:
        """Return how much a draft may cost: half of what is left, so that a few wrong ones do not end what pays."""
        left = self.drafts.left
        return max(0.5 * left, min(LEAST, left))
