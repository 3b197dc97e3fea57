"""The layers of each device over llama.cpp's RPC, and the times of a reply.

The asking device reads the model, sends each other device its layers, and computes the rest. Rows go from it to each
device in turn and back, so the order of the devices does not matter, and times add up. The least sum is found by trying
all sets of devices, and filling the cheapest device of each set first.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from edgellm.coldstart.costs import Device, Floats, Link
from edgellm.coldstart.plan import MIN_SAVING, format_seconds
from edgellm.coldstart.problem import Objective
from edgellm.engine import ModelFile
from edgellm.engine.gguf.memory import text_layers
from edgellm.engine.gguf.reader import GgufHeader
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
    """A model of any architecture: each layer's bytes, bytes that a token reads, and weights that a token is multiplied
    by; the head's bytes and weights; the `embedding`, which stays on the asking device.

    `cache` bytes of a layer's keys, values or states; `compute` bytes on each device to compute in. A row between
    layers has `width` numbers of 32 bits, one of logits `vocabulary`.
    """

    name: str
    layer_bytes: tuple[int, ...]
    token_bytes: tuple[float, ...]
    products: tuple[float, ...]
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
class RpcSite:
    """A device that holds layers, the lines to it and back, and the share of the model's weights that is on its disk
    already. Nothing has to be sent to the asking device itself."""

    device: Device
    up: Link = Link(math.inf)
    down: Link = Link(math.inf)
    kept: float = 0.0


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
    """The asking device and the `sites`, and the model and the reply that are planned for.

    `cards`: the asking device computes on graphics cards, which then have the last layers and the head. With `cold`
    False everything is loaded. Costs below are seconds to load, for the prompt, and for a
    further token, (3,).
    """

    here: RpcSite
    sites: tuple[RpcSite, ...]
    model: RpcModelCosts
    tokens_in: int
    tokens_out: int
    objective: Objective = "ttft"
    cards: bool = False
    cold: bool = True

    def seconds(self, option: RpcOption) -> float:
        """Return the time of an option that the objective minimises."""
        return option.reply_s if self.objective == "reply" else option.ttft_s

    def options(self) -> Iterator[RpcOption]:
        """Yield the best way with each set of devices that can hold the model, the asking device alone first."""
        sites = self.sites[:_MOST]
        for chosen in (some for count in range(len(sites) + 1) for some in combinations(sites, count)):
            heads = [self.here] if self.cards or not chosen else chosen
            found = [option for head in heads if (option := self._option(chosen, head)) is not None]
            if found:
                yield min(found, key=self.seconds)

    def whole(self) -> Iterator[RpcOption]:
        """Yield the way with the whole model on each other device, from its own disk, and nothing but ids between."""
        model = self.model
        for site in self.sites:
            if model.size + model.layers * model.cache + model.compute <= site.device.memory:
                cost = self._computed(site.device, sum(model.token_bytes), sum(model.products))
                cost += self._computed(site.device, model.head, model.head_products, rows=1)
                trip = site.up.latency + site.down.latency
                cost += (model.size / site.device.disk, trip, trip)
                yield self._timed((StageShare(site.device.name, LayerRange(0, model.layers)),), cost)

    def _option(self, chosen: Sequence[RpcSite], head: RpcSite) -> RpcOption | None:
        """Return the best way with the `chosen` devices, each with at least a layer, the asking device, and the head on
        one of them. Return None if they cannot hold the model."""
        places = [*sorted(chosen, key=lambda site: site is head), self.here]
        each = [self._layer(site) for site in places]
        room = [self._room(site, site is head) for site in places]
        counts = [*[1] * len(chosen), 0]
        left = self.model.layers - len(chosen)
        if left < 0 or any(most < count for most, count in zip(room, counts, strict=True)):
            return None
        weight = np.array([self.cold, 1.0, self._further if self.objective == "reply" else 0.0])
        for at in sorted(range(len(places)), key=lambda at: float(each[at] @ weight)):
            more = min(left, room[at] - counts[at])
            counts[at] += more
            left -= more
        if left:
            return None
        cost = self._loaded(head, self.model.head)
        cost += self._computed(head.device, self.model.head, self.model.head_products, rows=1)
        for site, count, layer in zip(places, counts, each, strict=True):
            cost += count * layer + self._traffic(site, logits=site is head)
        shares, first = [], 0
        for at in range(
            -1 + self.cards, len(chosen) + self.cards
        ):  # the asking device has the last layers, or the first
            if counts[at]:
                shares.append(StageShare(places[at].device.name, LayerRange(first, first + counts[at])))
                first += counts[at]
        return self._timed(tuple(shares), cost)

    @property
    def _further(self) -> int:
        """The number of tokens after the first."""
        return max(0, self.tokens_out - 1)

    def _timed(self, shares: tuple[StageShare, ...], cost: Floats) -> RpcOption:
        load, prompt, token = map(float, (cost + np.array((START_SECONDS, 0.0, 0.0))) * (self.cold, 1.0, 1.0))
        return RpcOption(shares, load, load + prompt, token, load + prompt + self._further * token)

    def _room(self, site: RpcSite, head: bool) -> int:
        """Return how many layers fit a device."""
        model = self.model
        memory = site.device.memory - model.compute - model.head * head - model.embedding * (site is self.here)
        return max(0, math.floor(memory / (sum(model.layer_bytes) / model.layers + model.cache)))

    def _layer(self, site: RpcSite) -> Floats:
        """Return the cost of an average layer."""
        model = self.model
        size, read, products = (
            sum(part) / model.layers for part in (model.layer_bytes, model.token_bytes, model.products)
        )
        return self._loaded(site, size) + self._computed(site.device, read, products)

    def _loaded(self, site: RpcSite, size: float) -> Floats:
        """Return the cost of loading: each tensor in turn is read, and then sent, or read there by its hash."""
        there = site.kept * size / site.device.disk + (1.0 - site.kept) * 8.0 * size / site.up.rate
        return np.array([size / self.here.device.disk + there, 0.0, 0.0])

    def _computed(self, device: Device, read: float, products: float, rows: int | None = None) -> Floats:
        one = read / device.bandwidth if device.bandwidth else 2.0 * products / device.speed(1)
        rows = self.tokens_in if rows is None else rows
        return np.array([0.0, max(one, 2.0 * products * rows / device.speed(rows)), one])

    def _traffic(self, site: RpcSite, *, logits: bool) -> Floats:
        """Return the cost of rows to a device and back."""
        row = 32.0 * self.model.width
        back = 32.0 * self.model.vocabulary * logits / site.down.rate
        per_row = row / site.up.rate + (0.0 if logits else row / site.down.rate)
        latency = site.up.latency + site.down.latency
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
    workers: Mapping[str, Worker] = field(default_factory=dict)
    left_out: tuple[tuple[str, str], ...] = ()

    @property
    def shares(self) -> tuple[StageShare, ...]:
        """The layers of each device."""
        return self.option.shares

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
        left = tuple(site for site in self.home.sites if site.device.name in names)
        return plan_rpc(replace(self.home, sites=left, objective="reply", cold=True)).shares


def plan_rpc(home: RpcHome) -> RpcPlacement:
    """Return the best way to hold the model on the devices of the `home`. Raises PlanImpossible: the devices together
    cannot hold it."""
    options, model = list(home.options()), home.model
    if not options:
        have = sum(max(0.0, site.device.memory) for site in (home.here, *home.sites))
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
    count, table = text_layers(header), header.tensor(_EMBEDDING)
    if not count or table is None:
        raise ModelUnsupported(f"{file.path} has no layers or no {_EMBEDDING}.", "Use a complete language model.")
    sizes, read, products = [0] * count, [0.0] * count, [0.0] * count
    head = outside = 0
    share = _used_experts(header)
    for tensor in header.tensors:
        if (at := tensor.layer) is not None:
            if at < count:
                used = share if _EXPERTS in tensor.name else 1.0
                sizes[at] += tensor.nbytes
                read[at] += used * tensor.nbytes
                products[at] += used * tensor.n_elements
        elif tensor.name.startswith("output"):
            head += tensor.nbytes
        else:
            outside += tensor.nbytes
    matrix = header.tensor(_HEAD, _EMBEDDING) or table
    if matrix.name == _EMBEDDING:  # the head is the embedding once more
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


def by_memory(model: RpcModelCosts, memory: Mapping[str, int]) -> tuple[StageShare, ...]:
    """Return shares of a model on this device and others, by nothing but their free `memory`. Raises PlanImpossible: it
    is too little for all."""
    here, *others = (
        replace(Device.unmeasured(name), memory=float(max(1, memory[name])))
        for name in sorted(memory, key=lambda name: name != HERE)
    )
    line = Link(here.uplink, here.latency)
    sites = tuple(RpcSite(device, line, line) for device in others)
    return plan_rpc(RpcHome(RpcSite(here), sites, model, 1, 64, "reply")).shares
