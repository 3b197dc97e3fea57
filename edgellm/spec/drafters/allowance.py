"""How much trying may cost: lookups, and drafts that turn out to be wrong."""

from __future__ import annotations

SHARE = 0.002
"""Share of the time of plain decoding that goes into trying where nothing is ever accepted."""
WINDOW = 256
"""Tokens over which trying costs at most a hundredth of the time."""
FULL = SHARE * WINDOW
"""What may be spent at once, in decodes of one row, where nothing is accepted. What is likely to pay may make as much
debt."""
FIRST = 2.5 * FULL
"""What may be spent before anything is known."""
MOST_SAVED = 16.0
"""What accepted drafts have saved, and may be spent on further ones, at most, in decodes of one row."""
_MOST_DEBT = 1.5 * FULL  # more than is allowed at once is forgiven: a disturbance must not end all trying
_KEPT = 1.0 - 1.0 / 64.0  # of what was saved, per token


class Allowance:
    """An account of what trying has cost, in the time of decodes of one row: a token bucket.

    Every written token adds `SHARE`, and a lookup or a draft takes what it has cost beyond plain decoding. Accepted
    drafts add what they have saved, which fades. So over any `WINDOW` tokens in which nothing is accepted, and nothing
    was saved before, trying costs at most `FIRST`, `FULL` in debt, and `SHARE` of the time: less than a hundredth.
    """

    def __init__(self) -> None:
        self.left = FIRST
        """What may be spent now; negative after debt."""

    def earn(self, tokens: int) -> None:
        """Add what `tokens` written tokens allow."""
        if self.left > FULL:
            self.left = FULL + (self.left - FULL) * _KEPT**tokens
        else:
            self.left = min(FULL, self.left + SHARE * tokens)

    def spend(self, decodes: float) -> None:
        """Take what has been spent; what was saved if it is negative."""
        self.left = max(-_MOST_DEBT, min(MOST_SAVED, self.left - decodes))

    def limit(self, likely: bool) -> float:
        """Return how much may be spent at once; `likely`: on what is likely to pay."""
        return self.left + FULL if likely else self.left
