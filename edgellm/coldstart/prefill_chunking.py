"""Pipelined prefill: a prompt is split into parts, and while a stage computes a part, the next stage computes the part
before. Smaller parts fill the pipeline sooner but use each device less efficiently (equation 8).

The simulated stages take parts through their layers one at a time, always the oldest ready part; a layer can be
computed once it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.hardware import Device, sending
from edgellm.coldstart.home import Home
from edgellm.coldstart.problem import Cut

SIZES = (256, 128, 64, 32)
"""Tokens per part that are tried. A layer would not compute longer parts any faster."""
_EQUAL = 1.01  # factor of the least seconds within which sizes are equally good


@dataclass(frozen=True, slots=True)
class PrefillChunks:
    """Tokens of each part, seconds to the first token with it, and why it was chosen."""

    tokens: int
    seconds: float
    reason: str


def choose(home: Home, cut: Cut) -> PrefillChunks:
    """Return the size of parts with the least time to the first token; of sizes about equal, the longest."""
    found = {size: first_token(home, cut, size) for size in SIZES}
    least = min(found.values())
    best, longest = next(size for size in SIZES if found[size] <= _EQUAL * least), found[SIZES[0]]
    if best >= home.tokens_in or best == SIZES[0]:
        return PrefillChunks(best, found[best], f"parts of {best} tokens: smaller parts would not be faster")
    saved = 1.0 - found[best] / longest
    return PrefillChunks(best, found[best], f"parts of {best} tokens: {saved:.0%} sooner than with {SIZES[0]}")


def first_token(home: Home, cut: Cut, size: int) -> float:
    """Return the seconds from the request until the last stage has computed the last part."""
    devices, model, tokens_in = home.devices, home.model, home.tokens_in
    parts = [min(size, tokens_in - at) for at in range(0, tokens_in, size)]
    arrive = [0.0] * len(parts)
    first, sender = 0, None
    for device, count in cut:
        last = first + count == model.shape.layers
        if sender is not None:
            free = 0.0  # parts are sent one after the other
            hops = {n: sending(devices, model.shape.activation(n), home.links)[sender, device] for n in set(parts)}
            for at, tokens in enumerate(parts):
                arrive[at] = free = max(free, arrive[at]) + float(hops[tokens])
        loaded = _loads(devices[device], model, first, count, home.cold)
        work = [_layer(devices[device], model, tokens, sum(parts[: at + 1])) for at, tokens in enumerate(parts)]
        head = model.head_flops / devices[device].speed(1) if last and model.head_flops else 0.0
        arrive = _stage(arrive, loaded, work)
        arrive[-1] += head
        first, sender = first + count, device
    return arrive[-1]


def _stage(arrive: Sequence[float], loaded: Sequence[float], work: Sequence[float]) -> list[float]:
    """Return when each part leaves a stage with layers loaded at `loaded`; `work`: seconds per layer, by part."""
    at, since, now = [0] * len(arrive), list(arrive), 0.0
    left = set(range(len(arrive)))
    while left:
        ready = [(max(since[part], loaded[at[part]]), part) for part in left if _free(part, at)]
        soonest = max(now, min(moment for moment, _ in ready))
        part = min(part for moment, part in ready if moment <= soonest)
        now = since[part] = soonest + work[part]
        at[part] += 1
        if at[part] == len(loaded):
            left.discard(part)
    return since


def _free(part: int, at: Sequence[int]) -> bool:
    """Return whether the part before has left the layer that this part needs next."""
    return part == 0 or at[part - 1] > at[part]


def _loads(device: Device, model: ModelCosts, first: int, count: int, cold: bool) -> list[float]:
    """Return when each layer of a stage is loaded (equation 19)."""
    found, total = [], 0.0
    for layer in range(first, first + count):
        weights = model.layer_bytes[layer] + model.embedding * (layer == 0)
        weights += model.head * (layer == model.shape.layers - 1)
        total += weights / device.disk if cold else 0.0
        found.append(total)
    return found


def _layer(device: Device, model: ModelCosts, tokens: int, context: int) -> float:
    """Return the seconds for one layer (equation 21), for tokens that attend to `context` tokens."""
    return float(model.shape.flops(tokens, context)) / device.speed(tokens)
