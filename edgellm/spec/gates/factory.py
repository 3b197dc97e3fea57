"""The choice of a gate from a user's options: which gate, at which setting, on what evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from edgellm.spec.gates.rules import (
    AlwaysGate,
    BudgetController,
    BudgetGate,
    ConfidenceGate,
    CountedGate,
    NeverGate,
    RandomGate,
    Rule,
    judge_at,
)
from edgellm.spec.mechanisms import load
from edgellm.spec.params import CHUNK, GATES, ReplyOptions
from edgellm.spec.protocols import Gate

if TYPE_CHECKING:
    from edgellm.spec.gates.profile import Profile

FITTED = "worth"
"""The name of the fitted gate, which only `auto` chooses."""
AUTO = (FITTED, *(name for name, kind in GATES.items() if kind.rule))
"""The gates that `auto` chooses from: with equal evidence the first one wins."""

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
    return options.budget is not None and 0.0 < options.budget < 1.0 and options.gate != "random"


def choose(
    options: ReplyOptions, seed: int, *, profile: Profile | None, controller: BudgetController, linked: bool = False
) -> GateChoice:
    """Return the requested gate. Its draws come from `seed`, and `controller` keeps its budget.

    `profile` is required if `needs_profile`. `linked`: the verifier is across a link, so the device waits for it.
    """
    gate, budget, gamma = options.gate, options.budget, options.gamma or CHUNK

    def counted(gate: Gate, reason: str) -> GateChoice:
        return GateChoice(CountedGate(gate, controller), reason, gamma, gate.layers, controller)

    if not isinstance(gate, str):
        return counted(gate, "a custom gate")
    if budget is None and (budget := GATES[gate].stands_for) is None:
        if gate == "confidence":
            return counted(
                ConfidenceGate(options.confidence_threshold, seed), "a confidence threshold without a budget"
            )
        return counted(AlwaysGate(), "no budget is given, so everything is verified")
    if budget == 0.0:
        return GateChoice(NeverGate(), "nothing is verified, as requested", gamma)
    if budget == 1.0:
        return counted(AlwaysGate(), "everything is verified, as requested")
    if profile is None:
        judge = judge_at(lambda share: RandomGate(share, seed), controller)
        return GateChoice(
            BudgetGate(judge, budget, controller), "chunks are chosen at random", gamma, controller=controller
        )
    gamma, reason = options.gamma or profile.terms.gamma, f"the {gate} gate, as requested"
    if gate == "auto":
        gate, reason = best_gate(profile, budget)
    if gate != FITTED:
        judge = judge_at(_gate_at_share(gate, profile, seed), controller)
        layers = profile.terms.layers if GATES[gate].importance else ()
        return GateChoice(BudgetGate(judge, budget, controller), reason, gamma, layers, controller)
    from edgellm.spec.gates.fitted import FittedJudge

    lookup_below = profile.hesitates if options.context_lookup else 0.0
    if lookup_below > 0.0:
        reason += f"; below a confidence of {lookup_below:.2f} the context's token is drafted"
    return GateChoice(
        BudgetGate(FittedJudge(profile, budget, seed), budget, controller), reason, gamma, controller=controller,
        stop_below=DOUBT if linked else 0.0, lookup_below=lookup_below,
    )  # fmt: skip


def best_gate(profile: Profile, budget: float) -> tuple[str, str]:
    """Return the gate with the best evidence in the profile at the budget nearest to this one, and that evidence."""
    from edgellm.spec.gates.fitted import SHARES

    share = min(SHARES, key=lambda known: abs(known - budget))
    gains = {name: profile.evidence.get(f"gate {name} at {share}", 0.0) for name in AUTO}
    best = max(AUTO, key=lambda name: gains[name])
    others = ", ".join(f"{name} {gains[name]:.0%}" for name in AUTO if name != best)
    shown = "the fitted gate" if best == FITTED else f"the {best} gate"
    chosen = f"with {share:.0%} of chunks verified, {gains[best]:.0%} of the profiled replies equal the verifier's"
    return best, f"{shown}: {chosen} ({others})"


def rules_of(profile: Profile, share: float) -> dict[str, Rule]:
    """Return the rule of each named gate that keeps a budget, at its setting for this share."""
    return {name: load(kind.rule).at_share(profile, share, 0) for name, kind in GATES.items() if kind.rule}


def _gate_at_share(gate: str, profile: Profile, seed: int) -> Callable[[float], Rule]:
    """Return a function from a share of chunks to the gate of that name which offloads it."""
    kind = load(GATES[gate].rule)

    @lru_cache(maxsize=_STEPS + 1)
    def at(step: int) -> Rule:
        rule: Rule = kind.at_share(profile, step / _STEPS, seed)
        return rule

    return lambda share: at(min(_STEPS, max(1, round(share * _STEPS))))
