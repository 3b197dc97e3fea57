"""The trouble that a prompt is: the corrections that replies to such prompts needed, by the words in them.

A budget is best spent on replies that need one correction, and on none that needs four. A chunk's own signals say
little of the chunks behind it; the prompt says more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.spec.gates.rejection_model import Matrix, Vector
from edgellm.spec.types import Ids

_PENALTY = 1.0  # weight of squared weights
_SHARED = 2  # prompts that must have a token before it counts
_MOST = 4096  # tokens that are weighed at most: those that most prompts have


@dataclass(frozen=True, slots=True)
class Trouble:
    """A sum of `weights` for those of a prompt's tokens that are among `tokens` (ascending), added to what is `usual`.

    No prompt is rated below `least` or above `most`, the bounds over the prompts that it was fitted on.
    """

    usual: float = 0.0
    least: float = 0.0
    most: float = 0.0
    tokens: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()

    def of(self, prompt: Ids) -> float:
        """Return about how many wrong chunks the draft model's reply to `prompt` (n,) will have."""
        words = np.unique(prompt)
        if not len(words):
            return self.usual
        told = np.isin(self.tokens, words, assume_unique=True)
        added = float(np.array(self.weights)[told].sum()) / float(np.sqrt(len(words)))
        return min(max(self.usual + added, self.least), self.most)


NO_TROUBLE = Trouble()


def fit_trouble(prompts: Sequence[Sequence[int]], wrong: Vector) -> tuple[Trouble, Vector]:
    """Fit the `wrong` chunks (n,) of n replies on tokens; return the fit, and for each prompt what the others alone
    predict.

    Ridge regression on which tokens a prompt has, however many. A prompt without any is rated as usual.
    """
    usual = float(wrong.mean())
    words = [np.unique(prompt) for prompt in prompts]
    known, counts = np.unique(np.concatenate([np.empty(0, np.int64), *words]), return_counts=True)
    kept = np.sort(np.argsort(-counts, kind="stable")[:_MOST])
    tokens = known[kept][counts[kept] >= _SHARED].astype(np.int64)
    if not len(tokens):
        return Trouble(usual, usual, usual), np.full(len(words), usual)
    has: Matrix = np.array([np.isin(tokens, own, assume_unique=True) / np.sqrt(max(1, len(own))) for own in words])
    left, strength, right = np.linalg.svd(has, full_matrices=False)
    shares = strength**2 / (strength**2 + _PENALTY)
    along = left.T @ (wrong - usual)
    said, own_share = left @ (shares * along), (left**2) @ shares
    unseen: Vector = usual + (said - own_share * (wrong - usual)) / (1.0 - own_share)
    weights = right.T @ (strength / (strength**2 + _PENALTY) * along)
    bounds = round(usual, 5), round(float(unseen.min()), 5), round(float(unseen.max()), 5)
    return Trouble(*bounds, tuple(tokens.tolist()), tuple(np.round(weights, 5).tolist())), unseen
