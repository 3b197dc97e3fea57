"""The paper's gate (Synera, section 4.2), and its fine filter alone: they need the importance of drafted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from edgellm.spec.gates.rules import Numbers, Rule, p_conf, solve

if TYPE_CHECKING:
    from edgellm.spec.gates.profile import Profile


class ImportanceGate(Rule):
    """The fine filter: chunks that later tokens attend to go with probability P_imp."""

    def __init__(self, i_th: float, seed: int = 0, usual_importance: float = 0.0) -> None:
        """Always verify a chunk whose mean importance is above `i_th`, and none at or below half of `i_th`."""
        super().__init__(seed, usual_importance)
        self._i_th = i_th

    @classmethod
    def at_share(cls, profile: Profile, share: float, seed: int) -> Self:
        return cls(i_th(profile, share, coarse=False), seed, profile.usual_importance)

    def chances(self, confidence: Numbers, importance: Numbers) -> Numbers:  # noqa: ARG002
        return p_imp(importance, self._i_th)


class SyneraGate(Rule):
    """The paper's gate: a chunk is verified if it passes the coarse filter, P_conf, and then the fine one, P_imp."""

    def __init__(self, c_th: float, i_th: float, seed: int = 0, usual_importance: float = 0.0) -> None:
        """Take `c_th` as for `ConfidenceGate`, the others as for `ImportanceGate`."""
        super().__init__(seed, usual_importance)
        self._c_th, self._i_th = c_th, i_th

    @classmethod
    def at_share(cls, profile: Profile, share: float, seed: int) -> Self:
        return cls(profile.c_th, i_th(profile, share), seed, profile.usual_importance)

    def chances(self, confidence: Numbers, importance: Numbers) -> Numbers:
        return p_conf(confidence, self._c_th) * p_imp(importance, self._i_th)


def p_imp(i: float | Numbers, i_th: float) -> Numbers:
    """Return P_imp (Synera section 4.2): the probability that a chunk of mean importance `i` is verified."""
    half = max(i_th / 2.0, 1e-12)
    chances = 1.0 / (1.0 + np.exp(-10.0 * (np.clip((i - half) / half, 0.0, 1.0) - 0.5)))
    return np.where(i > i_th, 1.0, np.where(i <= half, 0.0, chances))


def i_th(profile: Profile, share: float, *, coarse: bool = True) -> float:
    """Return the importance threshold at which the gate verifies this share of chunks; not `coarse`: the fine filter
    alone."""
    importance = np.array(profile.alone.importance)
    chances = p_conf(np.array(profile.alone.confidence), profile.c_th) if coarse else np.ones(len(importance))
    highest = 2.0 * max(profile.alone.importance) + 1e-6
    return solve(lambda threshold: float((chances * p_imp(importance, threshold)).mean()), share, 0.0, highest)
