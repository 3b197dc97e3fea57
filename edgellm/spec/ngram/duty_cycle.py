"""When drafts are looked up: where that may pay, and otherwise so rarely that it takes next to no time.

A lookup takes Python's time, some 50 µs, and the text since the last one must be indexed first. That is nothing beside
a decode of a large model, and a tenth of a decode of a tiny one. So tokens are only compared, at first: whether each
pair of them has stood in the text before. How long a run of known pairs must be for a lookup depends on what is left of
the allowance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgellm.spec.drafters.allowance import FULL, Allowance
from edgellm.spec.ngram.suffix_automaton import ROOT, SuffixAutomaton
from edgellm.spec.types import Ids

LIKELY = 3
"""Known pairs in a row, with which a lookup is likely to pay: it may make debt."""
_WEIGHT = 0.1  # of the last lookup in what one takes
_MOST = 4.0  # times as much as lookups usually take; longer ones were interrupted
_LOOKUP, _INDEXED = 5e-5, 3e-6  # seconds of a lookup, and of a token that is indexed before it, until they are known
_MIN_INDEXED = 16  # tokens from which on a lookup's time says what a token takes


class DutyCycle:
    """Decides for one reply after another whether a lookup is due, and accounts for its time."""

    def __init__(self, allowance: Allowance, single: Callable[[], float], past: SuffixAutomaton | None = None) -> None:
        """Spend from `allowance`; `single` returns the seconds of a decode of one row. Pairs of tokens of `past`
        conversations count as known."""
        self._allowance, self._single, self._past = allowance, single, past
        self._pairs: set[int] = set()
        self._read = self._last = self._run = 0  # tokens compared, the last of them, and known pairs at the end
        self._indexed = 0  # tokens of the text that lookups have indexed
        self._lookup, self._token = _LOOKUP, _INDEXED
        self.reason = ""
        """Why there was no lookup; "" where there was one."""

    def begin(self, prompt: Ids) -> None:
        """Begin a reply to `prompt` (n,), which is not indexed yet."""
        before = prompt[: max(0, len(prompt) - LIKELY)]
        self._pairs = set((before[:-1].astype(np.int64) << _BITS | before[1:]).tolist())
        self._read, self._indexed = len(before), 0
        self._last, self._run = int(before[-1]) if len(before) else -1, 0

    def due(self, text: Ids) -> bool:
        """Return whether to look up what may follow `text` (n,)."""
        if len(text) > self._read:
            self._compare(text[self._read :].tolist())
        run, left = self._run, self._allowance.left
        if run < LIKELY and left <= _ALWAYS and (run < 1 or left <= 0.0):
            self.reason = _UNKNOWN if run < 1 else _SPENT
            return False
        index = self._token * (self._read - self._indexed) / self._single()
        if run > 1:  # three tokens in a row are known: however much text there is to index, it may pay
            index = min(index, _MOST_INDEX)
        cost = index + self._lookup / self._single()
        due = cost <= self._allowance.limit(run >= LIKELY)
        self.reason = "" if due else _SPENT
        return due

    @property
    def allowed(self) -> float:
        """Return how many decodes of one row a draft of this round may cost beyond one."""
        return self._allowance.limit(self._run >= LIKELY)

    def wrote(self, tokens: int, loss: float) -> None:
        """Account for a round that wrote `tokens`; its draft has cost `loss` decodes of one row, or saved them."""
        self._allowance.earn(tokens)
        if loss:
            self._allowance.spend(loss)

    def saved(self, tokens: int, seconds: float) -> None:
        """Account for a round with another drafter, which wrote `tokens` in `seconds`: for what it has saved. What it
        costs must not keep copies from being looked up."""
        self._allowance.spend(min(0.0, seconds / self._single() - tokens))

    def _compare(self, tokens: Sequence[int]) -> None:
        pairs, past, last, run = self._pairs, self._past, self._last, self._run
        for token in tokens:
            pair = last << _BITS | token
            if pair in pairs:
                run += 1
            else:
                pairs.add(pair)
                run = run + 1 if past is not None and _known(past, last, token) else 0
            last = token
        self._last, self._run = last, run
        self._read += len(tokens)

    def looked(self, seconds: float) -> None:
        """Account for a lookup of `seconds`, before which the text was indexed."""
        indexed, self._indexed = self._read - self._indexed, self._read
        seconds = min(seconds, _MOST * (self._lookup + self._token * indexed))
        if indexed < _MIN_INDEXED:
            self._lookup += _WEIGHT * (seconds - self._lookup)
        else:
            self._token += _WEIGHT * (max(0.0, seconds - self._lookup) / indexed - self._token)
        single = self._single()
        index = self._token * indexed / single
        self._allowance.spend(seconds / single - max(0.0, index - FULL))


def _known(past: SuffixAutomaton, before: int, token: int) -> bool:
    """Return whether `token` has followed `before`."""
    state = past.step(ROOT, before)
    return state >= 0 and past.step(state, token) >= 0


_BITS = 32
_MOST_INDEX = 0.5 * FULL  # that must be left for indexing
_ALWAYS = 0.5 * FULL  # left, above which a lookup needs no known pair
_UNKNOWN = "no lookup: the last two tokens are new, and earlier lookups have not paid"
_SPENT = "no lookup: earlier ones have not paid"
