"""The fitted gate, which spends a budget on the chunks whose verification is worth most by the pair's profile.

A reply is correct if each of its wrong chunks was verified. The value of a verdict is what it adds to that probability:
`p_correct * p_rejected * continuation`. The reply must still be correct (`p_correct`: unverified chunks may have been
wrong), this chunk must be wrong, and all later wrong chunks must be verified, too: a budget is better spent on replies
that need one correction than on the beginning of those that need four. `fitting.py` fits the two predictors.
"""

from __future__ import annotations

import numpy as np

from edgellm.spec.gates.profile import NAMES, Matrix, Profile, Vector
from edgellm.spec.gates.rules import draw
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision

SHARES = (0.1, 0.2, 0.4)
"""Budgets for which a policy is fitted and evidence is collected."""

MEAN_DOUBT, TOKENS, DIFFICULTY = (NAMES.index(name) for name in ("doubt of the mean", "tokens", "prompt difficulty"))
CONTEXT = slice(NAMES.index("agreement"), DIFFICULTY)
"""The signals that only chunks have whose tokens were looked up in the context."""

_FLOOR = 1e-4  # least confidence in logarithms


def surprise(chunk: Chunk) -> float:
    """Return minus the log of the probability of the whole chunk under the draft model."""
    return float(_doubt(chunk).sum())


def _doubt(chunk: Chunk) -> Vector:
    doubt: Vector = -np.log(np.clip(chunk.confidence.astype(np.float64), _FLOOR, 1.0))
    return doubt


def signals(chunk: Chunk, written: int, so_far: float = 0.0, difficulty: float = 0.0) -> Vector:
    """Return the signals of a chunk of at least one token after `written` tokens, shape (len(NAMES),). `so_far` is the
    surprise of all earlier chunks of the reply, and `difficulty` that of its prompt."""
    doubt = _doubt(chunk)
    mean = max(_FLOOR, float(chunk.confidence.astype(np.float64).mean()))
    return np.array(
        (
            -np.log(mean), len(chunk), doubt[0], doubt.sum(),
            chunk.margin.min(), chunk.margin.mean(), np.log1p(written), so_far, *_context_signals(chunk, doubt),
            difficulty,
        )
    )  # fmt: skip


def _context_signals(chunk: Chunk, doubt: Vector) -> tuple[float, ...]:
    """Return the signals `CONTEXT`; zeros without a context match."""
    match = chunk.context_match
    if match is None:
        return (0.0,) * (CONTEXT.stop - CONTEXT.start)
    matched = np.log1p(np.where(match.tokens >= 0, match.matched, 0).astype(np.float64))
    same, copied = match.tokens == chunk.ids, match.copied
    agreement, dissent = np.where(same & ~copied, matched, 0.0), np.where(same, 0.0, matched)
    return (
        agreement.sum(), agreement.max(), dissent.sum(), float((dissent * doubt).sum()), float(copied.sum()),
        float(doubt[copied].sum()),
    )  # fmt: skip


def with_chance(x: Matrix, rejected: Vector) -> Matrix:
    """Return what `Policy.continuation` is predicted from: signals (n, f) and the chances of a rejection (n,)."""
    return np.column_stack((x, np.log(rejected + 1e-6)))


class FittedJudge:
    """A judge of the chunks of one reply by their value. Values drift, because unverified replies diverge from verified
    ones, so a chunk is verified if its value is above that quantile of the profiled values."""

    def __init__(self, profile: Profile, budget: float, seed: int = 0) -> None:
        self._profile, self._seed = profile, seed
        self._policy = min(profile.policies, key=lambda policy: abs(policy.share - budget))
        self._sorted = np.sort(np.array(self._policy.scores))
        self._difficulty: float | None = None  # difficulty of this reply's prompt
        self._so_far = 0.0
        self._p_correct = 1.0  # probability that the reply so far equals the verifier's

    def __call__(self, state: GenerationState, chunk: Chunk, target: float) -> Decision:
        """Decide on a chunk, so that the share `target` of all is verified."""
        if self._difficulty is None:
            self._difficulty = self._profile.difficulty_of(state.ids[: state.prompt_tokens])
        seen = signals(chunk, state.written, self._so_far, self._difficulty)[None]
        rejected = self._profile.rejected.scores(seen)
        p_rejected = float(rejected[0])
        continuation = float(self._policy.continuation.scores(with_chance(seen, rejected))[0])
        value = self._p_correct * p_rejected * continuation
        below, place = self._rank(value, draw(self._seed, state.written))
        why = (
            f"{p_rejected:.0%} chance of rejection, {self._p_correct:.0%} that the reply is correct so far: score"
            f" {value:.3g}, above {below:.0%} of the profiled chunks; {target:.0%} are to be verified"
        )
        self._so_far += surprise(chunk)
        if place >= target:
            self._p_correct *= 1.0 - p_rejected
        return Decision(place < target, why)

    def _rank(self, value: float, tie: float) -> tuple[float, float]:
        """Return the share of profiled values below one, and its rank among them and itself: 0 is the highest, and 1
        the end. `tie` in [0, 1) ranks equal values."""
        n = len(self._sorted)
        below, up_to = (int(self._sorted.searchsorted(value, side)) for side in ("left", "right"))
        return below / n, (n - up_to + tie * (up_to - below + 1)) / (n + 1)
