"""A pair's profile: offline observations, and the gate settings derived from them (Synera, section 5)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgellm.errors import ProfileUnusable, StateDamaged
from edgellm.spec.gates.offload_policy import (
    JUDGED,
    KINDS,
    LINEAR,
    TREES,
    Policy,
    Predictor,
    Trees,
    as_fields,
    from_fields,
)
from edgellm.spec.gates.prompt_difficulty import USUAL, PromptDifficulty
from edgellm.spec.gates.rules import p_conf, p_imp
from edgellm.spec.mechanisms import MECHANISMS, mechanism
from edgellm.storage.state import fields_from_json, from_json, read_json, write_state

VERSION = 6
_GAMMA_MOST = 1024


@dataclass(frozen=True, slots=True)
class ExitPoint:
    """A measured early exit after `layer`: the share of tokens that `left` there, the share of these with which full
    depth agrees, and the seconds per drafted token with the exit and at full depth."""

    layer: int
    left: float
    agreement: float
    seconds: float
    full_seconds: float


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of a pair of models, bound to their hashes.

    `c_th`, `alpha` and `acceptance` (share of chunks whose first i + 1 tokens are accepted, i in 0..gamma-1) come from
    fully verified replies, and so do `policies`. `confidence` and `importance` (n,) are chunk means in unverified
    replies; `tokens` are confidences of single tokens there, `perplexities` those of whole replies. Times are in
    seconds; `batch_seconds[i]` is the draft model's time for i + 1 rows, empty if not measured. `origin` is `prompts`
    or `first replies`. `hesitates` is the confidence below which the context's token is drafted. `difficulty` estimates
    that of a prompt from its tokens.
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
    tokens: tuple[float, ...]
    perplexities: tuple[float, ...]
    policies: tuple[Policy, ...]
    evidence: dict[str, float]
    draft_seconds: float
    verify_seconds: float
    origin: str = "prompts"
    batch_seconds: tuple[float, ...] = ()
    exits: tuple[ExitPoint, ...] = ()
    hesitates: float = 0.0
    difficulty: PromptDifficulty = USUAL

    @property
    def has_words(self) -> bool:
        """Return whether the profile contains tokens of its prompts."""
        return bool(self.difficulty.tokens)

    def without_words(self) -> Profile:
        """Return the same profile without tokens of prompts."""
        return replace(self, difficulty=self.difficulty.without_words())

    @property
    def usual_importance(self) -> float:
        """Return the median of a chunk's importance."""
        return float(np.median(self.importance)) if self.importance else 0.0

    def policy(self, budget: float) -> Policy:
        """Return the policy for the budget nearest to this one."""
        return min(self.policies, key=lambda policy: abs(policy.share - budget))

    @property
    def predictor_summary(self) -> str:
        """Return the chosen predictor of rejections, and why."""
        losses = {kind: self.evidence[f"loss {kind}"] for kind in KINDS if f"loss {kind}" in self.evidence}
        described = ", ".join(f"{KINDS[kind]} {loss:.3f}" for kind, loss in losses.items()) or "not measured"
        kind = TREES if isinstance(self.policies[0].rejected, Trees) else LINEAR
        return f"by {KINDS[kind]} (log loss on unseen replies: {described})"

    def best_exit(self) -> tuple[int | None, str]:
        """Return the layer after which an early exit pays most, None if it pays nowhere, and why."""
        if not self.exits or "early exit" not in MECHANISMS:
            return None, "early exit was not measured"
        best: tuple[int | None, str] = mechanism("early exit").best_exit(self.exits)
        return best

    def i_th(self, budget: float, coarse: bool = True) -> float:
        """Return the importance threshold at which the realised share of Synera's two-stage gate is the budget.

        Without `coarse` the share is that of the fine filter alone.
        """
        importance = np.array(self.importance)
        chances = p_conf(np.array(self.confidence), self.c_th) if coarse else np.ones(len(importance))

        def share(i_th: float) -> float:
            return float((chances * p_imp(importance, i_th)).mean())

        return solve(share, budget, 0.0, 2.0 * max(self.importance) + 1e-6)

    def confidence_threshold(self, budget: float) -> float:
        """Return the c_th at which the realised share of P_conf alone is the budget."""

        confidence = np.array(self.confidence)

        def share(doubt: float) -> float:
            return float(p_conf(confidence, 1.0 - doubt).mean())

        return 1.0 - solve(share, budget, 0.0, 1.0)

    def save(self, path: Path) -> None:
        """Write the profile as JSON, whole or not at all, readable for the user alone. Raises OSError if that fails."""
        fields = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        fields |= {
            "version": VERSION,
            "rejected": as_fields(self.policies[0].rejected),  # All policies have the same.
            "policies": [_fields(policy) for policy in self.policies],
            "exits": [asdict(point) for point in self.exits],
            "trouble": asdict(fields.pop("difficulty")),
        }
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
        write_state(path, f"{{\n{lines}\n}}\n")

    @classmethod
    def load(cls, path: Path, *, own: bool = False) -> Profile:
        """Load a saved profile. `own`: the file belongs to edgellm, so it must not be a link.

        Raises:
            ProfileUnusable: there is no such file, or it is not a profile of this version.
        """
        try:
            found = read_json(path, _parse, links=not own)
        except StateDamaged as error:
            raise ProfileUnusable(error.what, "Make a new one with edgellm profile.") from None
        if found is None:
            raise ProfileUnusable(f"There is no file {path}.", "Make one with edgellm profile.")
        return found


def _parse(found: dict[str, Any]) -> Profile:
    """Return the profile in JSON. Invalid JSON raises KeyError, TypeError or ValueError."""
    fields = dict(found)
    if fields.pop("version") != VERSION:
        raise ValueError(f"its version is not {VERSION}")
    rejected = from_fields(fields.pop("rejected"))
    policies = tuple(_policy(fitted, rejected) for fitted in fields.pop("policies"))
    difficulty = from_json(PromptDifficulty, fields.pop("trouble"))
    evidence = {str(name): float(value) for name, value in fields.pop("evidence").items()}  # Some are NaN.
    profile = Profile(**fields_from_json(Profile, fields), policies=policies, evidence=evidence, difficulty=difficulty)
    if not (policies and profile.confidence and profile.importance and profile.tokens and profile.perplexities):
        raise ValueError("measurements are missing")
    if len(difficulty.tokens) != len(difficulty.weights):
        raise ValueError(f"there are {len(difficulty.tokens)} tokens of prompts, and {len(difficulty.weights)} weights")
    if not 1 <= profile.gamma <= _GAMMA_MOST:
        raise ValueError(f"gamma is {profile.gamma}")
    return profile


def _fields(policy: Policy) -> dict[str, Any]:
    return {"share": policy.share, "hope": as_fields(policy.continuation), "scores": policy.scores}


def _policy(fields: dict[str, Any], rejected: Predictor) -> Policy:
    continuation = from_fields(fields["hope"], len(JUDGED) + 1)
    return Policy(float(fields["share"]), rejected, continuation, tuple(map(float, fields["scores"])))


def solve(share_at: Callable[[float], float], budget: float, low: float, high: float) -> float:
    """Return the x in [low, high] where `share_at`, which never rises with x, comes down to `budget`; by bisection.

    Return `low` where even that offers no more than the budget, `high` where every x offers more.
    """
    if share_at(low) <= budget:
        return low
    if share_at(high) > budget:
        return high
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if share_at(middle) > budget else (low, middle)
    return high
