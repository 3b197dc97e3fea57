"""Mechanisms that the rest works without: each is a file, or a few, and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from edgellm.errors import InvalidOption

MECHANISMS = {
    "early exit": "edgellm.llm.early_exit",
    "fitting": "edgellm.llm.profiling",
    "prompt difficulty": "edgellm.spec.gates.prompt_difficulty",
    "translation": "edgellm.spec.drafters.translation",
}
"""The modules of mechanisms, by name."""


def mechanism(name: str) -> Any:
    """Return the module of a mechanism, imported when it is first needed. Raise InvalidOption where it is left out."""
    if name not in MECHANISMS:
        raise InvalidOption(f"The {name} is left out of this edgellm.", "Do without it, or install the whole package.")
    return import_module(MECHANISMS[name])
