"""A pair's profile: what was seen of it offline, and what the gates make of that (Synera, section 5)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.errors import InvalidOption, ProfileUnusable
from edgellm.spec.budget import solve
from edgellm.spec.gates import p_conf, p_imp
from edgellm.spec.predictor import Predictor, auc, fit
from edgellm.spec.profiling import Observed, Run
from edgellm.spec.signals import NAMES

VERSION = 1
KEPT = 512
"""Sampled chunks that a profile keeps: quantiles of a budget need no more."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What is known of a pair of models, bound to their hashes.

    `c_th`, `alpha` and `acceptance` (share of chunks whose first i + 1 tokens are accepted, i in 0..gamma-1) come from
    fully verified replies. `confidence` and `importance` (n,) are chunk means in replies that nobody verified, `worth`
    (n,) the predictor's scores of the same chunks; `tokens` are confidences of single tokens there, `perplexities`
    those of whole replies. Times in seconds.
    """

    draft_hash: str
    verifier_hash: str
    gamma: int
    prompts: int
    chunks: int
    c_th: float
    alpha: float
    acceptance: tuple[float, ...]
    layers: tuple[int, ...]
    confidence: tuple[float, ...]
    importance: tuple[float, ...]
    worth: tuple[float, ...]
    tokens: tuple[float, ...]
    perplexities: tuple[float, ...]
    predictor: Predictor
    evidence: dict[str, float]
    draft_seconds: float
    verify_seconds: float

    def i_th(self, budget: float, coarse: bool = True) -> float:
        """The importance threshold at which the realised share of Synera's two-stage gate is the budget.

        Without `coarse` that of the fine filter alone.
        """
        chances = [p_conf(c, self.c_th) if coarse else 1.0 for c in self.confidence]

        def share(i_th: float) -> float:
            fine = (p_imp(i, i_th) for i in self.importance)
            return sum(c * f for c, f in zip(chances, fine, strict=True)) / len(chances)

        return solve(share, budget, 0.0, 2.0 * max(self.importance) + 1e-6)

    def confidence_threshold(self, budget: float) -> float:
        """The c_th at which the realised share of P_conf alone is the budget."""

        def share(doubt: float) -> float:
            return sum(p_conf(c, 1.0 - doubt) for c in self.confidence) / len(self.confidence)

        return 1.0 - solve(share, budget, 0.0, 1.0)

    def token_threshold(self, budget: float) -> float:
        """The confidence below which the share of tokens is the budget (Hybrid)."""
        return float(np.quantile(self.tokens, budget))

    def reply_threshold(self, budget: float) -> float:
        """The perplexity above which the share of replies is the budget (EdgeFM)."""
        return float(np.quantile(self.perplexities, 1.0 - budget))

    def save(self, path: Path) -> None:
        """Writes it as JSON, whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1), encoding="utf-8")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads what `save` wrote.

        Raises:
            ProfileUnusable: there is no such file, or it is not a profile of this version.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            if fields.pop("version") != VERSION:
                raise ValueError("another version")
            fitted = fields.pop("predictor")
            predictor = Predictor(tuple(fitted["weights"]), fitted["bias"])
            lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
            return cls(**{**fields, **lists}, predictor=predictor)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ProfileUnusable(f"{path} is no profile that can be used ({error}).", "Run edgellm profile.") from None


def build(
    runs: Sequence[Run], *, draft_hash: str, verifier_hash: str, gamma: int, layers: tuple[int, ...] = ()
) -> Profile:
    """The profile that `runs` amount to.

    Raises:
        InvalidOption: the runs hold too few chunks to say anything.
    """
    verified = [seen for run in runs for seen in run.verified]
    alone = [seen for run in runs for seen in run.alone]
    if len(alone) < 8:
        raise InvalidOption(f"{len(runs)} prompts brought only {len(alone)} chunks.", "Profile on more prompts.")
    whole = [seen.confidence for seen in verified if seen.whole and seen.tokens == gamma]
    acceptance = [
        float(np.mean([seen.accepted > place for seen in verified if seen.tokens > place] or [False]))
        for place in range(gamma)
    ]
    x = np.array([seen.signals for seen in alone])
    worth = worth_of(alone)
    predictor = fit(x, worth)
    step = max(1, len(alone) // KEPT)
    tokens = [c for run in runs for c in run.confidence]
    return Profile(
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
        worth=_rounded(predictor.scores(x)[::step].tolist()),
        tokens=_rounded(tokens[:: max(1, len(tokens) // KEPT)]),
        perplexities=_rounded([perplexity(run.confidence) for run in runs][:KEPT]),
        predictor=predictor,
        evidence=evidence(runs),
        draft_seconds=float(np.median([s for run in runs for s in run.draft_seconds])),
        verify_seconds=float(np.median([s for run in runs for s in run.verify_seconds])),
    )


def alpha_of(tokens: float, gamma: int) -> float:
    """The acceptance rate for which a round brings `tokens` on average: (1 - alpha^(gamma+1)) / (1 - alpha)."""

    def less(alpha: float) -> float:
        return -sum(alpha**i for i in range(gamma + 1))

    return solve(less, -tokens, 0.0, 1.0)


def perplexity(confidence: Sequence[float]) -> float:
    """exp of the mean surprise of tokens that were each the most probable one; 1 for an empty reply."""
    return float(np.exp(-np.mean(np.log(np.maximum(confidence, 1e-9))))) if len(confidence) else 1.0


def worth_of(seen: Sequence[Observed]) -> npt.NDArray[np.float64]:
    """What verifying each chunk gains, in 0..1; a correction that makes the reply worse is worth nothing."""
    return np.clip([each.gain for each in seen], 0.0, 1.0)


def evidence(runs: Sequence[Run]) -> dict[str, float]:
    """What each score is good for, on prompts that it was not fitted on.

    `auc ...`: the chance that a rejected chunk scores higher than an accepted one. `gain ... at b`: the share of all
    that corrections of single chunks gain which lies in the b highest-scored chunks.
    """
    halves = [[seen for run in runs[start::2] for seen in run.alone] for start in (0, 1)]
    if not all(halves):
        return {}
    collected: dict[str, list[npt.NDArray[np.float64]]] = {"worth": [], **{name: [] for name in NAMES}}
    for ours, others in (halves, halves[::-1]):
        x = np.array([seen.signals for seen in ours])
        trained = fit(np.array([seen.signals for seen in others]), worth_of(others))
        collected["worth"].append(trained.scores(x))
        for place, name in enumerate(NAMES):
            sign = -1.0 if "margin" in name else 1.0
            collected[name].append(sign * x[:, place])
    seen = [*halves[0], *halves[1]]
    rejected = np.array([not each.whole for each in seen])
    gains = np.array([each.gain for each in seen])
    found: dict[str, float] = {}
    for name, parts in collected.items():
        scores = np.concatenate(parts)
        found[f"auc {name}"] = auc(scores, rejected)
        order = np.argsort(-scores, kind="stable")
        for share in (0.1, 0.2, 0.4):
            taken = gains[order[: round(share * len(order))]].sum()
            found[f"gain {name} at {share}"] = float(taken / gains.sum()) if gains.sum() > 0 else 0.0
    return {name: round(value, 4) for name, value in found.items() if np.isfinite(value)}


def _rounded(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(float(value), 6) for value in values)
