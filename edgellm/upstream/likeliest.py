"""A sampling rule applied to the likeliest tokens of a row, which are all that a stock server tells of it.

Penalties move tokens, and a grammar removes them. As long as what is left stands above the least likely token that is
known, no unknown one could take its place, and the outcome is that of the whole row. Otherwise the row is undecided,
and the server is asked for that one token again, steered.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.sampling import distribution
from edgellm.spec.types import Distribution, Ids, Penalties, Sampling
from edgellm.upstream.rows import RowsUnusable, Steering, Top

MOST_BIAS = 100.0
"""What servers add to a logit at most, and subtract."""


class Undecided(Exception):
    """The likeliest tokens of a row do not decide what comes next. A server that follows `steering` does, by the rule
    `sampling`; None: it cannot be asked so, either."""

    def __init__(self, steering: Steering | None, sampling: Sampling) -> None:
        super().__init__()
        self.steering, self.sampling = steering, sampling


def distribution_of_top(
    top: Top, sampling: Sampling, n_vocab: int, text: Ids, grammar: ReplyGrammar | None = None
) -> Distribution:
    """Return what `spec.verification` draws from behind `text` (n,) for a whole row of `n_vocab` logits, from its
    likeliest tokens.

    Raises:
        Undecided: they do not decide it.
        RowsUnusable: they are fewer than `sampling.top_k`.
    """
    if not sampling.greedy and not 0 < sampling.top_k <= len(top):
        raise RowsUnusable(f"{len(top)} likeliest tokens, and top_k is {sampling.top_k}")
    ordered = sorted(top)
    ids = np.array([token for token, _ in ordered], dtype=np.int32)
    values = np.array([logprob for _, logprob in ordered], dtype=np.float32)
    bias: dict[int, float] = {}
    if sampling.penalties is not None:
        bias = added(sampling.penalties, text)
        known = set(ids.tolist())
        floor = float(values.min()) + max([0.0, *(amount for token, amount in bias.items() if token not in known)])
        values = values + np.array([bias.get(token, 0.0) for token in ids.tolist()], dtype=np.float32)
        certain = values >= (floor if len(ids) < n_vocab else -inf)
        ids, values = ids[certain], values[certain]
        if len(ids) < (1 if sampling.greedy else sampling.top_k):
            raise _penalised_too_far(bias, sampling, text, n_vocab, grammar)
    found = distribution(values, sampling)
    found = Distribution(ids[found.ids], found.probs)
    if grammar is None:
        return found
    left = grammar.kept(found, text)
    if left is not None:
        return left
    allowed = np.isin(ids, grammar.allowed(ids, text))
    if not allowed.any():
        among = grammar.allowed(np.arange(n_vocab, dtype=np.int32), text)
        raise Undecided(_steering(bias, among), replace(sampling, temperature=0.0))
    best = np.where(allowed, values, -inf).argmax()
    return Distribution(ids[best : best + 1], np.ones(1, dtype=np.float32))


def added(penalties: Penalties, text: Ids) -> dict[int, float]:
    """Return what `penalties` add to the logits behind `text` (n,), by token. The repeat penalty is none of them: it
    divides logits, which no server tells."""
    found = dict(penalties.bias)
    if penalties.frequency or penalties.presence:
        seen, times = np.unique(text[penalties.start :], return_counts=True)
        for token, count in zip(seen.tolist(), times.tolist(), strict=True):
            found[token] = found.get(token, 0.0) - count * penalties.frequency - penalties.presence
    return found


def _penalised_too_far(
    bias: dict[int, float], sampling: Sampling, text: Ids, n_vocab: int, grammar: ReplyGrammar | None
) -> Undecided:
    among = None if grammar is None else grammar.allowed(np.arange(n_vocab, dtype=np.int32), text)
    if among is not None and not sampling.greedy and len(among) < n_vocab:  # it would draw by another rule
        return Undecided(None, sampling)
    return Undecided(_steering(bias, among), sampling)


def _steering(bias: dict[int, float], among: Ids | None) -> Steering | None:
    if any(abs(amount) > MOST_BIAS for amount in bias.values()):
        return None
    return Steering(tuple(sorted(bias.items())), None if among is None else tuple(among.tolist()))
