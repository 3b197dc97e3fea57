"""The value of verifying a chunk: the probability that it saves the reply, fitted on profiled replies.

A reply is correct if each of its wrong chunks was verified. A verdict is therefore worth what it adds to the
probability of that: `p_correct * p_rejected * continuation`. The reply must still be correct (`p_correct`: unverified
chunks may have been wrong), this chunk must be wrong, and all later wrong chunks must be verified, too: a budget is
better spent on replies that need one correction than on the beginning of those that need four. The first two factors
follow from one predictor; the continuation value depends on the policy itself, so it is fitted by simulating the policy
on the profiled replies, a few times over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgellm.spec.gates.features import JUDGED
from edgellm.spec.gates.profiler import Run
from edgellm.spec.gates.rejection_model import Linear, Matrix, Predictor, Vector, fit, training_data

SHARES = (0.1, 0.2, 0.4)
"""Budgets for which a policy is fitted and evidence is collected."""
KEPT = 512
"""Sampled chunks that a profile keeps: quantiles of a budget need no more."""
_ROUNDS = 4  # fixed-point iterations between the policy and its continuation value
_EPSILON = 1e-6

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy for budgets near `share`. `rejected` predicts rejection from the signals `JUDGED`, `continuation` the
    continuation value from those and the log of that prediction.

    `scores` (n,) are the values of profiled chunks when the policy was followed at that budget.
    """

    share: float
    rejected: Predictor
    continuation: Predictor
    scores: tuple[float, ...] = ()

    def judge(self, signals: Vector) -> tuple[float, float]:
        """Return, for all signals of a chunk, shape (len(NAMES),), the probability of rejection and the continuation
        value."""
        features = signals[list(JUDGED)]
        rejected = self.rejected.score(features)
        return rejected, self.continuation.score(np.append(features, np.log(rejected + _EPSILON)))


@dataclass(slots=True)
class _Reply:
    """A profiled reply: for each chunk the probability of rejection, the continuation value, and whether it was
    rejected."""

    features: npt.NDArray[np.float64]
    p_rejected: Vector
    wrong: Flags
    continuation: Vector


def fit_policies(runs: Sequence[Run], rejected: Predictor, chances: Vector) -> tuple[Policy, ...]:
    """Fit one policy for each of `SHARES` on the judged replies of `runs`.

    `chances` (n,) are the chances that their chunks are rejected, as `rejected` predicts them for replies that it has
    not seen: a policy has to work with such chances (`Rejection.unseen`).
    """
    return tuple(_fit(runs, rejected, chances, share) for share in SHARES)


def _fit(runs: Sequence[Run], rejected: Predictor, chances: Vector, share: float) -> Policy:
    replies = _replies(runs, chances)
    features = np.concatenate([reply.features for reply in replies])
    continuation = _fit_continuation(features, replies, share)
    for _ in range(_ROUNDS - 1):
        continuation = _fit_continuation(features, _replies(runs, chances, continuation), share)
    replies = _replies(runs, chances, continuation)
    threshold = _threshold_for_share(replies, share)
    scores = np.concatenate([_simulate(reply, threshold)[1] for reply in replies])
    step = max(1, len(scores) // KEPT)
    return Policy(share, rejected, continuation, tuple(np.round(scores[::step], 6).tolist()))


def _fit_continuation(features: Matrix, replies: Sequence[_Reply], share: float) -> Linear:
    """Fit, on signals `x` (n, f), the probability that everything after a chunk is right if the policy is followed over
    `replies`."""
    threshold = _threshold_for_share(replies, share)
    labels = [_rest_verified(reply.wrong, _simulate(reply, threshold)[0]) for reply in replies]
    return fit(features, np.concatenate(labels).astype(np.float64), penalty=3.0)


def simulate(runs: Sequence[Run], policy: Policy, chances: Vector) -> list[Flags]:
    """Return which chunks of each judged reply the policy has verified, at its share of all; `chances` as above."""
    replies = _replies(runs, chances, policy.continuation)
    threshold = _threshold_for_share(replies, policy.share)
    return [_simulate(reply, threshold)[0] for reply in replies]


def _replies(runs: Sequence[Run], chances: Vector, continuation: Predictor | None = None) -> list[_Reply]:
    """Return the judged replies of `runs`; `chances` (n,) are those of all chunks to be rejected. Without
    `continuation` it is 1."""
    signals, rejected = training_data(runs)
    features, wrong = np.column_stack((signals, np.log(chances + _EPSILON))), rejected > 0.5
    continuations = np.ones(len(features)) if continuation is None else continuation.scores(features)
    ends = np.cumsum([len(run.training_chunks) for run in runs if run.training_chunks])[:-1]
    return [
        _Reply(*parts)
        for parts in zip(*(np.split(each, ends) for each in (features, chances, wrong, continuations)), strict=True)
    ]


def _simulate(reply: _Reply, threshold: float) -> tuple[Flags, Vector]:
    """Return which chunks of a reply are verified if the value of a verdict must exceed `threshold`, and each chunk's
    value."""
    verified, values, p_correct = np.zeros(len(reply.p_rejected), dtype=bool), np.zeros(len(reply.p_rejected)), 1.0
    for at, (p_rejected, continuation) in enumerate(
        zip(reply.p_rejected.tolist(), reply.continuation.tolist(), strict=True)
    ):
        values[at] = p_correct * p_rejected * continuation
        if values[at] > threshold:
            verified[at] = True
        else:
            p_correct *= 1.0 - p_rejected
    return verified, values


def _rest_verified(wrong: Flags, verified: Flags) -> Flags:
    """Return for each chunk whether all later wrong ones are verified."""
    missed = (wrong & ~verified)[::-1].cumsum()[::-1]
    rest: Flags = np.append(missed[1:], 0) == 0
    return rest


def _threshold_for_share(replies: Sequence[_Reply], share: float) -> float:
    """Return the price at which the policy verifies `share` of all chunks."""
    low, high = 0.0, 1.0
    total = sum(len(reply.p_rejected) for reply in replies)
    for _ in range(20):
        middle = 0.5 * (low + high)
        spent = sum(int(_simulate(reply, middle)[0].sum()) for reply in replies)
        low, high = (middle, high) if spent > share * total else (low, middle)
    return high
