"""A model of any architecture over llama.cpp's RPC: what its layers weigh and cost, and which device holds which."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgellm.coldstart.rpc_plan import RpcModelCosts, RpcPlan, plan_rpc
from edgellm.engine import ModelFile
from edgellm.engine.ggml_rpc.model_process import ContextSizes, ModelProcess
from edgellm.engine.gguf.reader import GgufHeader, text_layers
from edgellm.engine.hardware import Hardware
from edgellm.errors import ModelUnsupported, PlanImpossible
from edgellm.layer_range import HERE, LayerRange, StageShare

if TYPE_CHECKING:
    from edgellm.rpc.discovery.workers import Worker

MARGIN = 64 * 2**20
"""Bytes on each other device beside weights, caches and what it computes in."""
_BLOCK = re.compile(r"blk\.(\d+)\.")
_EXPERTS = "_exps."  # in the names of tensors with all experts of a layer
EMBEDDING, HEAD = "token_embd.weight", "output.weight"


def rpc_costs(file: ModelFile, cache: float = 0.0, compute: float = 0.0) -> RpcModelCosts:
    """Return the costs of a model for a plan over RPC. `cache` bytes of all layers' caches, `compute` bytes to compute
    in. Layers that predict further tokens (MTP) are left out: they are not loaded.

    Raises:
        ModelUnsupported: the file does not say how many layers it has, or lacks an embedding.
    """
    header = file.header
    count, table = text_layers(header), header.tensor(EMBEDDING)
    if not count or table is None:
        raise ModelUnsupported(f"{file.path} has no layers or no {EMBEDDING}.", "Use a complete language model.")
    sizes, read, products = [0] * count, [0.0] * count, [0.0] * count
    head = outside = 0
    share = _used_experts(header)
    for tensor in header.tensors:
        if block := _BLOCK.match(tensor.name):
            at = int(block[1])
            if at < count:
                used = share if _EXPERTS in tensor.name else 1.0
                sizes[at] += tensor.nbytes
                read[at] += used * tensor.nbytes
                products[at] += used * tensor.n_elements
        elif tensor.name.startswith("output"):
            head += tensor.nbytes
        else:
            outside += tensor.nbytes
    matrix = header.tensor(HEAD, EMBEDDING) or table
    if matrix.name == EMBEDDING:  # the head is the embedding once more
        head += table.nbytes
    width, vocabulary = table.shape[0], table.shape[-1]
    return RpcModelCosts(
        file.name, tuple(sizes), tuple(read), tuple(products), head, float(matrix.n_elements), outside, width,
        vocabulary, cache / count, compute,
    )  # fmt: skip


def _used_experts(header: GgufHeader) -> float:
    """Return the share of a layer's experts that a token goes through; 1 where there are none."""
    known = [header.metadata.get(f"{header.architecture}.expert_{name}count") for name in ("used_", "")]
    used, all_of_them = (value if isinstance(value, int) and value > 0 else 1 for value in known)
    return min(1.0, used / all_of_them)


def beside_weights(file: ModelFile, sizes: ContextSizes, hardware: Hardware) -> tuple[int, int]:
    """Return the bytes of the model's caches, and those in which it computes; llama.cpp reckons them, which takes a
    second or two.

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
