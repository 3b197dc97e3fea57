"""Fitting of a profile from a pair's observed replies: predictors of rejections, policies and the evidence for them.

The continuation value of `fitted.py` depends on the policy itself, so it is fitted by simulating the policy on
the profiled replies, a few times over.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from edgellm.errors import InvalidOption
from edgellm.spec.gates.profile import (
    CONTEXT,
    MEAN_DOUBT,
    NAMES,
    SHARES,
    TOKENS,
    Logistic,
    Matrix,
    Policy,
    Profile,
    ProfileTerms,
    UnverifiedReplies,
    Vector,
    with_chance,
)
from edgellm.spec.gates.rules import solve
from edgellm.spec.ngram.sources import Disagreement

_KEPT = 512  # sampled chunks that a profile keeps: quantiles of a budget need no more
_LEAST = 8  # chunks that make a profile
_FOLDS = 5
_ROUNDS = 4  # fixed-point iterations between a policy and its continuation value
_PAIRS_PENALTY = 30_000
"""Penalty of products of signals times the number of chunks: of few chunks they would only learn noise."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Seen:
    """A drafted chunk and its verdict: its `signals` (len(NAMES),), how many of its tokens were `accepted`, and its
    mean importance, or that in each measured layer."""

    signals: tuple[float, ...]
    accepted: int
    importance: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """The observations for one prompt.

    `verified` are the chunks of the fully verified reply, and `with_lookup` those of the reply in which drafts of
    little confidence were the context's tokens, if that differs; `doubt` is the least confidence at which it may. Of
    the draft model's own reply, `alone` has the mean confidence of each chunk, followed by `Seen.importance`, and
    `tokens` the confidence of each token.
    """

    verified: tuple[Seen, ...] = ()
    alone: tuple[tuple[float, ...], ...] = ()
    tokens: tuple[float, ...] = ()
    disagreements: tuple[Disagreement, ...] = ()
    doubt: float = 1.0
    with_lookup: tuple[Seen, ...] = ()


