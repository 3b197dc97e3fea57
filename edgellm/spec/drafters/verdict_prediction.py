"""Prediction of where a chunk will be rejected, and of the correction there (Synera, section 4.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engine import top_k
from edgellm.spec.drafting.acceptance import Probabilities
from edgellm.spec.types import NO_FLOATS, NO_IDS, Chunk, Floats, Ids


@dataclass(frozen=True, slots=True)
class PredictedVerdict:
    """A predicted verdict: `accepted` tokens, followed by the verifier's `token`, with the joint `probability` of
    both."""

    accepted: int
    token: int
    probability: float


@dataclass(slots=True)
class PredictionStats:
    """Statistics of predicted verdicts: `hits` of `tries`, and seconds of waiting spent on drafts that were kept."""

    tries: int = 0
    hits: int = 0
    hidden_seconds: float = 0.0

    def record(self, hit: bool, seconds: float) -> None:
        """Count a verdict: whether a predicted one matched it, and the `seconds` spent drafting after the
        predictions."""
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
"""Guesses that are followed at once without a measurement."""
TOPK_HIT_RATE = (0.37, 0.64, 0.78, 0.86, 0.88, 0.91, 0.92, 0.93, 0.94, 0.94, 0.95, 0.95, 0.95, 0.96, 0.96, 0.96)
"""Share of verdicts that are among the 1, 2, ... likeliest guesses, by `bench.synera.verdict_prediction`. It only
shares out a device's time."""
MAX_AHEAD = 8
"""Maximum tokens of a branch: more than a chunk, so that the next chunks profit, too."""
MAX_BRANCHES = len(TOPK_HIT_RATE)


CONTEXT_BOOST = 30.0
"""Factor by which tokens that already occur in the text are likelier corrections than the draft model says: where it is
wrong, the verifier's token often is a name, a number or a word of the question (`bench.synera.verdict_prediction`)."""


def likely_corrections(logits: Floats, confidence: float, limit: int, known: Ids) -> tuple[Ids, Floats]:
    """Return the verifier's `limit` likeliest tokens, likeliest first, and their weights, both (min(limit, n_vocab),).

    A weight is the probability by the draft model's `logits` (n_vocab,), whose likeliest token has the probability
    `confidence`; for the `known` tokens (k,), which occur in the text so far, it is multiplied by `CONTEXT_BOOST`.
    """
    raised = logits.copy()
    raised[known[known < len(raised)]] += np.float32(math.log(CONTEXT_BOOST))
    ids = top_k(raised, limit)
    return ids, np.exp(raised[ids] - logits.max()) * np.float32(confidence)


def alternatives(chunk: Chunk, limit: int, known: Ids) -> list[tuple[Ids, Floats]]:
    """Return for each token of a chunk up to `limit` candidates for the verifier's token in case it is rejected, with
    their weights, as `likely_corrections`; none where the chunk has no logits."""
    found = []
    for token, confidence, logits in zip(chunk.ids, chunk.confidence, chunk.logits or (), strict=True):
        ids, weights = likely_corrections(logits, confidence, limit + 1, known) if len(logits) else (NO_IDS, NO_FLOATS)
        others = np.flatnonzero(ids != token)[:limit]
        found.append((ids[others], weights[others]))
    return found


def choose_branches(batch_seconds: Sequence[float], wait: float, gamma: int) -> tuple[int, str]:
    """Return how many branches to draft, and why: the number with the most expected tokens during the wait for a
    verdict.

    One token of i + 1 branches takes `batch_seconds[i]`, a verdict `wait` seconds; a branch has up to `gamma` tokens.
    At least one branch is drafted, in otherwise idle time.
    """
    expected = [hit * min(gamma, wait / seconds) for hit, seconds in zip(TOPK_HIT_RATE, batch_seconds, strict=False)]
    count = 1 + int(np.argmax(expected))
    return count, (
        f"parallel inference with {count} {'guess' if count == 1 else 'guesses'}: one token of each takes"
        f" {batch_seconds[count - 1] * 1e3:.1f} ms, a verdict {wait * 1e3:.1f} ms"
    )


def predict_verdicts(
    positions: Probabilities, confidence: Floats, candidates: list[tuple[Ids, Floats]], limit: int
) -> list[PredictedVerdict]:
    """Return the `limit` likeliest verdicts, likeliest first.

    `positions` (gamma + 1,) as from `rejection`, for a chunk of `confidence` (gamma,). `candidates[t]` are tokens that
    the verifier may write if the first t are accepted, with weights as from `likely_corrections`, both (k,); for
    t < gamma they exclude the drafted token, and share the probability that it leaves.
    """
    found = []
    rejected_mass = [*(1.0 - confidence).tolist(), 1.0]
    for accepted, (chance, (ids, weights)) in enumerate(zip(positions.tolist(), candidates, strict=True)):
        total = max(float(weights.sum()), rejected_mass[accepted])
        if total <= 0.0:
            continue
        found += [
            PredictedVerdict(accepted, token, chance * weight / total)
            for token, weight in zip(ids.tolist(), weights.tolist(), strict=True)
        ]
    return sorted(found, key=lambda guess: -guess.probability)[:limit]
