"""Names that benchmarks had before version 0.2, accepted for that one version."""

from __future__ import annotations

from types import MappingProxyType

RENAMED = MappingProxyType({
    "retrieval": "coordgen",
    "coldstart": "csgo",
    "reliability": "robustness",
    "synera/gates": "synera/gate_cost",
    "synera/guesses": "synera/verdict_prediction",
    "synera/devices": "synera/many_devices",
    "synera/devices-kept": "synera/many_devices_kept",
    "synera/first": "synera/first_verdict",
    "synera/exits": "synera/early_exit",
    "synera/paths": "robustness/paths",
    "synera/kills": "robustness/kill_verifier",
    "synera/kills-budget": "robustness/kill_verifier_budget",
    "retrieval/rows": "engine/rows",
    "retrieval/heads": "engine/lm_head",
    "retrieval/progressive": "coordgen/graph_switching",
    "coldstart/home": "csgo/cold_start",
    "coldstart/home-wide": "csgo/cold_start_wide",
    "reliability/http": "robustness/http_load",
})  # fmt: skip


def current(name: str) -> str:
    """Return the current name of a suite or benchmark; an unknown name is returned as it is."""
    suite, slash, part = name.partition("/")
    return RENAMED.get(name) or f"{RENAMED.get(suite, suite)}{slash}{part}"
