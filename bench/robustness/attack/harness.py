"""An attack, its outcome, and the list of all attacks."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import bench.robustness.attack


@dataclass(frozen=True, slots=True)
class Found:
    """Outcome of one attack: the number of trials, a sentence for each harmful one, and figures to keep."""

    tried: int
    wrong: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack. `run(quick)` tries it on real processes, sockets and files; `quick` takes few trials."""

    name: str
    about: str
    run: Callable[[bool], Found]


def attacks() -> dict[str, Attack]:
    """Return every attack by name: the `ATTACKS` of all modules in this package and its subpackages."""
    package = bench.robustness.attack
    names = sorted(module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))
    modules = (importlib.import_module(name) for name in names if not name.endswith("__main__"))
    return {attack.name: attack for module in modules for attack in getattr(module, "ATTACKS", ())}
