"""What signals and gates are good for, by what was seen of a pair."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgellm.spec.predictor import auc, fit
from edgellm.spec.profiling import Observed, Run
from edgellm.spec.signals import NAMES

if TYPE_CHECKING:
    from edgellm.spec.profile import Profile

SHARES = (0.1, 0.2, 0.4)
"""Budgets at which evidence is collected."""


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
        for share in SHARES:
            taken = gains[order[: round(share * len(order))]].sum()
            found[f"gain {name} at {share}"] = float(taken / gains.sum()) if gains.sum() > 0 else 0.0
    return {name: round(value, 4) for name, value in found.items() if np.isfinite(value)}


def gate_evidence(profile: Profile, seen: Sequence[Observed]) -> dict[str, float]:
    """What each gate would find: the expected share of all that corrections of single chunks gain, at some budgets.

    `gate ... at b`. The gates' settings come from the same chunks, but for the predictor (`worth`), which is judged on
    prompts that it was not fitted on.
    """
    gains = np.array([each.gain for each in seen])
    total = float(gains.sum())
    if total <= 0.0:
        return {}
    confidence = np.array([each.confidence for each in seen])
    importance = np.array([each.importance for each in seen])
    coarse = all_conf(confidence, profile.c_th)
    found: dict[str, float] = {}
    for share in SHARES:
        chances = {
            "confidence": all_conf(confidence, profile.confidence_threshold(share)),
            "importance": all_imp(importance, profile.i_th(share, coarse=False)),
            "synera": coarse * all_imp(importance, profile.i_th(share)),
        }
        # what a gate offloads beyond or below the budget is set right by its ledger, as if at random
        for name, chance in chances.items():
            found[f"gate {name} at {share}"] = (
                float((chance * gains).sum()) / total * min(1.0, share / max(chance.mean(), 1e-9))
            )
        found[f"gate worth at {share}"] = profile.evidence.get(f"gain worth at {share}", 0.0)
        found[f"gate random at {share}"] = share
    return {name: round(value, 4) for name, value in found.items()}


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
