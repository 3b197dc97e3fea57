"""How much trying may cost: lookups, and drafts that turn out to be wrong."""

from __future__ import annotations

from math import inf

from edgellm.spec.types import TryingCost

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
        self._of_lookups = self._of_copies = self._of_model = self._saved = 0.0

    def begin(self) -> None:
        """Begin the account of a reply."""
        self._of_lookups = self._of_copies = self._of_model = self._saved = 0.0

    @property
    def cost(self) -> TryingCost:
        """Return what trying has cost and saved in this reply, allowed or not."""
        return TryingCost(self._of_lookups, self._of_copies, self._of_model, self._saved)

    def earn(self, tokens: int) -> None:
        """Add what `tokens` written tokens allow."""
        self.lookups.earn(tokens)
        self.drafts.earn(tokens)

    def spend_lookup(self, decodes: float, most: float = inf) -> None:
        """Account for a lookup that has taken the time of so many decodes of one row; it is paid for by `most` at most,
        as it may have been interrupted."""
        self._of_lookups += decodes
        self.lookups.spend(min(decodes, most))

    def settle(self, loss: float) -> None:
        """Account for a copy that has cost `loss` decodes of one row; negative: that has saved them."""
        if loss > 0.0:
            self._of_copies += loss
            self.drafts.spend(min(loss, _MOST_LOSS))
        else:
            self._saved -= loss
            self.trust(-loss)

    def settle_model(self, tokens: int, decodes: float) -> None:
        """Account for a round with another drafter, which wrote `tokens` in the time of so many `decodes`. What it
        costs does not keep copies from being looked up."""
        if decodes > tokens:
            self._of_model += decodes - tokens
        elif tokens > 1:  # one token took less time by chance
            self._saved += tokens - decodes
            self.trust(tokens - decodes)

    def trust(self, saved: float) -> None:
        """Give credit for what a draft has `saved`, or would have if it had been allowed."""
        if saved > 0.0:
            self.drafts.credit(saved)
            self.lookups.credit(saved)

    @property
    def draft(self) -> float:
        """Return how much a draft may cost: half of what is left, so that a few wrong ones do not end what pays."""
        left = self.drafts.left
        return max(0.5 * left, min(LEAST, left))
