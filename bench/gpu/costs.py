"""What capturing attention and deciding by a gate costs beside drafting a token."""

from __future__ import annotations

from typing import Any

from bench.gpu.machine import Machine
from bench.synera import gate_cost
from edgellm.engine import Model
from edgellm.spec.gates.profile import Profile
from models.pairs import PAIRS


def measured(machine: Machine) -> dict[str, Any]:
    """Return the costs at the smallest shape, and on the bundled draft model."""
    profile, paths = Profile.load(PAIRS["home"].profile), {"edgellm-draft": PAIRS["home"].file("draft")}
    paths |= {f"{shape}, random weights": machine.random_model(shape) for shape in machine.amount.shapes[:1]}
    models = {}
    for name, path in paths.items():
        with Model.load(path, hardware=machine.hardware()) as model:
            models[name] = gate_cost.measured(model, profile, 4, machine.threads, 2 * machine.amount.repeats)
    return {"models": models}


def table(found: dict[str, Any]) -> str:
    """Return what `bench.synera.gate_cost` shows."""
    return gate_cost.table(found)
