"""JSON schemas that a reply must follow: prepared for llguidance, and applied as masks over the vocabulary."""

from __future__ import annotations

from edgellm.engine.grammar.json_schema import MAX_SCHEMA, unkept, without_descriptions
from edgellm.engine.grammar.matcher import Grammar

__all__ = ["MAX_SCHEMA", "Grammar", "unkept", "without_descriptions"]
