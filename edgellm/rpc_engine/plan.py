"""The layers of each device over llama.cpp's RPC, and the times of a reply.

The asking device reads the model, sends each other device its layers, and computes the rest. Rows go from it to each
device in turn and back, so the order of the devices does not matter, and times add up. The least sum is found by trying
all sets of devices, and filling the cheapest device of each set first.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from edgellm.coldstart.costs import Device, Floats, Link, link
from edgellm.coldstart.plan import MIN_SAVING, format_seconds
from edgellm.coldstart.problem import Objective, shares_of
from edgellm.engine import ModelFile
from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.hardware import N_BATCH
from edgellm.errors import ModelUnsupported, PlanImpossible
from edgellm.layer_range import HERE, LayerRange, StageShare

if TYPE_CHECKING:
    from edgellm.rpc.layers import Worker

START_SECONDS = 1.5
"""Seconds to start the processes that load and serve, before anything is read."""
MARGIN = 64 * 2**20
"""Spare bytes on each other device beside weights, caches and buffers."""
_MOST = 8  # devices whose sets are tried; the number of sets doubles with each
_EXPERTS = "_exps."  # part of the names of tensors with all experts of a layer
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


@dataclass(frozen=True, slots=True)
class RpcModelCosts:
    """A model of any architecture: each layer's bytes; the bytes that a token reads of an average layer, and the number
    of weights that it is multiplied by there; the head's bytes and weights; the `embedding`, which stays on the asking
    device.

    `cache` bytes of a layer's keys, values or states; `compute` bytes on each device to compute in. A row between
    layers has `width` numbers of 32 bits, one of logits `vocabulary`.
    """

    name: str
    layer_bytes: tuple[int, ...]
    read: float
    products: float
    head: int
    head_products: float
    embedding: int
    width: int
    vocabulary: int
    cache: float = 0.0
    compute: float = 0.0

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    @property
    def size(self) -> int:
        """The bytes of all weights."""
        return sum(self.layer_bytes) + self.head + self.embedding

    def weights(self, layers: LayerRange) -> int:
        """Return the bytes of some layers, with the head if the last one is among them."""
        return sum(self.layer_bytes[layers.start : layers.stop]) + self.head * (layers.stop == self.layers)


@dataclass(frozen=True, slots=True)
class RpcOption:
    """The layers of each device, in order, and seconds: of loading, to the first token, per further token, and to the
    end of the reply."""

    shares: tuple[StageShare, ...]
    load_s: float
    ttft_s: float
    token_s: float
    reply_s: float


@dataclass(frozen=True, slots=True)
class RpcHome:
    """The `devices`, of which the first one asks, and the model and the reply that are planned for. `kept`: the share
    of the model's weights that is on the disk of a device of that name already.

    `cards`: the asking device computes on graphics cards, which then have the last layers and the head. Costs
    below are seconds to load, for the prompt, and for a further token, (3,).
    """

    devices: tuple[Device, ...]
    model: RpcModelCosts
    tokens_in: int
    tokens_out: int
    objective: Objective = "ttft"
    kept: Mapping[str, float] = field(default_factory=dict)
    cards: bool = False

    def seconds(self, option: RpcOption) -> float:
        """Return the time of an option that the objective minimises."""
        return option.reply_s if self.objective == "reply" else option.ttft_s

    def options(self) -> Iterator[RpcOption]:
        """Yield the best way with each set of devices that can hold the model, the asking device alone first."""
        here, *others = self.devices[: 1 + _MOST]
        for chosen in (some for count in range(len(others) + 1) for some in combinations(others, count)):
            heads = [here] if self.cards or not chosen else chosen
            if found := [option for head in heads if (option := self._option(chosen, head)) is not None]:
                yield min(found, key=self.seconds)

    def whole(self) -> Iterator[RpcOption]:
        """Yield the way with the whole model on each other device, from its own disk, and nothing but ids between."""
        model = self.model
        for device in self.devices[1:]:
            if model.size + model.layers * model.cache + model.compute <= device.memory:
                cost = model.layers * self._computed(device, model.read, model.products)
                cost += self._computed(device, model.head, model.head_products, rows=1)
                trip = sum(line.latency for line in self._lines(device))
                cost += (model.size / device.disk, trip, trip)
                yield self._timed(shares_of([(device.name, model.layers)]), cost)

    def _option(self, chosen: Sequence[Device], head: Device) -> RpcOption | None:
        """Return the best way with the `chosen` devices, each with at least a layer, the asking device, and the head on
        one of them. Return None if they cannot hold the model."""
        here, others = self.devices[0], sorted(chosen, key=lambda device: device is head)
        places = [*others, here] if self.cards else [here, *others]  # as their layers follow each other
        each = [self._layer(place) for place in places]
        room = [self._room(place, place is head) for place in places]
        counts = [int(place is not here) for place in places]
        left = self.model.layers - len(chosen)
        if left < 0 or any(most < count for most, count in zip(room, counts, strict=True)):
            return None
        weight = np.array([1.0, 1.0, self._further if self.objective == "reply" else 0.0])
        for at in sorted(range(len(places)), key=lambda at: float(each[at] @ weight)):
            more = min(left, room[at] - counts[at])
            counts[at] += more
            left -= more
        if left:
            return None
        cost = self._loaded(head, self.model.head)
        cost += self._computed(head, self.model.head, self.model.head_products, rows=1)
        for place, count, layer in zip(places, counts, each, strict=True):
            cost += count * layer + self._traffic(place, logits=place is head)
        return self._timed(shares_of(zip((place.name for place in places), counts, strict=True)), cost)

    @property
    def _further(self) -> int:
        """The number of tokens after the first."""
        return max(0, self.tokens_out - 1)

    def _lines(self, device: Device) -> tuple[Link, Link]:
        """Return the lines to a device and back; nothing has to be sent to the asking device itself."""
        here = self.devices[0]
        return link(here, device, {}), link(device, here, {})

    def _timed(self, shares: tuple[StageShare, ...], cost: Floats) -> RpcOption:
        load, prompt, token = map(float, cost + np.array((START_SECONDS, 0.0, 0.0)))
        return RpcOption(shares, load, load + prompt, token, load + prompt + self._further * token)

    def _room(self, device: Device, head: bool) -> int:
        """Return how many layers fit a device."""
        model = self.model
        memory = device.memory - model.compute - model.head * head - model.embedding * (device is self.devices[0])
        return max(0, math.floor(memory / (sum(model.layer_bytes) / model.layers + model.cache)))

    def _layer(self, device: Device) -> Floats:
        """Return the cost of an average layer."""
        model = self.model
        size = sum(model.layer_bytes) / model.layers
        return self._loaded(device, size) + self._computed(device, model.read, model.products)

    def _loaded(self, device: Device, size: float) -> Floats:
        """Return the cost of loading: each tensor in turn is read, and then sent, or read there by its hash."""
        kept, rate = self.kept.get(device.name, 0.0), self._lines(device)[0].rate
        there = kept * size / device.disk + (1.0 - kept) * 8.0 * size / rate
        return np.array([size / self.devices[0].disk + there, 0.0, 0.0])

    def _computed(self, device: Device, read: float, products: float, rows: int | None = None) -> Floats:
        one = read / device.bandwidth if device.bandwidth else 2.0 * products / device.speed(1)
        rows = self.tokens_in if rows is None else rows
        return np.array([0.0, max(one, 2.0 * products * rows / device.speed(rows)), one])

    def _traffic(self, device: Device, *, logits: bool) -> Floats:
        """Return the cost of rows to a device and back."""
        up, down = self._lines(device)
        row, back = 32.0 * self.model.width, 32.0 * self.model.vocabulary * logits / down.rate
        per_row = row / up.rate + (0.0 if logits else row / down.rate)
        latency = up.latency + down.latency
        prompt = math.ceil(self.tokens_in / N_BATCH) * latency + self.tokens_in * per_row + back
        return np.array([0.0, prompt, latency + per_row + back])


@dataclass(frozen=True, slots=True)
class RpcPlacement:
    """The best way over RPC for a `home`; this device `alone`, None without the memory; and `elsewhere`, the best other
    device that can hold the whole model and verify there, if any: its one share names it.

    `workers`: the devices that serve. `left_out`: devices that cannot be used, each with the reason.
    """

    home: RpcHome
    option: RpcOption
    alone: RpcOption | None
    elsewhere: RpcOption | None
    workers: "Mapping[str, Worker]" = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def advice(self) -> str:
        """The best way and its reason, in a sentence or two."""
        best, seconds = self.option, self.home.seconds
        taken = format_seconds(seconds(best))
        if best == self.alone:
            text = f"Use this device alone: {taken}, and no other one makes it faster."
        else:
            alone = "it does not fit this device alone"
            if self.alone is not None:
                alone = f"instead of {format_seconds(seconds(self.alone))} on this device alone"
            text = f"Over RPC on {' and '.join(share.name for share in best.shares)}: {taken}; {alone}."
        if (better := self.one_each) is not None:
            text += (
                f" Better is one model each: with the whole model on {better.shares[0].name}, which verifies what this"
                f" device drafts, it takes {format_seconds(seconds(better))} and"
                f" {format_seconds(better.token_s)} for each further token, against {format_seconds(best.token_s)}."
            )
        return text

    @property
    def one_each(self) -> RpcOption | None:
        """The way with the whole model on one other device if that beats any split; else None."""
        other, seconds = self.elsewhere, self.home.seconds
        return None if other is None or seconds(other) > (1.0 - MIN_SAVING) * seconds(self.option) else other

    def one_model_each(self, model: str) -> str | None:
        """Return the commands with which the whole `model`, as the user calls it, verifies on one other device; None if
        that is not better than any split."""
        if (way := self.one_each) is None:
            return None
        name = way.shares[0].name
        return (
            f"For that, run on {name}: edgellm serve --role verifier -m {model}; and here: edgellm chat --peer {name}"
        )

    def again(self, names: Collection[str]) -> tuple[StageShare, ...]:
        """Return the layers of each device with which a reply goes on soonest over the devices of these names. Raises
        PlanImpossible: they cannot hold the model."""
        here, *others = self.home.devices
        left = (here, *(device for device in others if device.name in names))
        return plan_rpc(replace(self.home, devices=left, objective="reply")).option.shares


def plan_rpc(home: RpcHome) -> RpcPlacement:
    """Return the best way to hold the model on the devices of the `home`. Raises PlanImpossible: the devices together
    cannot hold it."""
    options, model = list(home.options()), home.model
    if not options:
        have = sum(max(0.0, device.memory) for device in home.devices)
        raise PlanImpossible(
            f"{model.name} needs {(model.size + model.layers * model.cache) / 1e9:.1f} GB with its caches, and the"
            f" devices have {have / 1e9:.1f} GB.",
            "Choose a smaller model or quantisation, a shorter context, or add a device.",
        )
    alone = options[0] if [share.name for share in options[0].shares] == [HERE] else None
    elsewhere = min(home.whole(), key=home.seconds, default=None)
    return RpcPlacement(home, min(options, key=home.seconds), alone, elsewhere)


def rpc_costs(file: ModelFile, cache: float = 0.0, compute: float = 0.0) -> RpcModelCosts:
    """Return the costs of a model for a plan over RPC. `cache` bytes of all layers' caches, `compute` bytes to compute
    in. Layers that predict further tokens (MTP) are left out: they are not loaded. Raises ModelUnsupported: the file
    does not say how many layers it has, or lacks an embedding."""
    header = file.header
    count, table = header.text_layers, header.tensor(_EMBEDDING)
    if not count or table is None:
        raise ModelUnsupported(f"{file.path} has no layers or no {_EMBEDDING}.", "Use a complete language model.")
    sizes, outside, head = header.sizes(count)
    share, read, products = _used_experts(header), 0.0, 0.0
    for tensor in header.tensors:
        if tensor.layer is not None and tensor.layer < count:
            used = share if _EXPERTS in tensor.name else 1.0
            read += used * tensor.nbytes / count
            products += used * tensor.n_elements / count
    matrix = header.tensor(_HEAD, _EMBEDDING) or table
    if matrix.name == _EMBEDDING:  # the head is the embedding once more
        head += table.nbytes
    width, vocabulary = table.shape[0], table.shape[-1]
    return RpcModelCosts(
        file.name, tuple(sizes), read, products, head, float(matrix.n_elements), outside, width, vocabulary,
        cache / count, compute,
    )  # fmt: skip


def _used_experts(header: GgufHeader) -> float:
    """Return the share of a layer's experts that a token goes through; 1 where there are none."""
    known = [header.metadata.get(f"{header.architecture}.expert_{name}count") for name in ("used_", "")]
    used, all_of_them = (value if isinstance(value, int) and value > 0 else 1 for value in known)
    return min(1.0, used / all_of_them)


def by_memory(model: RpcModelCosts, memory: Mapping[str, int], *, cards: bool = False) -> tuple[StageShare, ...]:
    """Return shares of a model on this device and others, by nothing but their free `memory`; `cards` as for `RpcHome`.
    Raises PlanImpossible: it is too little for all."""
    devices = tuple(
        replace(Device.unmeasured(name), memory=float(max(1, memory[name])))
        for name in sorted(memory, key=lambda name: name != HERE)
    )
    return plan_rpc(RpcHome(devices, model, 1, 64, "reply", cards=cards)).option.shares
