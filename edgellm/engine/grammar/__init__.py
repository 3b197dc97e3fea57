"""Grammars that a reply must follow: made from JSON schemas, and applied by llama.cpp."""

from __future__ import annotations

from edgellm.engine.grammar.json_schema import MAX_SCHEMA, to_gbnf
from edgellm.engine.grammar.keywords import unkept
from edgellm.engine.grammar.sampler import Grammar

__all__ = ["MAX_SCHEMA", "Grammar", "to_gbnf", "unkept"]
