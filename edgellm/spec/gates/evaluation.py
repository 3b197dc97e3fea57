"""Evaluation of signals and gates on a pair's profiled replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgellm.spec.gates.features import NAMES
from edgellm.spec.gates.offload_policy import SHARES, fit_policies, simulate
from edgellm.spec.gates.profiler import Run
from edgellm.spec.gates.rejection_model import Rejection, auc


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


class Thresholds(Protocol):
    """The settings at which gates offload a given share of chunks; see `Profile`."""

    @property
    def c_th(self) -> float: ...

    def i_th(self, budget: float, coarse: bool = True) -> float: ...

    def confidence_threshold(self, budget: float) -> float: ...


def gate_evidence(profile: Thresholds, runs: Sequence[Run], rejection: Rejection) -> dict[str, float]:
    """Return `gate ... at b`: the share of replies equal to the verifier's own when a gate spends the budget b.

    A reply counts if each chunk that would be rejected is offloaded. The gates' settings come from the same chunks,
    except for the fitted gate (`worth`), which is evaluated on held-out prompts.
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
            "confidence": all_conf(confidence, profile.confidence_threshold(share)),
            "importance": all_imp(importance, profile.i_th(share, coarse=False)),
            "synera": coarse * all_imp(importance, profile.i_th(share)),
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


def all_conf(c: npt.NDArray[np.float64], c_th: float, k: float = 10.0) -> npt.NDArray[np.float64]:
    """Return `p_conf` of many chunks."""
    if c_th >= 1.0:
        return np.ones(len(c))
    chances: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(k * (np.maximum(c - c_th, 0.0) / (1.0 - c_th) - 0.5)))
    return np.where(c <= c_th, 1.0, chances)


def all_imp(i: npt.NDArray[np.float64], i_th: float, theta: float = -10.0) -> npt.NDArray[np.float64]:
    """Return `p_imp` of many chunks."""
    half = max(i_th / 2.0, 1e-12)
    chances: npt.NDArray[np.float64] = 1.0 / (1.0 + np.exp(theta * (np.clip((i - half) / half, 0.0, 1.0) - 0.5)))
    return np.where(i > i_th, 1.0, np.where(i <= half, 0.0, chances))
