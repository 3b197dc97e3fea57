"""The choice of a gate from a user's options: which gate, at which setting, on what evidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from edgellm.spec.gates.budget import BudgetController
from edgellm.spec.gates.learned import LearnedGate
from edgellm.spec.gates.offload_policy import SHARES
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import (
    AlwaysGate,
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
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Decision

AUTO = ("worth", "confidence", "importance", "synera", "random")
"""The gates that `auto` chooses from, the likeliest first: with equal evidence the first one wins."""

DOUBT = 0.5
"""A token of less confidence is more likely wrong than right, and whatever is drafted behind it is wasted. A device
that waits for its verifier had better ask at once; one that does not gains more from a verdict on a whole chunk."""

_STEPS = 64  # settings between a share of 0 and of 1 that are worked out


@dataclass(frozen=True, slots=True)
class GateChoice:
    """A gate with its setting for a reply.

    `gamma` drafted tokens a chunk; `layers`: whose attention the gate needs; `ledger` counts where a share is to be
    kept. A chunk ends early behind a token whose confidence is below `stop_below`. Where it is below `lookup_below`,
    what the context says is drafted instead.
    """

    gate: Gate
    reason: str
    gamma: int
    layers: tuple[int, ...] = ()
    ledger: BudgetController | None = None
    stop_below: float = 0.0
    lookup_below: float = 0.0


class BudgetGate(Gate):
    """A gate with one dial, turned with every chunk so that the share really offloaded stays the budget."""

    def __init__(self, at: Callable[[float], Rule], budget: float, ledger: BudgetController) -> None:
        """Keep `budget`; `at` returns the gate that offloads a share in (0, 1) of chunks like the profiled ones."""
        self._at, self._budget, self._ledger = at, budget, ledger

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        """See `Gate.decide`."""
        aim = self._ledger.aim(self._budget)
        if 0.0 < aim < 1.0:
            # drawn by the place in the pair's history, not in the reply, or one seed would draw the same in all
            decision = self._at(aim).judge(chunk, self._ledger.decided)
        else:
            decision = Decision(aim >= 1.0, "too much of the budget is left" if aim else "the budget is overspent")
        self._ledger.enter(decision.offload)
        return decision


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
    ledger: BudgetController,
    linked: bool = False,
) -> GateChoice:
    """Return the requested gate; its draws come from `seed`, and `ledger` records what its budget has been spent on.

    `profile` is given where `needs_profile` says so. `linked`: the verifier is across a link, and the device has to
    wait for it.
    """
    gate, budget = options.gate, options.budget
    gamma = options.gamma or CHUNK
    if not isinstance(gate, str):
        return _counted(gate, "the gate is your own", gamma, ledger)
    if gate == "never" or budget == 0.0:
        return GateChoice(NeverGate(), "nothing is verified, as you said", gamma)
    if gate == "always" or budget == 1.0:
        return _counted(AlwaysGate(), "everything is verified, as you said", gamma, ledger)
    if budget is None:
        if gate == "confidence":
            fixed = ConfidenceGate(options.confidence_threshold, seed)
            return _counted(fixed, "a confidence threshold without a budget", gamma, ledger)
        return _counted(AlwaysGate(), "no budget is given, so everything is verified", gamma, ledger)
    gamma = options.gamma or (CHUNK if profile is None else profile.gamma)
    if gate == "random" or profile is None:
        chance = BudgetGate(lambda share: RandomGate(share, seed), budget, ledger)
        return _limited(chance, "chunks are chosen at random", gamma, ledger)
    reason = f"the {gate} gate, as you said"
    if gate == "auto":
        gate, reason = best_gate(profile, budget)
    if gate == "worth":
        found: Gate = LearnedGate(profile, budget, ledger, seed)
    else:
        found = BudgetGate(_dial(gate, profile, seed), budget, ledger)
    layers = profile.layers if gate in ("importance", "synera") else ()
    limited = _limited(found, reason, gamma, ledger, layers)
    if gate != "worth":
        return limited
    heeds = profile.hesitates if options.context_lookup else 0.0
    copies = heeds > 0.0 and options.temperature <= 0.0  # a drawn token stays; the gate hears the context all the same
    said = f"; below a confidence of {heeds:.2f} what the context says is drafted" if copies else ""
    return replace(limited, stop_below=DOUBT if linked else 0.0, lookup_below=heeds, reason=limited.reason + said)


def best_gate(profile: Profile, budget: float) -> tuple[str, str]:
    """Return the gate with the best evidence in the profile at the budget nearest to this one, and that evidence."""
    share = min(SHARES, key=lambda known: abs(known - budget))
    gains = {name: profile.evidence.get(f"gate {name} at {share}", 0.0) for name in AUTO}
    best = max(AUTO, key=lambda name: gains[name])
    others = ", ".join(f"{name} {gains[name]:.0%}" for name in AUTO if name != best)
    shown = "the fitted gate" if best == "worth" else f"the {best} gate"
    found = f"with {share:.0%} of chunks it makes {gains[best]:.0%} of profiled replies the verifier's own"
    return best, f"{shown}: {found} ({others})"


def _dial(gate: str, profile: Profile, seed: int) -> Callable[[float], Rule]:
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


def _counted(gate: Gate, reason: str, gamma: int, ledger: BudgetController) -> GateChoice:
    return GateChoice(CountingGate(gate, ledger), reason, gamma, gate.layers, ledger=ledger)


def _limited(gate: Gate, reason: str, gamma: int, ledger: BudgetController, layers: tuple[int, ...] = ()) -> GateChoice:
    """Return the gate with the limit for every budget below 1: the tail of a long reply is not verified."""
    return GateChoice(TailGate(gate, ledger=ledger), reason, gamma, layers, ledger=ledger)
