"""A grammar that a reply must follow, applied to distributions and drafts.

Temperature and truncation come first, and the grammar removes forbidden tokens from the rest; if it forbids all of
them, its most probable allowed token is certain. So no token comes back that truncation had removed while another token
is allowed. The rule depends on the text before alone, so verifying drafts by it gives the verifier's own text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from edgellm.errors import EngineFailed
from edgellm.spec.types import Constraint, Distribution, Floats, Ids

_LEAST = np.float32(-1e30)  # an allowed token's logit: some rows lack tokens of another vocabulary


class GrammarState(Protocol):
    """The part of `edgellm.engine.grammar.Grammar` that is used."""

    def mask(self, text: Ids) -> npt.NDArray[np.bool_]: ...


class ReplyGrammar:
    """The grammar of one reply, and the position in it of one drafter or verifier."""

    @classmethod
    def of(cls, constraint: Constraint | None, compile_schema: Callable[[str], GrammarState] | None) -> Self | None:
        """Return the grammar of a reply with `constraint`; `compile_schema` compiles its JSON schema. None if either is
        None."""
        if constraint is None or compile_schema is None:
            return None
        return cls(compile_schema(constraint.schema), constraint)

    def __init__(self, grammar: GrammarState, constraint: Constraint) -> None:
        self._grammar, self._start = grammar, constraint.start
        self._after = np.array(constraint.after, dtype=np.int32)

    def limited(self, distribution: Distribution, logits: Floats, text: Ids) -> Distribution:
        """Return the allowed part of a `distribution` made of `logits` (n_vocab,), which follow `text` (n,)."""
        left = self.kept(distribution, text)
        if left is not None:
            return left
        best = int(self.masked(logits, text).argmax())
        return Distribution(np.array([best], dtype=np.int32), np.ones(1, dtype=np.float32))

    def kept(self, distribution: Distribution, text: Ids) -> Distribution | None:
        """Return the allowed part of a `distribution` behind `text` (n,); None if it is empty."""
        if (mask := self._mask(text)) is None or (kept := mask[distribution.ids]).all():
            return distribution
        if not kept.any():
            return None
        probs = distribution.probs[kept]
        return Distribution(distribution.ids[kept], probs / np.float32(probs.sum(dtype=np.float64)))

    def allowed(self, candidates: Ids, text: Ids) -> Ids:
        """Return those of the `candidates` (k,) that may follow `text` (n,)."""
        mask = self._mask(text)
        return candidates if mask is None else candidates[mask[candidates]]

    def masked(self, logits: Floats, text: Ids) -> Floats:
        """Return `logits` (n_vocab,), which follow `text`, with those of forbidden tokens at minus infinity."""
        if (mask := self._mask(text)) is None:
            return logits
        if not (allowed := mask[: len(logits)]).any():
            raise EngineFailed("No token of the vocabulary continues the reply.", "Use another JSON schema.")
        return np.where(allowed, np.maximum(logits, _LEAST), np.float32(-np.inf))

    def follows(self, text: Ids, drafted: Ids) -> int:
        """Return how many of the `drafted` tokens (k,) may follow `text`, one after the other."""
        whole = np.concatenate((text, drafted))
        for n, token in enumerate(drafted.tolist()):
            if (mask := self._mask(whole[: len(text) + n])) is not None and not mask[token]:
                return n
        return len(drafted)

    def prepare(self, text: Ids, drafted: Ids) -> None:
        """Compute in advance the masks that a verdict on `drafted` (k,) behind `text` needs."""
        if self.follows(text, drafted) == len(drafted):
            self._mask(np.concatenate((text, drafted)))

    def _mask(self, text: Ids) -> npt.NDArray[np.bool_] | None:
        """Return which tokens may follow `text`; None where the grammar has not begun."""
        reply, n = text[self._start :], len(self._after)
        if not n:
            return self._grammar.mask(reply)
        if len(reply) < n:
            return None
        found = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(reply, n) == self._after).all(axis=1))
        return self._grammar.mask(reply[found[0] + n :]) if len(found) else None
