"""The plan for a model in a home: the engine that is better by the predicted times of both, and its placement."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgellm.engine import ModelFile
from edgellm.errors import EdgeError, PlanImpossible
from edgellm.llm.home.over_rpc import RpcOffers, ask_offers, place_over_rpc
from edgellm.llm.home.stages import PLAN_SECONDS, Asked, StagesAtHome, ask_devices, place_stages
from edgellm.llm.home.target import PlanTarget
from edgellm.mesh.ggml_rpc.engine_choice import EngineChoice, EngineTimes, faster_engine, without_stages

if TYPE_CHECKING:
    from edgellm.mesh.fleet_profiler import Survey
    from edgellm.mesh.ggml_rpc.placement import RpcPlacement


@dataclass(frozen=True, slots=True)
class HomePlan:
    """The engine for a model on the surveyed devices, and why; the best placements of both engines, as far as they are
    possible and were planned. `asked`: the devices, if they were asked for their layers."""

    choice: EngineChoice
    stages: StagesAtHome | None = None
    rpc: RpcPlacement | None = None
    asked: Asked | None = None

    def deployment(self, model: str) -> str:
        """Return a sentence on the layers of `model`, as the user calls it, that stages lack to be faster; empty if
        that would not be worth it, or RPC would still be taken."""
        if self.stages is None:
            return ""
        best, rpc = self.stages.placement.best, self.choice.rpc
        if self.choice.over_rpc and best is not None and rpc is not None:
            deployed = EngineTimes(best.advised.ttft_s, best.advised.reply_s)
            if faster_engine(deployed, rpc, 0).over_rpc:
                return ""
        return self.stages.placement.advice(model)


def plan_home(file: ModelFile, home: Survey, choice: EngineChoice, target: PlanTarget) -> HomePlan:
    """Return the plan for the model in `file` on the surveyed devices. Where the `choice` of the engine is undecided
    and other devices serve llama.cpp's RPC, both engines are planned, and the one that is predicted to be faster is
    taken. Devices are asked once, for their layers and for RPC at the same time.

    Raises:
        ModelUnsupported, ModelCorrupt, PlanImpossible: as `place_stages`, where RPC does not help.
        EngineFailed, DeviceLost: as `place_over_rpc`, where stages are no choice.
    """
    if choice.over_rpc:
        return HomePlan(choice, rpc=place_over_rpc(file, home, target))
    found = compare_engines(file, home, choice, target)
    if found.choice.over_rpc or found.stages is not None:
        return found
    return replace(found, stages=place_stages(file, home, target, found.asked))


def compare_engines(
    file: ModelFile, home: Survey, choice: EngineChoice, target: PlanTarget, seconds: float = PLAN_SECONDS
) -> HomePlan:
    """Return what `plan_home` returns, but without a placement where there is nothing to compare: the choice is made,
    or no other device serves llama.cpp's RPC. After `seconds` stages are planned no better."""
    if not choice.undecided or not home.workers:
        return HomePlan(choice.settled())
    with ThreadPoolExecutor(1) as pool:
        offered = pool.submit(ask_offers, home.workers)
        asked = ask_devices(file, home, target)
        if not (offers := offered.result()).given:
            return HomePlan(choice.settled(), asked=asked)
        placed = pool.submit(_rpc, file, home, target, offers)  # the first time with a model that takes a second or two
        stages = _stages(file, home, target, asked, seconds)
        rpc = placed.result()
    if rpc is None:
        return HomePlan(choice.settled(), None if isinstance(stages, PlanImpossible) else stages, asked=asked)
    times = EngineTimes(rpc.plan.option.ttft_s, rpc.plan.option.reply_s)
    if isinstance(stages, PlanImpossible):
        return HomePlan(without_stages(stages, times), rpc=rpc, asked=asked)
    return HomePlan(faster_engine(stages.times, times, target.tokens_out), stages, rpc, asked)


def _stages(
    file: ModelFile, home: Survey, target: PlanTarget, asked: Asked, seconds: float
) -> StagesAtHome | PlanImpossible:
    """Return the best stages, or why none are possible."""
    try:
        return place_stages(file, home, target, asked, seconds)
    except PlanImpossible as error:
        return error


def _rpc(file: ModelFile, home: Survey, target: PlanTarget, offers: RpcOffers) -> RpcPlacement | None:
    """Return the best placement over RPC; None where none is possible."""
    try:
        return place_over_rpc(file, home, target, offers)
    except EdgeError:
        return None
