"""The paper's gate (Synera, section 4.2), and its fine filter alone: they need the importance of drafted tokens."""

import numpy as np

from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import Chances, Numbers, p_conf, solve


def by_importance(profile: Profile, share: float) -> Chances:
    """Return the fine filter, which verifies this share of chunks like the profiled ones: those that later tokens
    attend to go with probability P_imp."""
    threshold = i_th(profile, share, coarse=False)
    return lambda _, importance: p_imp(importance, threshold)


def by_both(profile: Profile, share: float) -> Chances:
    """Return the paper's gate: a chunk is verified if it passes the coarse filter, P_conf, and then the fine one,
    P_imp."""
    return above(profile, i_th(profile, share))


def above(profile: Profile, threshold: float) -> Chances:
    """Return the paper's gate with this importance threshold."""
    return lambda confidence, importance: p_conf(confidence, profile.c_th) * p_imp(importance, threshold)


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
