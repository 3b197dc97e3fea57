"""A verifier that says what a script wants: by default a call of the first tool described, with arguments valid by its
schema.

The bundled models call none. Everything but the words is real: how tools are described to the model, how its calls are
read, and how they and their results travel.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from edgellm.engine import Model, common_prefix
from edgellm.spec.protocols import Capabilities, GenerationState, Session, Verifier, settled
from edgellm.spec.types import Ids, Verdict

RAIN = "It rains."  # said after the result of a tool
_DESCRIBED = re.compile(r"one JSON object per line:\n(.*?)\nTo call functions", re.DOTALL)
_RESULT = re.compile(r"<tool_response>(.*?)</tool_response>", re.DOTALL)
_MOST_HELD = 8  # texts
Says = Callable[[Mapping[str, Any], list[str]], str]
"""Returns a reply, given the tools by their names and the results of all calls so far."""


class ToolCaller(Verifier):
    """The verifier. One session at a time. It computes nothing, and counts as read what the last texts do not begin
    with; `prompts` are the tokens of each prompt, those of them that were read, and those of the reply."""

    def __init__(self, model: Model, says: Says | None = None) -> None:
        self._model, self._says = model, says or first_call
        self._text: Ids = np.array([], np.int32)
        self._prompt = self._cached = 0
        self._held: list[Ids] = []
        self.prompts: list[tuple[int, int, int]] = []

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities("caller", 2**18, grammars=True)

    def open(self, state: GenerationState) -> Session:
        """Decide the reply to a prompt."""
        prompt = b"".join(map(self._model.control_text, state.ids.tolist())).decode("utf-8", "replace")
        self._prompt = len(state.ids)
        end = [] if self._model.end_of_turn is None else [self._model.end_of_turn]
        described, constraint = _DESCRIBED.search(prompt), state.sampling.constraint
        tools = {} if described is None else {one["name"]: one for one in map(json.loads, described[1].splitlines())}
        text = self._says(tools, _RESULT.findall(prompt, described.end() if described else 0))
        if constraint is not None:
            schema = json.loads(constraint.schema)
            text = json.dumps(instance(schema, schema), separators=(",", ":")) + "</tool_call>" * bool(tools)
        self._text = np.append(self._model.tokenize(text), end).astype(np.int32)
        self._cached = max((common_prefix(one, state.ids) for one in self._held), default=0)
        self._held = [*self._held, np.append(state.ids, self._text)][-_MOST_HELD:]
        self.prompts.append((self._prompt, self._prompt - self._cached, len(self._text)))
        return Session(state, lambda request: settled(self._next(request.prefix)))

    def _next(self, prefix: Ids) -> Verdict:
        """Return the next token of the reply."""
        return Verdict(0, self._text[len(prefix) - self._prompt :][:1], cached=self._cached)


def first_call(tools: Mapping[str, Any], results: list[str]) -> str:
    """Return a call of the first tool, or an answer where there is none, or a result."""
    if results or not tools:
        return RAIN
    name, tool = next(iter(tools.items()))
    schema = tool.get("parameters", {})
    return call(name, instance(schema, schema))


def call(name: str, arguments: Any) -> str:
    """Return a call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


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
