"""Pipelined prefill: a prompt is split into parts, and while a stage computes a part, the next stage computes the part
before. Smaller parts fill the pipeline sooner but use each device less efficiently (equation 8).

The simulated stages take parts through their layers one at a time, always the oldest ready part; a layer can be
computed once it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from edgellm.coldstart.costs import Device, ModelCosts, sending
from edgellm.coldstart.home import Home
from edgellm.coldstart.problem import Cut
from edgellm.layer_range import LayerRange

SIZES = (256, 128, 64, 32)
"""Tokens per part that are tried. A layer would not compute longer parts any faster."""


def choose(home: Home, cut: Cut) -> tuple[int, str]:
    """Return the tokens of a part with the least time to the first token, and why; the longest of about equal ones."""
    found = {size: first_token(home, cut, size) for size in SIZES}
    best = min(SIZES, key=lambda size: round(found[size] / found[SIZES[0]], 2))
    if best >= home.tokens_in or best == SIZES[0]:
        return best, f"parts of {best} tokens: smaller parts would not be faster"
    saved = 1.0 - found[best] / found[SIZES[0]]
    return best, f"parts of {best} tokens: {saved:.0%} sooner than with {SIZES[0]}"


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
        loads = (model.size(LayerRange(at, at + 1)) / devices[device].disk for at in range(first, first + count))
        loaded = list(accumulate(loads)) if home.cold else [0.0] * count  # eq. 19
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


def _layer(device: Device, model: ModelCosts, tokens: int, context: int) -> float:
    """Return the seconds for one layer (equation 21), for tokens that attend to `context` tokens."""
    return float(model.shape.flops(tokens, context)) / device.speed(tokens)
