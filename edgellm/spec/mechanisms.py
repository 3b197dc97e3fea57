"""Mechanisms that the rest works without: each is a file, or a few, and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from edgellm.errors import InvalidOption

MECHANISMS = {
    "calibration": "edgellm.spec.ngram.calibration",
    "early exit": "edgellm.llm.early_exit",
    "fitting": "edgellm.llm.profiling",
    "importance": "edgellm.spec.drafters.importance",
    "parallel drafting": "edgellm.spec.drafters.parallel",
    "prompt difficulty": "edgellm.spec.gates.prompt_difficulty",
    "reuse": "edgellm.spec.ngram.reuse",
    "speculators": "edgellm.spec.drafters.speculator",
    "templates": "edgellm.spec.ngram.template_replay",
    "translation": "edgellm.spec.drafters.translation",
}
"""The modules of mechanisms, by name."""


def has(name: str) -> bool:
    """Return whether a mechanism is there."""
    return name in MECHANISMS


def mechanism(name: str) -> Any:
    """Return the module of a mechanism, imported when it is first needed. Raise InvalidOption where it is left out."""
    if name not in MECHANISMS:
        raise InvalidOption(f"The {name} is left out of this edgellm.", "Do without it, or install the whole package.")
    return import_module(MECHANISMS[name])


def load(place: str) -> Any:
    """Return what a table names as "module:attribute"."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
