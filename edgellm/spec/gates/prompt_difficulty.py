"""The corrections that a reply will need, estimated from the words of its prompt.

A budget is best spent on replies that need one correction, and on none that needs four. A chunk's own signals say
little of the chunks after it; the prompt says more. The fit recognises words that the profiled prompts share, so it
helps with similar questions.
"""

from collections.abc import Sequence

import numpy as np

from edgellm.spec.gates.profile import Matrix, Vector, WordWeights
from edgellm.spec.types import Ids

_MAX_TOKENS = 4096  # weighed tokens: the most common ones


def difficulty_of(fitted: WordWeights, prompt: Ids) -> float:
    """Return about how many wrong chunks the draft model's reply to `prompt` (n,) will have."""
    words = np.unique(prompt)
    known = np.isin(fitted.tokens, words, assume_unique=True)
    added = float(np.array(fitted.weights)[known].sum()) / max(1.0, float(np.sqrt(len(words))))
    return min(max(fitted.usual + added, fitted.least), fitted.most)


def fit_difficulty(prompts: Sequence[Ids | Sequence[int]], wrong: Vector) -> tuple[WordWeights, Vector]:
    """Fit the numbers of `wrong` chunks (n,) of n replies; return the fit, and for each prompt the prediction of the
    others alone, (n,).

    A ridge regression on the tokens of a prompt. An empty prompt is as usual.
    """
    usual = float(wrong.mean())
    words = [np.unique(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
    known, counts = np.unique(np.concatenate([np.empty(0, np.int64), *words]), return_counts=True)
    kept = np.sort(np.argsort(-counts, kind="stable")[:_MAX_TOKENS])
    tokens = known[kept][counts[kept] > 1]  # A token of one prompt says nothing of others.
    if not len(tokens):
        return WordWeights(usual, usual, usual), np.full(len(words), usual)
    has: Matrix = np.array([np.isin(tokens, own, assume_unique=True) / np.sqrt(max(1, len(own))) for own in words])
    left, strength, right = np.linalg.svd(has, full_matrices=False)
    penalised = strength**2 + 1.0
    shares = strength**2 / penalised
    along = left.T @ (wrong - usual)
    fitted, own_share = left @ (shares * along), (left**2) @ shares
    unseen: Vector = usual + (fitted - own_share * (wrong - usual)) / (1.0 - own_share)  # This is leave-one-out.
    weights = right.T @ (strength / penalised * along)
    bounds = round(usual, 5), round(float(unseen.min()), 5), round(float(unseen.max()), 5)
    return WordWeights(*bounds, tuple(tokens.tolist()), tuple(np.round(weights, 5).tolist())), unseen
