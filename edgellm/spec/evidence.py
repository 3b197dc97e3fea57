"""What signals and gates are good for, by what was seen of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgellm.spec.policy import SHARES, fit_policies, follow
from edgellm.spec.predictor import auc, fit
from edgellm.spec.profiling import Observed, Run
from edgellm.spec.signals import JUDGED, NAMES

if TYPE_CHECKING:
    from edgellm.spec.profile import Profile


def evidence(runs: Sequence[Run]) -> dict[str, float]:
    """What each signal is good for: `auc ...`, the chance that a rejected chunk scores higher than an accepted one.

    `auc rejected` is that of the fitted predictor, on prompts that it was not fitted on.
    """
    seen = [chunk for run in runs for chunk in run.judged]
    x, wrong = np.array([chunk.signals for chunk in seen]), np.array([not chunk.whole for chunk in seen])
    found = {f"auc {name}": auc(-x[:, at] if "margin" in name else x[:, at], wrong) for at, name in enumerate(NAMES)}
    scores, truth = [], []
    for ours, others in ((runs[::2], runs[1::2]), (runs[1::2], runs[::2])):
        fitted = [chunk for run in others for chunk in run.judged]
        judged = [chunk for run in ours for chunk in run.judged]
        if not fitted or not judged:
            return {}
        trained = fit(_judged(fitted), np.array([float(not chunk.whole) for chunk in fitted]))
        scores.append(trained.scores(_judged(judged)))
        truth.append([not chunk.whole for chunk in judged])
    found["auc rejected"] = auc(np.concatenate(scores), np.concatenate(truth))
    return {name: round(value, 4) for name, value in found.items() if np.isfinite(value)}


def gate_evidence(profile: Profile, runs: Sequence[Run]) -> dict[str, float]:
    """`gate ... at b`: the share of replies that come out as the verifier's own where a gate spends the budget b.

    A reply does so where each chunk that would be rejected is offloaded. The gates' settings come from the same
    chunks, but for the fitted one (`worth`), which is judged on prompts that it was not fitted on.
    """
    seen = [chunk for run in runs for chunk in run.verified]
    confidence, importance = (np.array([getattr(each, name) for each in seen]) for name in ("confidence", "importance"))
    wrong = np.array([not chunk.whole for chunk in seen])
    reply = np.repeat(np.arange(len(runs)), [len(run.verified) for run in runs])
    coarse = all_conf(confidence, profile.c_th)

    def right(chances: npt.NDArray[np.float64]) -> float:
        kept = np.ones(len(runs))
        np.multiply.at(kept, reply[wrong], chances[wrong])
        return float(kept.mean())

    found: dict[str, float] = {}
    for at, share in enumerate(SHARES):
        chances = {
            "confidence": all_conf(confidence, profile.confidence_threshold(share)),
            "importance": all_imp(importance, profile.i_th(share, coarse=False)),
            "synera": coarse * all_imp(importance, profile.i_th(share)),
            "random": np.full(len(seen), share),
        }
        for name, chance in chances.items():
            found[f"gate {name} at {share}"] = right(_at_share(chance, share))
        halves = []
        for ours, others in ((runs[::2], runs[1::2]), (runs[1::2], runs[::2])):
            if any(run.judged for run in others):
                followed = [run for run in ours if run.judged]
                taken = follow(followed, fit_policies(others)[at])
                halves += [
                    all(flag or chunk.whole for flag, chunk in zip(flags.tolist(), run.judged, strict=True))
                    for flags, run in zip(taken, followed, strict=True)
                ]
        found[f"gate worth at {share}"] = float(np.mean(halves)) if halves else 0.0
    return {name: round(value, 4) for name, value in found.items()}


def _judged(seen: Sequence[Observed]) -> npt.NDArray[np.float64]:
    return np.array([chunk.signals for chunk in seen])[:, list(JUDGED)]


def _at_share(chances: npt.NDArray[np.float64], share: float) -> npt.NDArray[np.float64]:
    """What a ledger makes of a gate that offloads more than the budget, or less: as if the rest fell at random."""
    mean = float(chances.mean())
    if mean > share:
        return chances * (share / mean)
    return chances + (1.0 - chances) * ((share - mean) / max(1.0 - mean, 1e-9))


def all_conf(c: npt.NDArray[np.float64], c_th: float, k: float = 10.0) -> npt.NDArray[np.float64]:
    """`p_conf` of many chunks."""
    if c_th >= 1.0:
        return np.ones(len(c))
    chances: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(k * (np.maximum(c - c_th, 0.0) / (1.0 - c_th) - 0.5)))
    return np.where(c <= c_th, 1.0, chances)


def all_imp(i: npt.NDArray[np.float64], i_th: float, theta: float = -10.0) -> npt.NDArray[np.float64]:
    """`p_imp` of many chunks."""
    half = max(i_th / 2.0, 1e-12)
    chances: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(theta * (np.clip((i - half) / half, 0.0, 1.0) - 0.5)))
    return np.where(i > i_th, 1.0, np.where(i <= half, 0.0, chances))
