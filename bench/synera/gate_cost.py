"""Measure the cost of a gate on the device, against that of the drafted tokens (Synera, Table 5).

At the Qwen2.5-0.5B shape (random weights, Q4_0) and on the bundled draft model, chunks are drafted after the same
prompt, once without a gate and once with capture of the attention that a gate needs; all runs take turns. Then each
gate decides on such chunks, with the bundled pair's profile and a budget of 0.2.

Columns, for each drafted token: microseconds of capturing attention, microseconds of the decision, and both together as
a share of the time of drafting the token.
"""

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.results import Figures
from bench.harness.statistics import alternate
from edgellm.engine import Capture, Context, ContextSpec, Model
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import BudgetController, choose
from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import Gate, GenerationLimits, GenerationState
from edgellm.spec.types import Chunk
from edgellm.storage.model_files import resolve
from models.pairs import PAIRS
from testkit.gguf import random_model

POSITIONS = 256
PROMPT = np.arange(300, 364, dtype=np.int32)
BUDGET = 0.2
DECISIONS = 400
GATES = ("auto", "synera", "confidence", "importance", "random")
NEEDS_ATTENTION = ("synera", "importance")


def drafters(model: Model, layers: tuple[int, ...], threads: int, stack: ExitStack) -> dict[str, ModelDrafter]:
    """Return drafters that capture the attention of no layer, of `layers`, and of all layers."""
    found = {}
    for name, captured in (("none", ()), ("profile", layers), ("all", tuple(range(model.n_layer)))):
        capture = Capture(attention=captured) if captured else None
        context = Context(model, ContextSpec(n_ctx=POSITIONS, threads=threads), capture=capture)
        found[name] = ModelDrafter(model, context, captured)
        stack.callback(found[name].close)
    return found


def drafting(drafter: ModelDrafter, gamma: int) -> float:
    """Return the seconds for a drafted token of one chunk."""
    began = perf_counter()
    chunk = drafter.propose(GenerationState(PROMPT), gamma)
    return (perf_counter() - began) / len(chunk)


def deciding(gate: Gate, chunk: Chunk) -> float:
    """Return the seconds for one decision, the median of many along a reply."""
    taken = []
    state = GenerationState(limits=GenerationLimits(DECISIONS, DECISIONS + 1))
    for _ in range(DECISIONS):
        began = perf_counter()
        gate.decide(state, chunk)
        taken.append(perf_counter() - began)
    return median(taken)


def measured(model: Model, profile: Profile, gamma: int, threads: int, repeats: int) -> dict[str, Any]:
    """Return the microseconds of drafting and of every gate, for each drafted token."""
    with ExitStack() as stack:
        found = drafters(model, tuple(layer for layer in profile.terms.layers if layer < model.n_layer), threads, stack)
        for drafter in found.values():
            drafting(drafter, gamma)
        taken = alternate(repeats, *(partial(drafting, drafter, gamma) for drafter in found.values()))
        plain = taken[0]
        extra = {
            name: median(one - other for one, other in zip(seconds, plain, strict=True))
            for name, seconds in zip(found, taken, strict=True)
        }
        chunk = found["profile"].propose(GenerationState(PROMPT), gamma)
    token = median(plain)
    gates = {}
    for name in GATES:
        gate = choose(
            ReplyOptions(gate=name, budget=BUDGET, gamma=gamma), 0, profile=profile, controller=BudgetController()
        ).gate
        decision = deciding(gate, chunk) / len(chunk)
        captured = extra["profile"] if name in NEEDS_ATTENTION else 0.0
        gates[name] = {
            "capture_us": 1e6 * captured, "decision_us": 1e6 * decision, "share": (captured + decision) / token,
        }  # fmt: skip
    return {"token_us": 1e6 * token, "all_layers_us": 1e6 * extra["all"], "layers": model.n_layer, "gates": gates}


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table for each model: the cost of each gate for a drafted token."""
    lines = []
    for name, found in results["models"].items():
        everything = found["all_layers_us"] / found["token_us"]
        lines += [
            "{}: a drafted token takes {:.2f} ms; attention of all {} layers {:+.1%}.".format(
                name, found["token_us"] / 1e3, found["layers"], everything
            ),
            "",
            "| gate | attention, µs | decision, µs | of a drafted token |",
            "|---|---|---|---|",
        ]
        for gate, row in found["gates"].items():
            lines.append(f"| {gate} | {row['capture_us']:.0f} | {row['decision_us']:.0f} | {row['share']:.1%} |")
        lines.append("")
    return "\n".join(lines)


def measure(repeats: int = 60, gamma: int = 4, threads: int = 1) -> Figures:
    """Return the figures of both models."""
    profile = Profile.load(PAIRS["home"].profile)
    each = partial(measured, profile=profile, gamma=gamma, threads=threads, repeats=repeats)
    models = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half.gguf"
        random_model.write(path, random_model.SHAPES["qwen2.5-0.5b"], "Q4_0", 0)
        with Model.load(path) as half:
            models["Qwen2.5-0.5B shape, Q4_0"] = each(half)
    with Model.load(resolve("edgellm-draft")) as bundled:
        models["edgellm-draft"] = each(bundled)
    return {"gamma": gamma, "threads": threads, "repeats": repeats, "models": models}
