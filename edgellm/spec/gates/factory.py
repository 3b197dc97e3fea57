"""The choice of a gate from a user's options: which gate, at which setting, on what evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from edgellm.spec.gates.rules import (
    AlwaysGate,
    BudgetController,
    BudgetGate,
    ConfidenceGate,
    CountingGate,
    ImportanceGate,
    NeverGate,
    RandomGate,
    Rule,
    SyneraGate,
    TailGate,
)
from edgellm.spec.params import CHUNK, ReplyOptions
from edgellm.spec.protocols import Gate

if TYPE_CHECKING:
    from edgellm.spec.gates.profile import Profile

AUTO = ("worth", "confidence", "importance", "synera", "random")
"""The gates that `auto` chooses from, the likeliest first: with equal evidence the first one wins."""

DOUBT = 0.5
"""Below this confidence a token is more likely wrong than right, and drafts after it are wasted. A device that waits
for its verifier should ask at once; otherwise a verdict on a whole chunk is worth more."""

_STEPS = 64  # settings between the shares 0 and 1 that a gate is built for


@dataclass(frozen=True, slots=True)
class GateChoice:
    """A gate with its settings for a reply.

    `gamma` is the length of a chunk; `layers` are those whose attention the gate needs; `controller` keeps a budget. A
    chunk ends after a token with a confidence below `stop_below`. Below `lookup_below`, the context's token is drafted
    instead.
    """

    gate: Gate
    reason: str
    gamma: int
    layers: tuple[int, ...] = ()
    controller: BudgetController | None = None
    stop_below: float = 0.0
    lookup_below: float = 0.0


def needs_profile(options: ReplyOptions) -> bool:
    """Return whether these options require a profile of the pair."""
    return (
        options.budget is not None and 0.0 < options.budget < 1.0 and options.gate not in ("always", "never", "random")
    )


def choose(
    options: ReplyOptions,
    seed: int,
    *,
    profile: Profile | None,
    controller: BudgetController,
    linked: bool = False,
) -> GateChoice:
    """Return the requested gate. Its draws come from `seed`, and `controller` keeps its budget.

    `profile` is required if `needs_profile`. `linked`: the verifier is across a link, so the device waits for it.
    """
    gate, budget = options.gate, options.budget
    gamma = options.gamma or CHUNK
    if not isinstance(gate, str):
        return _with_counting(gate, "a custom gate", gamma, controller)
    if gate == "never" or budget == 0.0:
        return GateChoice(NeverGate(), "nothing is verified, as requested", gamma)
    if gate == "always" or budget == 1.0:
        return _with_counting(AlwaysGate(), "everything is verified, as requested", gamma, controller)
    if budget is None:
        if gate == "confidence":
            threshold = ConfidenceGate(options.confidence_threshold, seed)
            return _with_counting(threshold, "a confidence threshold without a budget", gamma, controller)
        return _with_counting(AlwaysGate(), "no budget is given, so everything is verified", gamma, controller)
    gamma = options.gamma or (CHUNK if profile is None else profile.gamma)
    if gate == "random" or profile is None:
        budgeted = BudgetGate(lambda share: RandomGate(share, seed), budget, controller)
        return _with_tail(budgeted, "chunks are chosen at random", gamma, controller)
    reason = f"the {gate} gate, as requested"
    if gate == "auto":
        gate, reason = best_gate(profile, budget)
    if gate == "worth":
        from edgellm.spec.gates.fitted import LearnedGate

        chosen: Gate = LearnedGate(profile, budget, controller, seed)
    else:
        chosen = BudgetGate(_gate_at_share(gate, profile, seed), budget, controller)
    layers = profile.layers if gate in ("importance", "synera") else ()
    choice = _with_tail(chosen, reason, gamma, controller, layers)
    if gate != "worth":
        return choice
    lookup_below = profile.hesitates if options.context_lookup else 0.0
    note = f"; below a confidence of {lookup_below:.2f} the context's token is drafted" if lookup_below > 0.0 else ""
    return replace(choice, stop_below=DOUBT if linked else 0.0, lookup_below=lookup_below, reason=choice.reason + note)


def best_gate(profile: Profile, budget: float) -> tuple[str, str]:
    """Return the gate with the best evidence in the profile at the budget nearest to this one, and that evidence."""
    from edgellm.spec.gates.offload_policy import SHARES

    share = min(SHARES, key=lambda known: abs(known - budget))
    gains = {name: profile.evidence.get(f"gate {name} at {share}", 0.0) for name in AUTO}
    best = max(AUTO, key=lambda name: gains[name])
    others = ", ".join(f"{name} {gains[name]:.0%}" for name in AUTO if name != best)
    shown = "the fitted gate" if best == "worth" else f"the {best} gate"
    chosen = f"with {share:.0%} of chunks verified, {gains[best]:.0%} of the profiled replies equal the verifier's"
    return best, f"{shown}: {chosen} ({others})"


def _gate_at_share(gate: str, profile: Profile, seed: int) -> Callable[[float], Rule]:
    """Return a function from a share of chunks to the gate of that name which offloads it."""

    @lru_cache(maxsize=_STEPS + 1)
    def at(step: int) -> Rule:
        share = step / _STEPS
        if gate == "confidence":
            return ConfidenceGate(profile.confidence_threshold(share), seed)
        if gate == "importance":
            return ImportanceGate(profile.i_th(share, coarse=False), seed, profile.usual_importance)
        return SyneraGate(profile.c_th, profile.i_th(share), seed, profile.usual_importance)

    return lambda share: at(min(_STEPS, max(1, round(share * _STEPS))))


def _with_counting(gate: Gate, reason: str, gamma: int, controller: BudgetController) -> GateChoice:
    return GateChoice(CountingGate(gate, controller), reason, gamma, gate.layers, controller=controller)


def _with_tail(
    gate: Gate, reason: str, gamma: int, controller: BudgetController, layers: tuple[int, ...] = ()
) -> GateChoice:
    """Return the gate with the limit for every budget below 1: the tail of a long reply is not verified."""
    return GateChoice(TailGate(gate, controller), reason, gamma, layers, controller=controller)
