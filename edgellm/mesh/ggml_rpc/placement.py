"""Which device holds which layers of a model over RPC, at first and after a loss."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgellm.coldstart.hardware import Device
from edgellm.coldstart.plan import Objective
from edgellm.coldstart.rpc_plan import RpcModelCosts, RpcOption, RpcPlan, RpcSite, plan_rpc, predict_rpc
from edgellm.errors import PlanImpossible
from edgellm.layer_range import HERE, LayerRange, StageShare

if TYPE_CHECKING:
    from edgellm.rpc.discovery.workers import Worker


@dataclass(frozen=True, slots=True)
class RpcPlacement:
    """The best `plan` for a model over the measured `sites`, and what it was made for. `left_out`: devices that cannot
    be used, each with the reason."""

    plan: RpcPlan
    model: RpcModelCosts
    here: Device
    sites: tuple[RpcSite, ...]
    workers: Mapping[str, Worker]
    left_out: tuple[tuple[str, str], ...]
    tokens_in: int
    tokens_out: int
    cards: bool

    @property
    def shares(self) -> tuple[StageShare, ...]:
        """The layers of each device."""
        return self.plan.option.shares

    def predict(self, shares: Sequence[StageShare]) -> RpcOption:
        """Return what a cold reply takes with other shares. Raises PlanImpossible as `predict_rpc` does."""
        return predict_rpc(self.here, self.sites, self.model, shares, self.tokens_in, self.tokens_out)

    def one_model_each(self, model: str) -> str | None:
        """Return the commands with which the whole `model`, as the user calls it, verifies on one other device; None if
        that is not better than any split."""
        if (way := self.plan.one_each) is None:
            return None
        name = way.shares[0].name
        return (
            f"For that, run on {name}: edgellm serve --role verifier -m {model}; and here: edgellm chat --peer {name}"
        )

    def again(self, names: Collection[str]) -> tuple[StageShare, ...]:
        """Return the layers of each device with which a reply goes on soonest over the devices of these names.

        Raises:
            PlanImpossible: they cannot hold the model.
        """
        return place(
            self.model, self.here, [site for site in self.sites if site.device.name in names], self.workers,
            self.tokens_in, self.tokens_out, objective="reply", cards=self.cards,
        ).shares  # fmt: skip


def place(
    model: RpcModelCosts, here: Device, sites: Sequence[RpcSite], workers: Mapping[str, Worker], tokens_in: int,
    tokens_out: int, *, objective: Objective = "ttft", cards: bool = False,
    left_out: Sequence[tuple[str, str]] = (), cold: bool = True,
) -> RpcPlacement:  # fmt: skip
    """Return the best placement; the arguments are as for `plan_rpc`.

    Raises:
        PlanImpossible: the devices cannot hold the model.
    """
    plan = plan_rpc(here, sites, model, tokens_in, tokens_out, objective=objective, cards=cards, cold=cold)
    return RpcPlacement(plan, model, here, tuple(sites), workers, tuple(left_out), tokens_in, tokens_out, cards)


def by_memory(model: RpcModelCosts, memory: Mapping[str, int]) -> tuple[StageShare, ...]:
    """Return shares of a model on devices of which nothing but their free `memory` is known: this device alone if that
    is enough, else all in proportion to it.

    Raises:
        PlanImpossible: it is too little for all.
    """
    own = model.embedding + model.head + model.compute
    free = {
        name: max(0.0, size - (own if name == HERE else model.head + model.compute)) for name, size in memory.items()
    }
    layer = max(1.0, sum(model.layer_bytes) / model.layers + model.cache)
    room = {name: int(size // layer) for name, size in free.items()}
    if room.get(HERE, 0) >= model.layers:
        return (StageShare(HERE, LayerRange(0, model.layers)),)
    if sum(room.values()) < model.layers:
        raise PlanImpossible(
            f"The remaining devices have room for {sum(room.values())} of the {model.layers} layers of {model.name}.",
            "Reconnect a lost device, or free memory on one of the others.",
        )
    shares, at, ahead = [], 0, 0
    for name in sorted(room, key=lambda name: name != HERE):
        ahead += room[name]
        end = model.layers * ahead // sum(room.values())
        if end > at:
            shares.append(StageShare(name, LayerRange(at, end)))
        at = max(at, end)
    return tuple(shares)
