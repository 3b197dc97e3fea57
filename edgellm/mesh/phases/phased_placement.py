"""Which placement of a model begins a reply on the devices of a home, and which take over behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.phases.model import PhasedReply, PhaseProblem, fit_together, phase_problem, simulate
from edgellm.coldstart.phases.search import PhasePlan, plan_phases
from edgellm.coldstart.plan import Objective
from edgellm.coldstart.problem import Cut, Stop, never, per_token
from edgellm.coldstart.problem_builder import MemoryOverhead
from edgellm.layer_range import LayerRange, StageShare
from edgellm.mesh.fleet_file import Fleet

FASTER = 0.05
"""The share of a token's time that another placement must save to be where the model lies between replies."""


@dataclass(frozen=True, slots=True)
class PhasedPlacement:
    """The `plan` of a reply in phases over a fleet.

    `shares` begin it, `following` take over one after the other, and the model lies as in `rest` afterwards; empty if
    it stays where the reply ends. `sends_caches`: keys and values are sent to those that take over.
    """

    plan: PhasePlan
    problem: PhaseProblem
    fleet: Fleet
    model: ModelCosts
    overhead: MemoryOverhead
    shares: tuple[StageShare, ...]
    following: tuple[tuple[StageShare, ...], ...]
    rest: tuple[StageShare, ...]
    sends_caches: bool = False

    @property
    def names(self) -> list[str]:
        """The names of the plan's devices."""
        return [device.name for device in self.fleet.devices]

    def predict(self, tokens_in: int, tokens_out: int) -> PhasedReply:
        """Return the times of a cold reply of other lengths with the same moves."""
        problem = phase_problem(
            self.fleet.devices, self.model, tokens_in, tokens_out, links=self.fleet.links, overhead=self.overhead,
            sends_caches=self.sends_caches,
        )  # fmt: skip
        return simulate(problem, self.plan.reply.start, [move.cut for move in self.plan.reply.moves])


def place_in_phases(
    fleet: Fleet, model: ModelCosts, shares: Sequence[StageShare], *, tokens_in: int, tokens_out: int,
    objective: Objective, overhead: MemoryOverhead = MemoryOverhead(), stop: Stop = never, cold: bool = True,
) -> PhasedPlacement | None:  # fmt: skip
    """Return the plan of a reply that begins with `shares`, or for the objective `reply` with whatever ends it soonest.
    None if no placement fits.

    The other arguments are as for `edgellm.coldstart.plan.plan`."""
    names = [device.name for device in fleet.devices]
    problem = phase_problem(
        fleet.devices, model, tokens_in, tokens_out, links=fleet.links, overhead=overhead, sends_caches=True,
        cold=cold,
    )  # fmt: skip
    given: Cut = tuple((names.index(share.name), len(share.layers)) for share in shares)
    plan = plan_phases(problem, stop, start=None if objective == "reply" else given)
    if plan is None:
        return None
    made = plan.reply.made
    start = plan.reply.start if made else given
    last, named = made[-1].cut if made else start, partial(_shares, names=names)
    task = problem.task
    rests = per_token(task, plan.rest) < (1.0 - FASTER) * per_token(task, last) and fit_together(
        problem, last, plan.rest
    )
    return PhasedPlacement(
        plan, problem, fleet, model, overhead, named(start), tuple(named(move.cut) for move in made),
        named(plan.rest) if rests else (), any(move.cache == "sent" for move in made),
    )  # fmt: skip


def _shares(cut: Cut, names: Sequence[str]) -> tuple[StageShare, ...]:
    found, first = [], 0
    for device, count in cut:
        found.append(StageShare(names[device], LayerRange(first, first + count)))
        first += count
    return tuple(found)