def build(runs: Sequence[Run], terms: ProfileTerms, *, hesitates: float = 0.0) -> Profile:
    """Build the profile of `terms` from `runs`. `hesitates`: the confidence below which `runs` have looked tokens up in
    the context. Of several layers whose importance was measured, the one is chosen that separates rejected chunks best.
    Raises InvalidOption: the runs have too few chunks."""
    alone = np.array([chunk for run in runs for chunk in run.alone])
    if len(alone) < _LEAST:
        raise InvalidOption(
            f"{len(runs)} prompts gave only {len(alone)} chunks.", f"Give more prompts: a profile needs {_LEAST}"
            " chunks.",
        )  # fmt: skip
    gamma, tokens = terms.gamma, [value for run in runs for value in run.tokens]
    verified, measured = Chunks.of([run.verified for run in runs]), terms.layers
    importance = np.array([chunk.importance for run in runs for chunk in run.verified])
    by_layer = [auc(column, verified.wrong) for column in importance.T]
    best = int(np.nan_to_num(by_layer).argmax())
    if len(by_layer) > 1:
        terms = replace(terms, layers=(measured[best],))
    long = verified.signals[:, TOKENS] == gamma
    whole = verified.confidence[long & ~verified.wrong]
    training = Chunks.of([run.with_lookup or run.verified for run in runs])
    if not hesitates:  # The gate will know nothing of the context.
        training.signals[:, CONTEXT] = 0.0
    rejected, unseen = fit_rejection(training)
    profile = Profile(
        replace(terms, prompts=len(runs), chunks=len(alone)),
        UnverifiedReplies(
            _sample(alone[:, 0]), _sample(alone[:, 1 + best]), _sample(np.array(tokens)),
            _sample(np.array([perplexity(run.tokens) for run in runs])),
        ),
        c_th=float(whole.mean()) if len(whole) else 1.0,
        alpha=alpha_of(float((verified.accepted[long] + 1).mean()) if long.any() else 1.0, gamma),
        acceptance=tuple(_accepted_beyond(verified, place) for place in range(gamma)),
        rejected=rejected,
        policies=tuple(fit_policy(training, unseen, share) for share in SHARES),
        hesitates=hesitates,
    )  # fmt: skip
    found = {f"auc importance, layer {layer}": value for layer, value in zip(measured, by_layer, strict=False)}
    found |= evidence(training, unseen) | _fitted_evidence(training, unseen)
    return replace(profile, evidence={name: round(value, 4) for name, value in found.items() if np.isfinite(value)})


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of observed replies, one reply after the other: `signals` (n, len(NAMES)), how many tokens of each
    were `accepted`, and the number of its `reply`, (n,) each."""

    signals: Matrix
    accepted: npt.NDArray[np.intp]
    reply: npt.NDArray[np.intp]

    @classmethod
    def of(cls, replies: Sequence[Sequence[Seen]]) -> Self:
        """Return the chunks of some replies."""
        seen = [chunk for reply in replies for chunk in reply]
        return cls(
            np.array([chunk.signals for chunk in seen]).reshape(-1, len(NAMES)),
            np.array([chunk.accepted for chunk in seen], dtype=np.intp),
            np.repeat(np.arange(len(replies)), [len(reply) for reply in replies]),
        )

    @property
    def wrong(self) -> Flags:
        """Return which chunks were rejected, wholly or in part."""
        wrong: Flags = self.accepted < self.signals[:, TOKENS]
        return wrong

    @property
    def confidence(self) -> Vector:
        """Return the mean confidence of each chunk."""
        return np.exp(-self.signals[:, MEAN_DOUBT])

    def part(self, which: Flags) -> "Chunks":
        """Return some of the chunks, those of whole replies."""
        return Chunks(self.signals[which], self.accepted[which], np.unique(self.reply[which], return_inverse=True)[1])

    def by_reply(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the `values` of chunks (n,) as a row for each reply, filled up with zeros."""
        rows, place = self._places()
        table = np.zeros((rows.max() + 1, place.max() + 1), dtype=values.dtype)
        table[rows, place] = values
        return table

    def in_order(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return the values (n,) of a table from `by_reply`."""
        return table[self._places()]

    def _places(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Return each chunk's reply, counted without empty ones, and its place there."""
        _, first, rows = np.unique(self.reply, return_index=True, return_inverse=True)
        return rows, np.arange(len(rows)) - first[rows]


def _accepted_beyond(chunks: Chunks, place: int) -> float:
    """Return the share of chunks with a token at `place` in which it was accepted."""
    reaching = chunks.signals[:, TOKENS] > place
    return float((chunks.accepted[reaching] > place).mean()) if reaching.any() else 0.0


def _sample(values: Vector) -> tuple[float, ...]:
    """Return up to about `_KEPT` of the values, spread evenly."""
    return tuple(round(float(value), 6) for value in values[:: max(1, len(values) // _KEPT)])


def alpha_of(tokens: float, gamma: int) -> float:
    """Return the acceptance rate for which a round brings `tokens` on average: (1 - alpha^(gamma+1)) / (1 - alpha)."""
    return solve(lambda alpha: -sum(alpha**i for i in range(gamma + 1)), -tokens, 0.0, 1.0)


def perplexity(confidence: Sequence[float]) -> float:
    """Return exp of the mean surprise of tokens that were each the most probable one; 1 for an empty reply."""
    return float(np.exp(-np.mean(np.log(np.maximum(confidence, 1e-9))))) if len(confidence) else 1.0


def fit(x: Matrix, target: Vector, *, penalty: float = 1.0, pairs: bool = False) -> Logistic:
    """Fit `target` (n,), shares in [0, 1], by signals `x` (n, f), also by pairs of them if asked for.

    Newton's method on the log loss, with a `penalty` on the squared weights of signals.
    """
    n, f = x.shape
    deviation = x.std(axis=0)
    scale = np.where(deviation > 1e-9, 1.0 / np.maximum(deviation, 1e-9), 0.0)  # A constant signal gets no weight.
    shape = Logistic(tuple(x.mean(axis=0).tolist()), tuple(scale.tolist()), (), 0.0)
    features = shape.features(x, pairs=pairs)
    design = np.column_stack((np.ones(n), features))
    ridge = np.full(design.shape[1], 3.0 + _PAIRS_PENALTY / n)
    ridge[: 1 + f * (1 + pairs)] = penalty
    ridge[0] = 1e-6
    beta = np.zeros(design.shape[1])

    def loss(beta: Vector) -> float:
        z = design @ beta
        return float(np.logaddexp(0.0, z).sum() - target @ z + 0.5 * ridge @ beta**2)

    for _ in range(50):
        p = 1.0 / (1.0 + np.exp(-np.clip(design @ beta, -30, 30)))
        gradient = design.T @ (target - p) - ridge * beta
        step = np.linalg.solve((design * (p * (1.0 - p))[:, None]).T @ design + np.diag(ridge), gradient)
        known, share = loss(beta), 1.0
        while loss(beta + share * step) > known and share > 1e-6:
            share /= 2.0
        beta += share * step
        if float(np.abs(step).max()) < 1e-6:
            break
    return replace(shape, weights=tuple(beta[1:].tolist()), bias=float(beta[0]))


def auc(scores: Vector, truth: Flags) -> float:
    """Return the area under the ROC curve, ties counted half; NaN if either class is missing."""
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - 0.5 * (counts - 1))[inverse]
    positives = int(truth.sum())
    negatives = len(truth) - positives
    if not positives or not negatives:
        return float("nan")
    return float((ranks[truth].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def fit_rejection(chunks: Chunks) -> tuple[Logistic, Vector]:
    """Fit a predictor of rejections; return also its predictions (n,) for chunks of replies that it was not fitted on.
    With too few replies these are of the same ones."""
    x, wrong = chunks.signals, chunks.wrong.astype(np.float64)
    whole, fold = fit(x, wrong, pairs=True), chunks.reply % _FOLDS
    unseen = whole.scores(x)
    if len(np.unique(fold)) == _FOLDS:
        for held_out in range(_FOLDS):
            own = fold == held_out
            unseen[own] = fit(x[~own], wrong[~own], pairs=True).scores(x[own])
    return whole, unseen


def fit_policy(chunks: Chunks, chances: Vector, share: float) -> Policy:
    """Fit the policy for a `share` of chunks. `chances` (n,) are the predictions for unseen replies: a policy has to
    work with these."""
    features = with_chance(chunks.signals, chances)
    p_rejected, wrong = chunks.by_reply(chances), chunks.by_reply(chunks.wrong)
    hope = chunks.by_reply(np.ones(len(chances)))
    for _ in range(_ROUNDS):
        verified, _ = _verified(p_rejected, hope, share * len(chances))
        missed = (wrong & ~verified)[:, ::-1].cumsum(axis=1)[:, ::-1]
        rest_is_right = np.column_stack((missed[:, 1:], np.zeros(len(missed)))) == 0
        continuation = fit(features, chunks.in_order(rest_is_right).astype(np.float64), penalty=3.0)
        hope = chunks.by_reply(continuation.scores(features))
    _, values = _verified(p_rejected, hope, share * len(chances))
    return Policy(share, continuation, _sample(chunks.in_order(values)))


def follow(chunks: Chunks, chances: Vector, policy: Policy) -> Flags:
    """Return which chunks (n,) the policy has verified, at its share of all."""
    p_rejected = chunks.by_reply(chances)
    hope = chunks.by_reply(policy.continuation.scores(with_chance(chunks.signals, chances)))
    verified, _ = _verified(p_rejected, hope, policy.share * len(chances))
    flags: Flags = chunks.in_order(verified)
    return flags


def _simulate(p_rejected: Matrix, hope: Matrix, threshold: float) -> tuple[Flags, Matrix]:
    """Return which chunks of each reply are verified if the value of a verdict must exceed `threshold`, and each
    chunk's value; a row for each reply."""
    verified, values, p_correct = np.zeros(hope.shape, dtype=np.bool_), np.zeros(hope.shape), np.ones(len(hope))
    for at in range(hope.shape[1]):
        values[:, at] = p_correct * p_rejected[:, at] * hope[:, at]
        verified[:, at] = values[:, at] > threshold
        p_correct *= np.where(verified[:, at], 1.0, 1.0 - p_rejected[:, at])
    return verified, values


def _verified(p_rejected: Matrix, hope: Matrix, count: float) -> tuple[Flags, Matrix]:
    """Return what `_simulate` does with a threshold by which about `count` chunks are verified."""
    threshold = solve(lambda value: float(_simulate(p_rejected, hope, value)[0].sum()), count, 0.0, 1.0)
    return _simulate(p_rejected, hope, threshold)


def evidence(chunks: Chunks, unseen: Vector) -> dict[str, float]:
    """Return `auc ...` of each signal: the probability that a rejected chunk scores higher than an accepted one; `auc
    rejected` and `loss` are those of the fitted predictor on held-out prompts."""
    wrong = chunks.wrong
    found = {
        f"auc {name}": auc(-column if "margin" in name else column, wrong)
        for name, column in zip(NAMES, chunks.signals.T, strict=True)
    }
    given = np.where(wrong, unseen, 1.0 - unseen)
    return found | {"auc rejected": auc(unseen, wrong), "loss": float(-np.log(np.maximum(given, 1e-9)).mean())}


def _fitted_evidence(chunks: Chunks, unseen: Vector) -> dict[str, float]:
    """Return the evidence for the fitted gate: each half of the replies is judged by the policy of the other."""
    found, halves = {}, [chunks.reply % 2 == half for half in (0, 1)]
    for share in SHARES:
        right: list[float] = []
        for own in halves:
            if own.any() and not own.all():
                policy = fit_policy(chunks.part(~own), unseen[~own], share)
                ours = chunks.part(own)
                missed = ours.by_reply(ours.wrong & ~follow(ours, unseen[own], policy))
                right += np.where(missed.any(axis=1), 0.0, 1.0).tolist()
        found[f"gate worth at {share}"] = float(np.mean(right)) if right else 0.0
    return found
