"""Fitting of a profile from a pair's observed replies: predictors of rejections, policies and the evidence for them.

Rejections are predicted by logistic regression, or by gradient-boosted trees if they predict better. The trees are
oblivious (Prokhorenkova et al. 2018): all nodes of a level share one split, so a leaf follows from a few comparisons.
Each tree is a Newton step for the log loss (Friedman 2001; Chen and Guestrin 2016). The continuation value of
`offload_policy.py` depends on the policy itself, so it is fitted by simulating the policy on the profiled replies, a
few times over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from edgellm.errors import InvalidOption
from edgellm.spec.gates.offload_policy import (
    DEPTH,
    EPSILON,
    JUDGED,
    LINEAR,
    NAMES,
    SHARES,
    TREES,
    Linear,
    Matrix,
    Policy,
    Predictor,
    Trees,
    Vector,
)
from edgellm.spec.gates.profile import ExitPoint, Profile, solve
from edgellm.spec.gates.profiler import Run
from edgellm.spec.gates.prompt_difficulty import with_difficulty
from edgellm.spec.gates.rules import p_conf, p_imp
from edgellm.spec.types import Ids

KEPT = 512
"""Sampled chunks that a profile keeps: quantiles of a budget need no more."""
ROUNDS = 300
MIN_FOR_TREES = 1000
"""Chunks from which on trees are tried: they overfit fewer, and growing them takes seconds."""
_STEP = 0.1  # learning rate
_PENALTY = 3.0  # weight of squared leaves
_BINS = 32  # histogram bins of a signal
_FOLDS = 5
_ROUNDS = 4  # fixed-point iterations between the policy and its continuation value

_Places = npt.NDArray[np.intp]
Flags = npt.NDArray[np.bool_]


def build(
    runs: Sequence[Run],
    *,
    prompts: Sequence[Ids] = (),
    draft_hash: str,
    verifier_hash: str,
    gamma: int,
    layers: tuple[int, ...] = (),
    origin: str = "prompts",
    batch_seconds: tuple[float, ...] = (),
    exits: tuple[ExitPoint, ...] = (),
    hesitates: float = 0.0,
) -> Profile:
    """Build the profile from `runs`; the other arguments are its fields. With their `prompts`, in the same order, the
    gate judges a chunk by the words of its prompt, too.

    Raises:
        InvalidOption: the runs have too few chunks.
    """
    verified = [seen for run in runs for seen in run.verified]
    alone = [seen for run in runs for seen in run.alone]
    if len(alone) < 8:
        raise InvalidOption(
            f"{len(runs)} prompts gave only {len(alone)} chunks.", "Give more prompts: a profile needs 8 chunks."
        )
    whole = [seen.confidence for seen in verified if seen.whole and seen.tokens == gamma]
    acceptance = [
        float(np.mean([seen.accepted > place for seen in verified if seen.tokens > place] or [False]))
        for place in range(gamma)
    ]
    step = max(1, len(alone) // KEPT)
    tokens = [c for run in runs for c in run.confidence]
    difficulty, runs = with_difficulty(runs, prompts)
    rejection = fit_rejection(runs)
    profile = Profile(
        draft_hash=draft_hash,
        verifier_hash=verifier_hash,
        gamma=gamma,
        prompts=len(runs),
        chunks=len(alone),
        c_th=float(np.mean(whole)) if whole else 1.0,
        alpha=alpha_of(float(np.mean([seen.accepted + 1 for seen in verified if seen.tokens == gamma] or [1])), gamma),
        acceptance=tuple(acceptance),
        layers=layers,
        confidence=_rounded([seen.confidence for seen in alone[::step]]),
        importance=_rounded([seen.importance for seen in alone[::step]]),
        tokens=_rounded(tokens[:: max(1, len(tokens) // KEPT)]),
        perplexities=_rounded([perplexity(run.confidence) for run in runs][:KEPT]),
        policies=fit_policies(runs, rejection.predictor, rejection.unseen),
        evidence=evidence(runs, rejection),
        draft_seconds=float(np.median([s for run in runs for s in run.draft_seconds])),
        verify_seconds=float(np.median([s for run in runs for s in run.verify_seconds])),
        origin=origin,
        batch_seconds=batch_seconds,
        exits=exits,
        hesitates=hesitates,
        difficulty=difficulty,
    )
    return replace(profile, evidence=profile.evidence | gate_evidence(profile, runs, rejection))


def alpha_of(tokens: float, gamma: int) -> float:
    """Return the acceptance rate for which a round brings `tokens` on average: (1 - alpha^(gamma+1)) / (1 - alpha)."""

    def less(alpha: float) -> float:
        return -sum(alpha**i for i in range(gamma + 1))

    return solve(less, -tokens, 0.0, 1.0)


def perplexity(confidence: Sequence[float]) -> float:
    """Return exp of the mean surprise of tokens that were each the most probable one; 1 for an empty reply."""
    return float(np.exp(-np.mean(np.log(np.maximum(confidence, 1e-9))))) if len(confidence) else 1.0


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(float(value), 6) for value in values)


def fit(x: Matrix, target: Vector, penalty: float = 1.0) -> Linear:
    """Fit a logistic regression of `target` (n,) in [0, 1] on signals `x` (n, f), by Newton's method.

    A target between 0 and 1 counts as that share of a success, so the prediction is the expected target. `penalty` is
    the weight of the squared (standardised) coefficients.
    """
    n, f = x.shape
    centre, scale = x.mean(axis=0), x.std(axis=0)
    scale = np.where(scale > 1e-9, scale, np.inf)  # A constant signal gets no weight.
    design = np.column_stack((np.ones(n), (x - centre) / scale))
    ridge = np.diag([1e-6, *[penalty] * f])
    beta = np.zeros(f + 1)
    beta[0] = log_odds(float(target.mean()))
    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ beta, -30, 30)))
        gradient = design.T @ (target - p) - ridge @ beta
        hessian = (design * (p * (1.0 - p))[:, None]).T @ design + ridge
        step = np.linalg.solve(hessian, gradient)
        beta += step / max(1.0, float(np.abs(step).max()) / 4.0)  # A step is at most 4.
        if float(np.abs(step).max()) < 1e-8:
            break
    weights = beta[1:] / scale
    return Linear(tuple(weights.tolist()), float(beta[0] - weights @ np.where(np.isfinite(scale), centre, 0.0)))


def log_odds(share: float) -> float:
    """Return the inverse of `sigmoid`, of a share that may be 0 or 1."""
    share = min(max(share, 1e-6), 1.0 - 1e-6)
    return math.log(share / (1.0 - share))


def log_loss(scores: Matrix, truth: Vector) -> Vector:
    """Return the log loss of `scores` (..., n) for `truth` (n,), each 0 or 1: the mean of minus the log of the
    probability given to the truth; (...,)."""
    given = np.where(truth > 0.5, scores, 1.0 - scores)
    losses: Vector = -np.log(np.maximum(given, 1e-9)).mean(axis=-1)
    return losses


def auc(scores: Vector, truth: npt.NDArray[np.bool_]) -> float:
    """Return the area under the ROC curve, ties counted half; NaN if either class is missing."""
    order = np.argsort(scores, kind="stable")
    ranks = np.empty(len(scores))
    values = scores[order]
    starts = np.flatnonzero(np.concatenate(([True], values[1:] != values[:-1])))
    ends = np.append(starts[1:], len(values))
    for start, end in zip(starts, ends, strict=True):
        ranks[order[start:end]] = 0.5 * (start + end + 1)
    positives = int(truth.sum())
    negatives = len(truth) - positives
    if not positives or not negatives:
        return float("nan")
    return float((ranks[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def grow(x: Matrix, truth: Vector, rounds: int = ROUNDS) -> Trees:
    """Return trees fitted to `truth` (n,), each 0 or 1, by signals `x` (n, f)."""
    edges = [_thresholds(column) for column in x.T]
    bins = np.stack([np.searchsorted(asked, column) for asked, column in zip(edges, x.T, strict=True)])
    allowed = np.arange(_BINS) < np.array([len(each) for each in edges])[:, None]
    bias = log_odds(float(truth.mean()))
    total = np.full(len(x), bias)
    places, asked, leaves = [], [], []
    for _ in range(rounds):
        share = 1.0 / (1.0 + np.exp(-total))
        gradient, hessian = truth - share, share * (1.0 - share)
        questions, leaf = _grow_tree(bins, allowed, gradient, hessian)
        gain, weight = (np.bincount(leaf, each, 1 << DEPTH) for each in (gradient, hessian))
        adds = np.round(_STEP * gain / (weight + _PENALTY), 5)
        total += adds[leaf]
        places.append(tuple(place for place, _ in questions))
        asked.append(tuple(float(edges[place][at]) for place, at in questions))
        leaves.append(tuple(adds.tolist()))
    return Trees(bias, tuple(places), tuple(asked), tuple(leaves))


def _thresholds(column: Vector) -> Vector:
    """Return the split values of a signal (n,): between observed values, at its quantiles."""
    values = np.unique(column)
    if len(values) < 2:
        return np.array([np.inf])  # A constant signal is never split.
    between = 0.5 * (values[1:] + values[:-1])
    cuts = np.quantile(column, np.linspace(0.0, 1.0, _BINS + 1)[1:-1])
    return between[np.unique(np.clip(np.searchsorted(values, cuts), 0, len(between) - 1))]


def _grow_tree(
    bins: _Places, allowed: Flags, gradient: Vector, hessian: Vector
) -> tuple[list[tuple[int, int]], _Places]:
    """Return one tree: its splits (signal, edge), each the one with the highest gain given those before, and the leaf
    of each sample.

    `bins` (f, n) are the number of edges that each value exceeds; `allowed` (f, _BINS): which edges exist.
    """
    signals, n = bins.shape
    rows = np.arange(signals)[:, None]
    gradients, hessians = (np.broadcast_to(each, (signals, n)).ravel() for each in (gradient, hessian))
    questions = []
    leaf: _Places = np.zeros(n, dtype=np.intp)
    for level in range(DEPTH):
        nodes = 1 << level
        at = ((rows * _BINS + bins) * nodes + leaf).ravel()
        shape = (signals, _BINS, nodes)
        gain, weight = (np.bincount(at, each, signals * _BINS * nodes).reshape(shape) for each in (gradients, hessians))
        gradient_below, hessian_below = gain.cumsum(axis=1), weight.cumsum(axis=1)
        gradient_above, hessian_above = gradient_below[:, -1:] - gradient_below, hessian_below[:, -1:] - hessian_below
        gains = (gradient_below**2 / (hessian_below + _PENALTY) + gradient_above**2 / (hessian_above + _PENALTY)).sum(
            axis=2
        )
        place, edge = divmod(int(np.where(allowed, gains, -1.0).argmax()), _BINS)
        leaf += nodes * (bins[place] > edge)
        questions.append((place, edge))
    return questions, leaf


@dataclass(frozen=True, slots=True)
class Rejection:
    """A predictor of rejections; `unseen` (n,) are its predictions for chunks of replies that it was not fitted on.

    `losses` are mean log losses of these, for each of `KINDS` that was tried.
    """

    predictor: Predictor
    unseen: Vector
    losses: dict[str, float]


def fit_rejection(runs: Sequence[Run]) -> Rejection:
    """Fit a predictor on the training chunks of `runs`, at least one; `unseen` is in their order."""
    x, rejected = training_data(runs)
    linear = fit(x, rejected)
    fold = np.repeat(np.arange(len(runs)) % _FOLDS, [len(run.training_chunks) for run in runs])
    if len(np.unique(fold)) < _FOLDS:
        return Rejection(linear, linear.scores(x), {})
    unseen = np.empty(len(x))
    for held_out in range(_FOLDS):
        unseen[fold == held_out] = fit(x[fold != held_out], rejected[fold != held_out]).scores(x[fold == held_out])
    losses = {LINEAR: float(log_loss(unseen, rejected))}
    if len(x) < MIN_FOR_TREES:
        return Rejection(linear, unseen, losses)
    grown = _cross_validated_stages(x, rejected, fold)
    count = int(log_loss(grown, rejected).argmin())
    losses[TREES] = float(log_loss(grown[count], rejected))
    if losses[TREES] >= losses[LINEAR]:
        return Rejection(linear, unseen, losses)
    return Rejection(grow(x, rejected, count), grown[count], losses)


def training_data(runs: Sequence[Run]) -> tuple[Matrix, Vector]:
    """Return the training data of the fitted gate: signals (n, len(JUDGED)), and whether each chunk was rejected
    (n,)."""
    seen = [chunk for run in runs for chunk in run.training_chunks]
    x: Matrix = np.array([chunk.signals for chunk in seen])[:, list(JUDGED)]
    return x, np.array([not chunk.whole for chunk in seen], dtype=np.float64)


def _cross_validated_stages(x: Matrix, rejected: Vector, fold: npt.NDArray[np.intp]) -> Matrix:
    """Return `Trees.stages` of every chunk, by trees that grew without its fold."""
    stages: list[Matrix] = []
    order = []
    for held_out in range(_FOLDS):
        own = fold == held_out
        stages.append(grow(x[~own], rejected[~own]).stages(x[own]))
        order.append(np.flatnonzero(own))
    found: Matrix = np.concatenate(stages, axis=1)[:, np.argsort(np.concatenate(order))]
    return found


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

    `chances` (n,) are `Rejection.unseen`, the predictions of `rejected` for unseen replies: a policy has to work with
    these.
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
    """Return the judged replies of `runs`; `chances` (n,) are all chunks' chances of a rejection. Without
    `continuation`, its value is 1."""
    signals, rejected = training_data(runs)
    features, wrong = np.column_stack((signals, np.log(chances + EPSILON))), rejected > 0.5
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


def evidence(runs: Sequence[Run], rejection: Rejection) -> dict[str, float]:
    """Return `auc ...` of each signal: the probability that a rejected chunk scores higher than an accepted one.

    `auc rejected` is that of the fitted predictor on held-out prompts; `loss ...` are the log losses of the tried
    predictors on the same prompts.
    """
    seen = [chunk for run in runs for chunk in run.training_chunks]
    x, wrong = np.array([chunk.signals for chunk in seen]), np.array([not chunk.whole for chunk in seen])
    found = {f"auc {name}": auc(-x[:, at] if "margin" in name else x[:, at], wrong) for at, name in enumerate(NAMES)}
    if rejection.losses:
        found["auc rejected"] = auc(rejection.unseen, wrong)
    found |= {f"loss {kind}": loss for kind, loss in rejection.losses.items()}
    return {name: round(value, 4) for name, value in found.items() if np.isfinite(value)}


def gate_evidence(profile: Profile, runs: Sequence[Run], rejection: Rejection) -> dict[str, float]:
    """Return `gate ... at b`: the share of replies equal to the verifier's own when a gate spends the budget b.

    A reply counts if each chunk that would be rejected is offloaded. The gates' settings come from the same chunks,
    except for the fitted gate (`worth`), which is evaluated on held-out prompts.
    """
    seen = [chunk for run in runs for chunk in run.verified]
    confidence, importance = (np.array([getattr(each, name) for each in seen]) for name in ("confidence", "importance"))
    wrong = np.array([not chunk.whole for chunk in seen])
    reply = np.repeat(np.arange(len(runs)), [len(run.verified) for run in runs])
    coarse = p_conf(confidence, profile.c_th)

    def right(chances: npt.NDArray[np.float64]) -> float:
        kept = np.ones(len(runs))
        np.multiply.at(kept, reply[wrong], chances[wrong])
        return float(kept.mean())

    number = np.repeat(np.arange(len(runs)), [len(run.training_chunks) for run in runs])
    halves = []
    for half in (0, 1):
        ours, others = ([run for run in runs[at::2] if run.training_chunks] for at in (half, 1 - half))
        if ours and others:
            chances, unseen = rejection.unseen[number % 2 == half], rejection.unseen[number % 2 != half]
            halves.append((ours, chances, fit_policies(others, rejection.predictor, unseen)))
    found: dict[str, float] = {}
    for at, share in enumerate(SHARES):
        chance_of = {
            "confidence": p_conf(confidence, profile.confidence_threshold(share)),
            "importance": p_imp(importance, profile.i_th(share, coarse=False)),
            "synera": coarse * p_imp(importance, profile.i_th(share)),
            "random": np.full(len(seen), share),
        }
        for name, chance in chance_of.items():
            found[f"gate {name} at {share}"] = right(_at_share(chance, share))
        saved = [
            all(flag or chunk.whole for flag, chunk in zip(flags.tolist(), run.training_chunks, strict=True))
            for ours, chances, policies in halves
            for run, flags in zip(ours, simulate(ours, policies[at], chances), strict=True)
        ]
        found[f"gate worth at {share}"] = float(np.mean(saved)) if saved else 0.0
    return {name: round(value, 4) for name, value in found.items()}


def _at_share(chances: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.float64]:
    """Return the chances after a controller corrects a gate that misses the budget, as if at random."""
    mean = float(chances.mean())
    if mean > share:
        return chances * (share / mean)
    return chances + (1.0 - chances) * ((share - mean) / max(1.0 - mean, 1e-9))
