"""What an attack is, what it found, and the attacks that exist."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import bench.attack


@dataclass(frozen=True, slots=True)
class Found:
    """Outcome of one attack: trials made, one sentence for each that did harm, and figures worth keeping."""

    tried: int
    wrong: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attack:
    """A way to do harm. `run(quick)` tries it on real processes, sockets and files; `quick` takes few trials."""

    name: str
    about: str
    run: Callable[[bool], Found]


def attacks() -> dict[str, Attack]:
    """Return every attack by name: the `ATTACKS` of all modules in this package."""
    names = sorted(module.name for module in pkgutil.iter_modules(bench.attack.__path__))
    modules = (importlib.import_module(f"bench.attack.{name}") for name in names if not name.startswith("__"))
    return {attack.name: attack for module in modules for attack in getattr(module, "ATTACKS", ())}
