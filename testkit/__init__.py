"""Shared by tests and benchmarks: models, networks, processes and hostile input."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Root of the checkout."""
_KEPT = ("EDGELLM_AMX", "EDGELLM_PAIR", "EDGELLM_PROBE")


def environment() -> dict[str, str]:
    """Return this process's environment for another machine's, without the user's own settings of edgellm; what they
    say of llama.cpp on this computer, and of the pair that answers, holds for both."""
    return {name: value for name, value in os.environ.items() if name in _KEPT or not name.startswith("EDGELLM_")}
