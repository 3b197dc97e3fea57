"""A grammar that a reply must follow, applied to distributions and drafts.

Temperature and truncation come first, and the grammar removes what it forbids of the tokens that are left; where it
forbids all of them, the most probable token that it allows is certain. So a few dozen tokens are looked at instead of
the whole vocabulary, and no token comes back that truncation had removed while another one is allowed. The rule depends
on nothing but the text before, so verifying drafts by it gives what the verifier writes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from edgellm.errors import EngineFailed
from edgellm.spec.types import Constraint, Distribution, Floats, Ids

_FIRST, _WIDER = 64, 16  # tokens that are looked at first where all others are forbidden, and how many times more then


class GrammarState(Protocol):
    """The part of `edgellm.engine.grammar.Grammar` that is used."""

    def allowed(self, text: Ids, candidates: Ids) -> npt.NDArray[np.bool_]: ...


class ReplyGrammar:
    """The grammar of one reply, for one of those who choose its tokens: it keeps their place in it."""

    @classmethod
    def of(cls, constraint: Constraint | None, compile_schema: Callable[[str], GrammarState] | None) -> Self | None:
        """Return the grammar of a reply with `constraint`, by a function that returns that of a JSON schema; None
        without one of the two."""
        if constraint is None or compile_schema is None:
            return None
        return cls(compile_schema(constraint.schema), constraint)

    def __init__(self, grammar: GrammarState, constraint: Constraint) -> None:
        self._grammar, self._start = grammar, constraint.start
        self._after = np.array(constraint.after, dtype=np.int32)

    def limited(self, distribution: Distribution, logits: Floats, text: Ids) -> Distribution:
        """Return what is left of a `distribution` made of `logits` (n_vocab,), which follow `text` (n,)."""
        left = self.kept(distribution, text)
        if left is not None:
            return left
        return Distribution(self.likeliest(logits, text)[:1], np.ones(1, dtype=np.float32))

    def kept(self, distribution: Distribution, text: Ids) -> Distribution | None:
        """Return what is left of a `distribution` behind `text` (n,); None where that is nothing."""
        if (reply := self._constrained(text)) is None:
            return distribution
        kept = self._grammar.allowed(reply, distribution.ids)
        if kept.all():
            return distribution
        if not kept.any():
            return None
        probs = distribution.probs[kept]
        return Distribution(distribution.ids[kept], probs / np.float32(probs.sum(dtype=np.float64)))

    def allowed(self, candidates: Ids, text: Ids) -> Ids:
        """Return those of the `candidates` (k,) that may follow `text` (n,)."""
        reply = self._constrained(text)
        return candidates if reply is None else candidates[self._grammar.allowed(reply, candidates)]

    def likeliest(self, logits: Floats, text: Ids) -> Ids:
        """Return the most probable tokens that may follow `text`, the likeliest first, of equal ones the lower id."""
        reply, most = self._constrained(text), _FIRST
        while True:
            n = min(most, len(logits))
            least = logits.min() if n == len(logits) else np.partition(logits, len(logits) - n)[len(logits) - n]
            # all that equal the least one, so that the choice does not depend on the machine
            ids: Ids = np.flatnonzero(logits >= least).astype(np.int32)
            allowed: Ids = ids if reply is None else ids[self._grammar.allowed(reply, ids)]
            if len(allowed):
                order = np.lexsort((allowed, -logits[allowed]))
                return allowed[order]
            if n == len(logits):
                raise EngineFailed("No token of the vocabulary continues the reply.", "Use another JSON schema.")
            most *= _WIDER

    def follows(self, text: Ids, drafted: Ids) -> int:
        """Return how many of the `drafted` tokens (k,) may follow `text`, one after the other."""
        for n in range(len(drafted)):
            reply = self._constrained(np.concatenate((text, drafted[:n])))
            if reply is not None and not self._grammar.allowed(reply, drafted[n : n + 1])[0]:
                return n
        return len(drafted)

    def _constrained(self, text: Ids) -> Ids | None:
        """Return the part of `text` that the grammar is about; None where that has not begun."""
        reply, n = text[self._start :], len(self._after)
        if not n:
            return reply
        if len(reply) < n:
            return None
        found = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(reply, n) == self._after).all(axis=1))
        return reply[found[0] + n :] if len(found) else None
