"""The layers of each device for a model over llama.cpp's RPC, and the memory beside its weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgellm.coldstart.hardware import Device, Link
from edgellm.coldstart.rpc_plan import RpcHome, RpcModelCosts, RpcPlan, RpcSite, plan_rpc
from edgellm.engine import ModelFile
from edgellm.engine.ggml_rpc.model_process import ContextSizes, ModelProcess
from edgellm.engine.hardware import Hardware
from edgellm.layer_range import HERE, StageShare

if TYPE_CHECKING:
    from edgellm.rpc.discovery.workers import Worker

MARGIN = 64 * 2**20
"""Spare bytes on each other device beside weights, caches and buffers."""


def beside_weights(file: ModelFile, sizes: ContextSizes, hardware: Hardware) -> tuple[int, int]:
    """Return the bytes of the model's caches, and of its buffers; llama.cpp computes them in a second or two.

    Raises as `ModelProcess.beside_weights`.
    """
    process = ModelProcess(file.path, 1, sizes, hardware)
    try:
        return process.beside_weights()
    finally:
        process.close()


@dataclass(frozen=True, slots=True)
class RpcPlacement:
    """The best `plan` for a model over the measured devices. `left_out`: devices that cannot be used, each with the
    reason."""

    plan: RpcPlan
    workers: Mapping[str, Worker]
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def shares(self) -> tuple[StageShare, ...]:
        """The layers of each device."""
        return self.plan.option.shares

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
        home = self.plan.home
        left = tuple(site for site in home.sites if site.device.name in names)
        return plan_rpc(replace(home, sites=left, objective="reply", cold=True)).option.shares


def by_memory(model: RpcModelCosts, memory: Mapping[str, int]) -> tuple[StageShare, ...]:
    """Return shares of a model on this device and others, by nothing but their free `memory`.

    Raises:
        PlanImpossible: it is too little for all.
    """
    here, *others = (
        replace(Device.unmeasured(name), memory=float(max(1, memory[name])))
        for name in sorted(memory, key=lambda name: name != HERE)
    )
    line = Link(here.uplink, here.latency)
    sites = tuple(RpcSite(device, line, line) for device in others)
    return plan_rpc(RpcHome(here, sites, model, 1, 64, "reply")).option.shares
