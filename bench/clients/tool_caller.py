"""A verifier that calls tools as it is told: the first one described, with arguments that are valid by its schema.

The bundled models call none. Everything but the words is real: how tools are described to the model, how its calls are
read, and how they and their results travel.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgellm.engine import Model
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, settled
from edgellm.spec.types import Ids, Verdict

RAIN = "It rains."  # said after the result of a tool
_DESCRIBED = re.compile(r"one JSON object per line:\n(.*?)\nTo call functions", re.DOTALL)
_FORCED = re.compile(r'<tool_call>\n\{"name": "([^"]+)", "arguments": $')


class ToolCaller(Verifier):
    """The verifier. One session at a time."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._text: Ids = np.array([], np.int32)
        self._prompt = 0

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("caller", 16_384)

    def open(self, state: GenerationState) -> Session:
        """Decide the reply to a prompt."""
        prompt = b"".join(map(self._model.control_text, state.ids.tolist())).decode("utf-8", "replace")
        self._prompt = len(state.ids)
        end = [] if self._model.end_of_turn is None else [self._model.end_of_turn]
        self._text = np.append(self._model.tokenize(reply_to(prompt)), end).astype(np.int32)
        return Session(state, lambda request: settled(self._next(request.prefix)))

    def _next(self, prefix: Ids) -> Verdict:
        """Return the next token of the reply."""
        return Verdict(0, self._text[len(prefix) - self._prompt :][:1])


def reply_to(prompt: str) -> str:
    """Return the reply: a call, or an answer where the result of a call is there already."""
    described = _DESCRIBED.search(prompt)
    if described is None or "<tool_response>" in prompt[described.end() :]:
        return RAIN
    tools = {tool["name"]: tool for tool in map(json.loads, described[1].splitlines())}
    forced = _FORCED.search(prompt)
    tool = next(iter(tools.values())) if forced is None else tools[forced[1]]
    schema = tool.get("parameters", {})
    arguments = json.dumps(instance(schema, schema))
    if forced is not None:
        return f"{arguments}}}</tool_call>"
    return f'<tool_call>{{"name": "{tool["name"]}", "arguments": {arguments}}}</tool_call>'


def instance(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Any:
    """Return a value that is valid by a simple `schema` within `root`."""
    if "$ref" in schema:
        found: Any = root
        for part in str(schema["$ref"]).removeprefix("#/").split("/"):
            found = found[part]
        return instance(found, root)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return instance(schema[key][0], root)
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: instance(one, root) for name, one in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance(schema.get("items", {"type": "string"}), root)]
    return {"string": "Bern", "integer": 20, "number": 20.5, "boolean": True}.get(kind)
