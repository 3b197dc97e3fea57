"""The verification rule: which drafted tokens are accepted, and which token follows them.

Drafter-invariant speculative sampling (Daliri et al. 2024): draft model and verifier draw by the same random numbers,
and a draft is accepted where it equals the verifier's own draw. Unlike rejection sampling (Leviathan et al. 2023, Chen
et al. 2023), this leaves a sampled text as the verifier writes it alone, accepts copies as well as drawn tokens, and
needs no distribution of the drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from edgellm.engine import LazyLogits, Rows, in_blocks
from edgellm.errors import EngineFailed
from edgellm.spec.sampling import distribution, draw, penalised
from edgellm.spec.types import NO_IDS, Chunk, Constraint, Distribution, Floats, Ids, Sampling

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


def judge(
    draft: Ids, rows: Rows, sampling: Sampling, position: int, text: Ids = NO_IDS, grammar: ReplyGrammar | None = None
) -> tuple[int, int]:
    """Return the number of accepted tokens of the `draft` (n,), and the verifier's own token after them.

    A draft is accepted while each token is the verifier's own: its most probable token, or its draw at that position
    after penalties, temperature, truncation and grammar. So the text is what the verifier writes alone,
    whatever is drafted. `rows` (n + 1, n_vocab) are the verifier's logits: row i predicts place i of the draft, the
    last row the token after it. `position` is the number of tokens before the draft; `text` (position,) are these
    tokens, for penalties and the `grammar`, which at each place also see the drafted tokens before it.
    """
    if sampling.greedy and sampling.penalties is None and grammar is None:
        return verify_greedy(draft, rows)

    def own_at(place: int) -> int:
        row, before = rows[place], np.concatenate((text, draft[:place]))
        if sampling.penalties is not None:
            row = penalised(row, before, sampling.penalties)
        found = distribution(row, sampling)
        if grammar is not None:
            found = grammar.limited(found, row, before)
        return draw(found, sampling.seed, position + place)

    for place, drafted in enumerate(draft.tolist()):
        if (own := own_at(place)) != drafted:
            return place, own
    return len(draft), own_at(len(draft))


def verify_greedy(draft_ids: Ids, rows: Rows) -> tuple[int, int]:
    """Accept the drafts (n,) while each is the most probable token of its row; `rows` is (n + 1, n_vocab)."""
    drafted = draft_ids.tolist()
    accepted = 0
    for block in in_blocks(rows):
        for row, answer in enumerate(block.argmax(axis=1).tolist()):
            if accepted < len(drafted) and drafted[accepted] == answer:
                accepted += 1
                continue
            if not np.isfinite(block[row, answer]):
                raise EngineFailed(
                    "The verifier's output is not a number.", "Its file may be damaged: download it again."
                )
            return accepted, answer
    raise ValueError("there is no row after the drafts")


LIKELY = 0.1
"""The threshold of equation 3 of CoordGen: a rejected token of this probability may still come."""


def plausible(chunk: Chunk, rows: Rows, accepted: int) -> tuple[bool, ...]:
    """Return which tokens of `chunk` have at least probability `LIKELY` in their row of `rows` (len(chunk) or more,
    n_vocab).

    Accepted tokens count as plausible, whatever their probability; so do tokens whose row was not computed. Only tokens
    within that factor of the row's maximum can qualify, so only they need a sum over the vocabulary.
    """
    n = len(chunk)
    if isinstance(rows, LazyLogits):
        n, rows = min(n, rows.known), rows.upto(rows.known)
    found = [True] * accepted + [False] * (n - accepted) + [True] * (len(chunk) - n)
    if accepted == n:
        return tuple(found)
    left = rows[accepted:n]
    own = left[np.arange(n - accepted), chunk.ids[accepted:n]]
    best = left.max(axis=1)
    for at in np.flatnonzero(own - best >= np.log(LIKELY)).tolist():
        found[accepted + at] = bool(np.exp(own[at] - best[at]) >= LIKELY * np.exp(left[at] - best[at]).sum())
    return tuple(found)
