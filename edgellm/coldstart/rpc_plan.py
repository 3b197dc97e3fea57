"""The layers of each device over llama.cpp's RPC, and the times of a reply.

The asking device reads the model, sends each other device its layers, and computes the rest. Rows go from it to each
device in turn and back, so the order of the devices does not matter, and times add up: a layer costs each device a
number of seconds, and each device that takes part costs some more. The least sum is found by trying all sets of
devices, and filling the cheapest device of each set first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from edgellm.coldstart.hardware import Device, Link
from edgellm.coldstart.home import Objective
from edgellm.coldstart.plan import MIN_SAVING, format_seconds
from edgellm.errors import PlanImpossible
from edgellm.layer_range import HERE, LayerRange, StageShare

START_SECONDS = 1.5
"""Seconds to start the processes that load and serve, before anything is read."""
_BATCH = 512  # rows that cross the network at once
_MOST = 8  # devices whose sets are tried; the number of sets doubles with each


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
    def mean_layer(self) -> tuple[float, float, float]:
        """The bytes of a layer, the bytes that a token reads, and its weights, on average."""
        parts = (self.layer_bytes, self.token_bytes, self.products)
        size, read, products = (sum(part) / self.layers for part in parts)
        return size, read, products

    def weights(self, layers: LayerRange) -> int:
        """Return the bytes of some layers, with the head if the last one is among them."""
        return sum(self.layer_bytes[layers.start : layers.stop]) + self.head * (layers.stop == self.layers)


@dataclass(frozen=True, slots=True)
class RpcSite:
    """A device that serves, the lines to it and back, and the share of the model's weights that it keeps on its
    disk."""

    device: Device
    up: Link
    down: Link
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

    def seconds(self, objective: Objective) -> float:
        """Return the time that an objective minimises."""
        return self.reply_s if objective == "reply" else self.ttft_s


@dataclass(frozen=True, slots=True)
class _Part:
    """Seconds of a part of the model on a device: to load it, for the prompt, and for a further token."""

    load: float
    prompt: float
    token: float

    def __add__(self, other: _Part) -> _Part:
        return _Part(self.load + other.load, self.prompt + other.prompt, self.token + other.token)

    def times(self, count: int) -> _Part:
        return _Part(count * self.load, count * self.prompt, count * self.token)


@dataclass(frozen=True, slots=True)
class RpcHome:
    """The asking device and the `sites`, and the model and the reply that are planned for.

    `cards`: the asking device computes on graphics cards, which then have the last layers and the head. With `cold`
    False everything is loaded.
    """

    here: Device
    sites: tuple[RpcSite, ...]
    model: RpcModelCosts
    tokens_in: int
    tokens_out: int
    objective: Objective = "ttft"
    cards: bool = False
    cold: bool = True

    @property
    def further(self) -> int:
        """The number of tokens after the first."""
        return max(0, self.tokens_out - 1)

    def options(self) -> Iterator[RpcOption]:
        """Yield the best way with each set of devices that can hold the model."""
        sites = self.sites[:_MOST]
        for count in range(len(sites) + 1):
            for chosen in combinations(sites, count):
                if not chosen or self.cards:
                    heads: Sequence[RpcSite | None] = [None]
                else:
                    heads = chosen
                found = [option for head in heads if (option := self._option(chosen, head)) is not None]
                if found:
                    yield min(found, key=lambda option: option.seconds(self.objective))

    def whole(self) -> Iterator[RpcOption]:
        """Yield the way with the whole model on each other device, from its own disk, and nothing but ids between."""
        model = self.model
        size = sum(model.layer_bytes) + model.head + model.embedding
        for site in self.sites:
            if size + model.layers * model.cache + model.compute > site.device.memory:
                continue
            round_trip = site.up.latency + site.down.latency
            part = self._compute(site.device, sum(model.token_bytes), sum(model.products))
            part += self._compute(site.device, model.head, model.head_products, rows=1)
            part += _Part(size / site.device.disk, round_trip, round_trip)
            yield self._timed((StageShare(site.device.name, LayerRange(0, model.layers)),), part)

    def _option(self, chosen: Sequence[RpcSite], head: RpcSite | None) -> RpcOption | None:
        """Return the best way with these devices, each with at least a layer, and this device; `head` has the head,
        None for this device. Return None if they cannot hold the model."""
        model = self.model
        each = {site.device.name: self._a_layer(site) for site in chosen}
        each[HERE] = self._a_layer(None)
        room = {site.device.name: self._room(site, site is head) for site in chosen}
        room[HERE] = self._room(None, head is None)
        counts = {site.device.name: 1 for site in chosen} | {HERE: 0}
        left = model.layers - len(chosen)
        if left < 0 or any(room[name] < count for name, count in counts.items()):
            return None
        for name in sorted(each, key=lambda name: self._score(each[name])):
            more = min(left, room[name] - counts[name])
            counts[name] += more
            left -= more
        if left:
            return None
        last = sorted(chosen, key=lambda site: site is head)
        names = [site.device.name for site in last]
        names = [*names, HERE] if self.cards else [HERE, *names]
        shares, at = [], 0
        for name in names:
            if counts[name]:
                shares.append(StageShare(name, LayerRange(at, at + counts[name])))
                at += counts[name]
        part = self._a_head(head)
        for name, count in counts.items():
            part += each[name].times(count)
        for site in chosen:
            part += self._traffic(site, logits=site is head)
        return self._timed(tuple(shares), part)

    def _timed(self, shares: tuple[StageShare, ...], part: _Part) -> RpcOption:
        load = START_SECONDS + part.load if self.cold else 0.0
        ttft = load + part.prompt
        return RpcOption(shares, load, ttft, part.token, ttft + self.further * part.token)

    def _score(self, part: _Part) -> float:
        further = self.further if self.objective == "reply" else 0
        return part.load * self.cold + part.prompt + further * part.token

    def _room(self, site: RpcSite | None, head: bool) -> int:
        """Return how many layers fit a device."""
        model = self.model
        memory = self.here.memory - model.embedding if site is None else site.device.memory
        memory -= model.compute + model.head * head
        return max(0, math.floor(memory / (self.model.mean_layer[0] + model.cache)))

    def _a_layer(self, site: RpcSite | None) -> _Part:
        size, read, products = self.model.mean_layer
        device = self.here if site is None else site.device
        return self._load(site, size) + self._compute(device, read, products)

    def _a_head(self, site: RpcSite | None) -> _Part:
        device = self.here if site is None else site.device
        model = self.model
        return self._load(site, model.head) + self._compute(device, model.head, model.head_products, rows=1)

    def _load(self, site: RpcSite | None, size: float) -> _Part:
        read = size / self.here.disk
        if site is not None:  # each tensor in turn is read, and then sent, or read there by its hash
            sent = 8.0 * size / site.up.rate
            read += site.kept * size / site.device.disk + (1.0 - site.kept) * sent
        return _Part(read, 0.0, 0.0)

    def _compute(self, device: Device, read: float, products: float, rows: int | None = None) -> _Part:
        one = read / device.bandwidth if device.bandwidth else 2.0 * products / device.speed(1)
        rows = self.tokens_in if rows is None else rows
        return _Part(0.0, max(one, 2.0 * products * rows / device.speed(rows)), one)

    def _traffic(self, site: RpcSite, *, logits: bool) -> _Part:
        """Return the seconds for rows to a device and back."""
        row, last = 4.0 * self.model.width, 4.0 * self.model.vocabulary * logits
        batches = math.ceil(self.tokens_in / _BATCH)
        latency, per_row = site.up.latency + site.down.latency, 8.0 * row / site.up.rate
        back = 8.0 * last / site.down.rate
        per_row += 0.0 if logits else 8.0 * row / site.down.rate
        return _Part(0.0, batches * latency + self.tokens_in * per_row + back, latency + per_row + back)


@dataclass(frozen=True, slots=True)
class RpcPlan:
    """The best way over RPC for a `home`; this device `alone`, None without the memory; and `elsewhere`, the best other
    device that can hold the whole model and verify there, if any: its one share names it."""

    home: RpcHome
    option: RpcOption
    alone: RpcOption | None
    elsewhere: RpcOption | None

    @property
    def advice(self) -> str:
        """Return the best way and its reason, in a sentence or two."""
        best, goal = self.option, self.home.objective
        taken = format_seconds(best.seconds(goal))
        names = [share.name for share in best.shares]
        if names == [HERE]:
            text = f"Use this device alone: {taken}, and no other one makes it faster."
        else:
            alone = (
                "it does not fit this device alone"
                if self.alone is None
                else f"instead of {format_seconds(self.alone.seconds(goal))} on this device alone"
            )
            text = f"Over RPC on {' and '.join(names)}: {taken}; {alone}."
        if (better := self.one_each) is not None:
            text += (
                f" Better is one model each: with the whole model on {better.shares[0].name}, which verifies what this"
                f" device drafts, it takes {format_seconds(better.seconds(goal))} and"
                f" {format_seconds(better.token_s)} for each further token, against {format_seconds(best.token_s)}."
            )
        return text

    @property
    def one_each(self) -> RpcOption | None:
        """Return the way with the whole model on one other device if that beats any split; else None."""
        best, other = self.option, self.elsewhere
        if other is None or other.seconds(self.home.objective) > (1.0 - MIN_SAVING) * best.seconds(self.home.objective):
            return None
        return other


def plan_rpc(home: RpcHome) -> RpcPlan:
    """Return the best way to hold the model on the devices of the `home`.

    Raises:
        PlanImpossible: the devices together cannot hold it.
    """
    options = list(home.options())
    model = home.model
    if not options:
        have = sum(max(0.0, site.device.memory) for site in home.sites) + home.here.memory
        need = sum(model.layer_bytes) + model.head + model.embedding + model.layers * model.cache
        raise PlanImpossible(
            f"{model.name} needs {need / 1e9:.1f} GB with its caches, and the devices have {have / 1e9:.1f} GB.",
            "Choose a smaller model or quantisation, a shorter context, or add a device.",
        )

    def seconds(option: RpcOption) -> float:
        return option.seconds(home.objective)

    alone = next((option for option in options if [share.name for share in option.shares] == [HERE]), None)
    return RpcPlan(home, min(options, key=seconds), alone, min(home.whole(), key=seconds, default=None))
