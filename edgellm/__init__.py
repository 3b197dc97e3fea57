"""edgellm: a small model drafts, a bigger one verifies.

`for token in edgellm.generate("What is photosynthesis?"): ...`
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.engine import Message
    from edgellm.errors import EdgeError
    from edgellm.llm import LLM, generate
    from edgellm.llm.messages import compose
    from edgellm.spec.params import ReplyOptions
    from edgellm.spec.stats import Summary
    from edgellm.spec.stream import Reply
    from edgellm.spec.types import Explanation, Notice, Source, Token

logging.getLogger(__name__).addHandler(logging.NullHandler())  # a library says nothing unless it is asked to

__version__ = "0.1.0"
__all__ = [
    "LLM", "EdgeError", "Explanation", "Message", "Notice", "Reply", "ReplyOptions", "Source", "Summary", "Token",
    "compose", "generate",
]  # fmt: skip

_HOMES = {
    "edgellm.llm": ("LLM", "compose", "generate"),
    "edgellm.engine": ("Message",),
    "edgellm.errors": ("EdgeError",),
    "edgellm.spec.params": ("ReplyOptions",),
    "edgellm.spec.stats": ("Summary",),
    "edgellm.spec.types": ("Explanation", "Notice", "Source", "Token"),
    "edgellm.spec.stream": ("Reply",),
}


def __getattr__(name: str) -> object:
    """Return a public name, imported when it is first used, because llama.cpp takes a while to load."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
