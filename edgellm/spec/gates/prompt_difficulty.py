"""The corrections that a reply will need, estimated from the words of its prompt.

A budget is best spent on replies that need one correction, and on none that needs four. A chunk's own signals say
little of the chunks after it; the prompt says more. The fit recognises words that the profiled prompts share, so it
helps with similar questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgellm.spec.gates.offload_policy import NAMES, Matrix, Vector
from edgellm.spec.gates.profiler import ObservedChunk, Run
from edgellm.spec.types import Ids

_PENALTY = 1.0  # weight of squared weights
_MIN_PROMPTS = 2  # prompts with a token before the token is weighed
_MAX_TOKENS = 4096  # weighed tokens: the most common ones
_SIGNAL = NAMES.index("prompt difficulty")


@dataclass(frozen=True, slots=True)
class PromptDifficulty:
    """A linear estimate: `usual`, and the sum of `weights` for those of a prompt's tokens that are in `tokens`
    (ascending), divided by the root of the number of its tokens. It stays within `least` and `most`, the bounds over
    the profiled prompts.
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
        known = np.isin(self.tokens, words, assume_unique=True)
        added = float(np.array(self.weights)[known].sum()) / float(np.sqrt(len(words)))
        return min(max(self.usual + added, self.least), self.most)

    def without_words(self) -> PromptDifficulty:
        """Return the same estimate without tokens of prompts: each prompt is as usual."""
        return replace(self, tokens=(), weights=())


USUAL = PromptDifficulty()
"""The estimate of a profile without prompts: the same for all."""


def fit_difficulty(prompts: Sequence[Ids | Sequence[int]], wrong: Vector) -> tuple[PromptDifficulty, Vector]:
    """Fit the numbers of `wrong` chunks (n,) of n replies; return the fit, and for each prompt the prediction of the
    others alone, (n,).

    A ridge regression on the tokens of a prompt. An empty prompt is as usual.
    """
    usual = float(wrong.mean())
    words = [np.unique(np.asarray(prompt, dtype=np.int64)) for prompt in prompts]
    known, counts = np.unique(np.concatenate([np.empty(0, np.int64), *words]), return_counts=True)
    kept = np.sort(np.argsort(-counts, kind="stable")[:_MAX_TOKENS])
    tokens = known[kept][counts[kept] >= _MIN_PROMPTS]
    if not len(tokens):
        return PromptDifficulty(usual, usual, usual), np.full(len(words), usual)
    has: Matrix = np.array([np.isin(tokens, own, assume_unique=True) / np.sqrt(max(1, len(own))) for own in words])
    left, strength, right = np.linalg.svd(has, full_matrices=False)
    shares = strength**2 / (strength**2 + _PENALTY)
    along = left.T @ (wrong - usual)
    fitted, own_share = left @ (shares * along), (left**2) @ shares
    unseen: Vector = usual + (fitted - own_share * (wrong - usual)) / (1.0 - own_share)  # This is leave-one-out.
    weights = right.T @ (strength / (strength**2 + _PENALTY) * along)
    bounds = round(usual, 5), round(float(unseen.min()), 5), round(float(unseen.max()), 5)
    return PromptDifficulty(*bounds, tuple(tokens.tolist()), tuple(np.round(weights, 5).tolist())), unseen


def with_difficulty(runs: Sequence[Run], prompts: Sequence[Ids | Sequence[int]]) -> tuple[PromptDifficulty, list[Run]]:
    """Fit the difficulty of the `prompts` of `runs`; return the fit, and the runs with the signal in their training
    chunks, each as the other prompts predict it. Without prompts it is the same for all."""
    wrong = np.array([sum(not chunk.whole for chunk in run.training_chunks) for run in runs], dtype=np.float64)
    fitted, unseen = fit_difficulty(prompts or [()] * len(runs), wrong)
    return fitted, [_with_signal(run, value) for run, value in zip(runs, unseen.tolist(), strict=True)]


def _with_signal(run: Run, value: float) -> Run:
    def changed(chunk: ObservedChunk) -> ObservedChunk:
        signals = chunk.signals.copy()
        signals[_SIGNAL] = value
        return replace(chunk, signals=signals)

    chunks = tuple(map(changed, run.training_chunks))
    return replace(run, with_lookup=chunks) if run.with_lookup else replace(run, verified=chunks)
