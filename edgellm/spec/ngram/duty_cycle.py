"""When drafts are looked up: where that may pay, and otherwise so rarely that it takes next to no time.

A lookup takes Python's time, some 50 µs, and the text since the last one must be indexed first. That is nothing beside
a decode of a large model, and a tenth of a decode of a tiny one. So tokens are only compared, at first: whether the
last three have stood in the text before. While little is left of the allowance, something is looked up only there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgellm.spec.drafters.allowance import Allowance
from edgellm.spec.ngram.suffix_automaton import ROOT, SuffixAutomaton
from edgellm.spec.types import Ids, TryingCost

LIKELY = 2
"""Places in a row whose last three tokens are known, at which something is looked up in any case: four tokens in a row
hardly ever come again by chance. At the first one, a lookup may make debt."""
_WEIGHT = 0.1  # of the last lookup in what one takes
_MOST = 2.0  # times as much as lookups usually take; longer ones were interrupted
_LOOKUP, _INDEXED = 5e-5, 3e-6  # seconds of a lookup, and of a token that is indexed before it, until they are known
_MIN_INDEXED = 16  # tokens from which on a lookup's time says what a token takes


class DutyCycle:
    """Decides for one reply after another whether a lookup is due, and accounts for its time."""

    def __init__(self, allowance: Allowance, single: Callable[[], float], past: SuffixAutomaton | None = None) -> None:
        """Spend from `allowance`; `single` returns the seconds of a decode of one row. What stands in `past`
        conversations is known, too."""
        self._allowance, self._lookups, self._single, self._past = allowance, allowance.lookups, single, past
        full = allowance.lookups.full
        self._anywhere, self._most_index = 0.5 * full, 0.25 * full
        self._threes: set[int] = set()  # three tokens each, one after another
        self._read = self._last = self._run = 0  # tokens compared, the last two of them, and known places at the end
        self._new = 0  # tokens since the last known place
        self._indexed = self._prompt = 0  # tokens of the text that lookups have indexed, and of the prompt
        self._lookup, self._token = _LOOKUP, _INDEXED
        self.reason = ""
        """Why there was no lookup; "" where there was one."""

    def begin(self, prompt: Ids) -> None:
        """Begin a reply to `prompt` (n,), which is not indexed yet."""
        before = prompt[: max(0, len(prompt) - _END)]
        ids = before.astype(np.int64)
        self._allowance.begin()
        self._threes = set((ids[:-2] << 2 * _BITS | ids[1:-1] << _BITS | ids[2:]).tolist())
        self._read, self._prompt, self._indexed = len(before), len(prompt), 0
        self._last, self._run, self._new = int(ids[-2] << _BITS | ids[-1]) if len(ids) > 1 else 0, 0, 0

    def due(self, text: Ids) -> bool:
        """Return whether to look up what may follow `text` (n,)."""
        if len(text) > self._read:
            self._compare(text[self._read :].tolist())
        run = self._run
        if run < 1 and self._lookups.left <= self._anywhere:
            self.reason = _UNKNOWN
            return False
        waiting = self._read - max(self._indexed, self._prompt)
        index = self._token * max(0, waiting) / self._single()
        if run >= LIKELY:  # however much text there is to index, it may pay
            index = min(index, self._most_index)
        cost = index + self._lookup / self._single()
        due = cost <= self._lookups.limit(min(run, LIKELY))
        self.reason = "" if due else _SPENT
        return due

    @property
    def cost(self) -> TryingCost:
        """Return what trying has cost and saved in this reply."""
        return self._allowance.cost

    @property
    def rest(self) -> int:
        """Return for how many rounds a lookup need not be considered, after none was due: the more, the longer nothing
        has been known."""
        return 0 if self._run else min(_REST + self._new // _LONGER, _MOST_REST)

    @property
    def allowed(self) -> float:
        """Return how many decodes of one row a draft of this round may cost beyond one."""
        return self._allowance.draft

    def wrote(self, tokens: int, loss: float) -> None:
        """Account for a round that wrote `tokens`; its draft has cost `loss` decodes of one row, or saved them."""
        self._allowance.earn(tokens)
        if loss:
            self._allowance.settle(loss)

    def refused(self, loss: float) -> None:
        """Account for a draft that was not allowed, and would have cost `loss` decodes of one row, or saved them."""
        self._allowance.trust(-loss)

    def wrote_with_model(self, tokens: int, seconds: float) -> None:
        """Account for a round with another drafter, which wrote `tokens` in `seconds`."""
        self._allowance.settle_model(tokens, seconds / self._single())

    def _compare(self, tokens: Sequence[int]) -> None:
        threes, past, last, run, new = self._threes, self._past, self._last, self._run, self._new
        for token in tokens:
            three = last << _BITS | token
            known = three in threes
            if not known:
                threes.add(three)
                known = past is not None and _known(past, three)
            run, new = (run + 1, 0) if known else (0, new + 1)
            last = three & _TWO
        self._last, self._run, self._new = last, run, new
        self._read += len(tokens)

    def looked(self, seconds: float) -> None:
        """Account for a lookup of `seconds`, before which the text was indexed."""
        indexed, written = self._read - self._indexed, self._read - max(self._indexed, self._prompt)
        self._indexed = self._read
        seconds = min(seconds, _MOST * (self._lookup + self._token * indexed))
        if indexed < _MIN_INDEXED:
            self._lookup += _WEIGHT * (seconds - self._lookup)
        else:
            self._token += _WEIGHT * (max(0.0, seconds - self._lookup) / indexed - self._token)
            seconds = min(seconds, self._lookup + self._token * max(0, written))
        self._allowance.spend_lookup(seconds / self._single(), self._anywhere)


def _known(past: SuffixAutomaton, three: int) -> bool:
    """Return whether these three tokens have followed one another."""
    state = past.step(ROOT, three >> 2 * _BITS)
    if state >= 0:
        state = past.step(state, three >> _BITS & _ONE)
    return state >= 0 and past.step(state, three & _ONE) >= 0


_REST, _MOST_REST = 2, 5  # rounds: as long as nothing is known, three to six tokens are compared at a time
_LONGER = 16  # tokens, after which it is one more
_END = 4  # tokens of the prompt that are compared like those of a reply
_BITS = 21  # of a token: three fit into a machine's word
_ONE, _TWO = (1 << _BITS) - 1, (1 << 2 * _BITS) - 1
_UNKNOWN = "no lookup: the last three tokens are new, and earlier lookups have not paid"
_SPENT = "no lookup: earlier ones have not paid"
