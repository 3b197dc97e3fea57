"""Guesses at where a chunk will be rejected, and at the token there instead, for parallel inference (Synera, 4.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engine import top_k
from edgellm.spec.drafters.acceptance import Probabilities
from edgellm.spec.types import Floats, Ids


@dataclass(frozen=True, slots=True)
class PredictedVerdict:
    """A guess that the verdict accepts `accepted` tokens of the chunk, and that its own token behind them is `token`.

    `probability` is how likely both are together, as the guesser sees it.
    """

    accepted: int
    token: int
    probability: float


@dataclass(slots=True)
class PredictionStats:
    """The quality of the guesses: `hits` of `tries`, and seconds of waiting spent on drafts that were taken over."""

    tries: int = 0
    hits: int = 0
    hidden_seconds: float = 0.0

    def tried(self, hit: bool, seconds: float) -> None:
        """Count a verdict that has come, and whether one of the guesses followed for `seconds` hit it."""
        self.tries += 1
        self.hits += hit
        self.hidden_seconds += seconds if hit else 0.0


def rejection(confidence: Sequence[float] | Floats, alpha: float) -> Probabilities:
    """Return the chances that a chunk's tokens 0..t-1 are accepted and token t is not, for t in 0..gamma; shape (gamma
    + 1,).

    P(r=t) is proportional to (1-alpha) alpha^t (1-c_t), a capped geometric variable adjusted by each token's
    confidence c_t. The last entry is *nothing rejected*, alpha^gamma, which the paper's normalisation leaves out though
    it is the common outcome.
    """
    gamma = len(confidence)
    weights = np.empty(gamma + 1)
    powers = alpha ** np.arange(gamma + 1)
    weights[:gamma] = (1.0 - alpha) * powers[:gamma] * (1.0 - np.clip(confidence, 0.0, 1.0))
    weights[gamma] = powers[gamma]
    total = float(weights.sum())
    return weights / total if total > 0.0 else np.full(gamma + 1, 1.0 / (gamma + 1))


BRANCHES = 3
"""Guesses that are followed at once if nothing was measured."""
HITS = (0.37, 0.64, 0.78, 0.86, 0.88, 0.91, 0.92, 0.93, 0.94, 0.94, 0.95, 0.95, 0.95, 0.96, 0.96, 0.96)
"""Share of verdicts that are among the 1, 2, ... likeliest guesses, by `bench.synera.verdict_prediction`. It only
shares out a device's time."""
MOST_BRANCHES = len(HITS)


KNOWN = 30.0
"""How many times as likely as the draft model says a token is that occurs in the text already. Where the draft model is
wrong the verifier's token mostly does: a name, a number, a word of the question (`bench.synera.verdict_prediction`)."""


def likeliest(logits: Floats, most: int, known: Ids) -> tuple[Ids, Floats]:
    """Return the verifier's `most` likeliest tokens, likeliest first, and their weights, both (min(most, n_vocab),).

    A weight is the probability by the draft model's `logits` (n_vocab,), and `KNOWN` times that for the `known` tokens
    (k,), ascending, which stand in the text so far.
    """
    ids, weights = top_k(logits, most)
    if not len(known) or not len(ids):
        return ids, weights
    here = logits[known]
    if len(known) > most:
        best = np.sort(np.argpartition(-here, most)[:most])
        known, here = known[best], here[best]
    others = known[np.minimum(np.searchsorted(known, ids), len(known) - 1)] != ids
    raised = KNOWN * weights[0] * np.exp(here - logits[ids[0]])
    ids, weights = np.concatenate((ids[others], known)), np.concatenate((weights[others], raised))
    order = np.argsort(-weights, kind="stable")[:most]
    return ids[order], weights[order]


def branches(batch_seconds: Sequence[float], wait: float, gamma: int) -> tuple[int, str]:
    """Return how many guesses to follow at once, and why: the number that brings most tokens while a verdict is waited
    for.

    A token of i + 1 branches takes `batch_seconds[i]`, a verdict `wait` seconds; a branch has up to `gamma` tokens. At
    least one is followed: it costs nothing but the device's idle time.
    """
    expected = [hit * min(gamma, wait / seconds) for hit, seconds in zip(HITS, batch_seconds, strict=False)]
    many = 1 + int(np.argmax(expected))
    return many, (
        f"parallel inference with {many} {'guess' if many == 1 else 'guesses'}: a token of them takes"
        f" {batch_seconds[many - 1] * 1e3:.1f} ms, and a verdict {wait * 1e3:.1f} ms"
    )


def guesses(
    positions: Probabilities, confidence: Floats, alternatives: list[tuple[Ids, Floats]], most: int
) -> list[PredictedVerdict]:
    """Return the `most` likeliest verdicts, likeliest first.

    `positions` as from `rejection`, shape (gamma + 1,), for a chunk of `confidence` (gamma,). `alternatives[t]` are
    candidates for the verifier's token where the first t tokens are accepted, with their weights as from `likeliest`,
    both (k,); the drafted token itself is not among them where t < gamma. Where it is rejected, the others share what
    it leaves.
    """
    found = []
    left = [*(1.0 - confidence).tolist(), 1.0]
    for accepted, (chance, (ids, weights)) in enumerate(zip(positions.tolist(), alternatives, strict=True)):
        total = max(float(weights.sum()), left[accepted])
        if total <= 0.0:
            continue
        found += [
            PredictedVerdict(accepted, token, chance * weight / total)
            for token, weight in zip(ids.tolist(), weights.tolist(), strict=True)
        ]
    return sorted(found, key=lambda guess: -guess.probability)[:most]
