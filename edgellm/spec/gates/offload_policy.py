"""The worth of verifying a chunk: the chance that it saves the reply. Fitted on profiled replies.

A reply is right if each of its wrong chunks was verified. So a verdict is worth what it adds to the chance that all
are: `alive * rejected * hope`. The reply must still be right (`alive`: what was kept unverified before may have been
wrong), this chunk must be wrong, and the corrections that are still to come must come too: a budget is spent better on
replies that need one correction than on the beginnings of those that need four. The first two follow from one
predictor; hope depends on the policy itself, so it is fitted by following the policy over the profiled replies, a few
times over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgellm.spec.gates.features import JUDGED
from edgellm.spec.gates.profiler import Run
from edgellm.spec.gates.rejection_model import Linear, Matrix, Predictor, Vector, fit, judged

SHARES = (0.1, 0.2, 0.4)
"""Budgets for which a policy is fitted and evidence is collected."""
KEPT = 512
"""Sampled chunks that a profile keeps: quantiles of a budget need no more."""
_ROUNDS = 4  # of fitting hope to the policy that follows from it
_SURE = 1e-6

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy for budgets near `share`: `rejected` judges the signals `JUDGED`, `hope` those and the log of its
    result.

    `scores` (n,) are the worths of profiled chunks when the policy was followed at that budget.
    """

    share: float
    rejected: Predictor
    hope: Predictor
    scores: tuple[float, ...] = ()

    def judge(self, signals: Vector) -> tuple[float, float]:
        """Return, for all signals of a chunk, shape (len(NAMES),), the chance that it is rejected, and hope behind
        it."""
        x = signals[list(JUDGED)]
        rejected = self.rejected.score(x)
        return rejected, self.hope.score(np.append(x, np.log(rejected + _SURE)))


@dataclass(slots=True)
class _Reply:
    """A profiled reply: for each chunk the chance that it is rejected, hope behind it, and whether it was rejected."""

    x: npt.NDArray[np.float64]
    chance: Vector
    wrong: Flags
    hope: Vector


def fit_policies(runs: Sequence[Run], rejected: Predictor, chances: Vector) -> tuple[Policy, ...]:
    """Fit one policy for each of `SHARES` on the judged replies of `runs`.

    `chances` (n,) are the chances that their chunks are rejected, as `rejected` predicts them for replies that it has
    not seen: a policy has to work with such chances (`Rejection.unseen`).
    """
    return tuple(_fit(runs, rejected, chances, share) for share in SHARES)


def _fit(runs: Sequence[Run], rejected: Predictor, chances: Vector, share: float) -> Policy:
    replies = _replies(runs, chances)
    x = np.concatenate([reply.x for reply in replies])
    hope = _hope(x, replies, share)
    for _ in range(_ROUNDS - 1):
        hope = _hope(x, _replies(runs, chances, hope), share)
    replies = _replies(runs, chances, hope)
    price = _price(replies, share)
    scores = np.concatenate([_follow(reply, price)[1] for reply in replies])
    step = max(1, len(scores) // KEPT)
    return Policy(share, rejected, hope, tuple(np.round(scores[::step], 6).tolist()))


def _hope(x: Matrix, replies: Sequence[_Reply], share: float) -> Linear:
    """Fit, by signals `x` (n, f), how likely all is to be right behind a chunk when the policy is followed over
    `replies`."""
    price = _price(replies, share)
    saved = [_saved(reply.wrong, _follow(reply, price)[0]) for reply in replies]
    return fit(x, np.concatenate(saved).astype(np.float64), penalty=3.0)


def follow(runs: Sequence[Run], policy: Policy, chances: Vector) -> list[Flags]:
    """Return which chunks of each judged reply the policy has verified, at its share of all; `chances` as above."""
    replies = _replies(runs, chances, policy.hope)
    price = _price(replies, policy.share)
    return [_follow(reply, price)[0] for reply in replies]


def _replies(runs: Sequence[Run], chances: Vector, hope: Predictor | None = None) -> list[_Reply]:
    """Return the judged replies of `runs`; `chances` (n,) are those of all chunks to be rejected. Without `hope` it
    is 1."""
    signals, rejected = judged(runs)
    x, wrong = np.column_stack((signals, np.log(chances + _SURE))), rejected > 0.5
    hopes = np.ones(len(x)) if hope is None else hope.scores(x)
    ends = np.cumsum([len(run.judged) for run in runs if run.judged])[:-1]
    return [
        _Reply(*parts) for parts in zip(*(np.split(each, ends) for each in (x, chances, wrong, hopes)), strict=True)
    ]


def _follow(reply: _Reply, price: float) -> tuple[Flags, Vector]:
    """Return which chunks of a reply are verified if a verdict has to be worth more than `price`, and each chunk's
    worth."""
    taken, worth, alive = np.zeros(len(reply.chance), dtype=bool), np.zeros(len(reply.chance)), 1.0
    for at, (chance, hope) in enumerate(zip(reply.chance.tolist(), reply.hope.tolist(), strict=True)):
        worth[at] = alive * chance * hope
        if worth[at] > price:
            taken[at] = True
        else:
            alive *= 1.0 - chance
    return taken, worth


def _saved(wrong: Flags, taken: Flags) -> Flags:
    """Return for each chunk whether all wrong ones behind it are verified."""
    missed = (wrong & ~taken)[::-1].cumsum()[::-1]
    behind: Flags = np.append(missed[1:], 0) == 0
    return behind


def _price(replies: Sequence[_Reply], share: float) -> float:
    """Return the price at which the policy verifies `share` of all chunks."""
    low, high = 0.0, 1.0
    total = sum(len(reply.chance) for reply in replies)
    for _ in range(20):
        middle = 0.5 * (low + high)
        spent = sum(int(_follow(reply, middle)[0].sum()) for reply in replies)
        low, high = (middle, high) if spent > share * total else (low, middle)
    return high
