"""The tools of a request, in the form of the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgellm.engine import Message, Model
from edgellm.engine.chat.messages import plain_turns
from edgellm.errors import InvalidOption
from edgellm.llm.tools.formats import TAGGED, ToolFormat, find_format
from edgellm.llm.tools.schema import Tool
from edgellm.spec.params import ANY_TOOL, ReplyOptions

_GENERIC = """You can call functions. They are described here, one JSON object per line:
{tools}
To call functions, write nothing but one line for each call, in this form:
<tool_call>{{"name": "NAME", "arguments": {{...}}}}</tool_call>
The results come in the next message. Answer in plain text if no function is needed."""


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of one request, and the model's format for calls.

    `generic`: the model's template has no tools, so a system message describes them. `choice` names the function that
    must be called, or is ANY_TOOL; None: the model decides. `constrained`: a required call follows `schema`.
    """

    tools: tuple[Tool, ...]
    format: ToolFormat
    generic: bool
    choice: str | None = None
    constrained: bool = False

    @classmethod
    def of(cls, model: Model, options: ReplyOptions, *, grammars: bool) -> Toolbox:
        """Return the tools of `options` in the form of `model`. `grammars`: the verifier applies grammars. Raise
        InvalidOption if any of several tools must be called, and no grammar can demand that."""
        found = find_format(model.chat_template_source, model.describes_tools)
        made = cls(options.tools, found or TAGGED, found is None, options.tool_choice, grammars)
        if (schema := made.schema()) is not None:
            try:
                model.grammar(schema)
                return made
            except InvalidOption:
                """One of the tools has parameters that no grammar describes."""
        names = made.chosen()
        if len(names) > 1:
            raise InvalidOption(
                f"tool_choice asks for a call of any of {len(names)} tools, and no grammar of such calls is available:"
                f" {made.missing(grammars)}.",
                "Name one of the tools, or leave the choice to the model.",
            )
        return replace(made, choice=names[0] if names else None, constrained=False)

    def missing(self, grammars: bool) -> str:
        """Return why no grammar describes the calls; `grammars` as for `of`."""
        if not grammars:
            return "the verifier applies none"
        if self.format.objects is None:
            return "the model does not write its calls as JSON objects"
        return "the parameters of a tool have a schema that cannot be used"

    def chosen(self) -> list[str]:
        """Return the names of functions, of which one must be called; empty if the model decides."""
        if self.choice is None:
            return []
        return [str(tool["function"]["name"]) for tool in self.tools] if self.choice == ANY_TOOL else [self.choice]

    def schema(self) -> str | None:
        """Return the JSON schema of the text after `opening`; None if no call is required, or no schema fits."""
        chosen = set(self.chosen())
        if not (self.constrained and chosen):
            return None
        tools = [tool["function"] for tool in self.tools if tool["function"]["name"] in chosen]
        parameters = {one["name"]: one.get("parameters") or {"type": "object"} for one in tools}
        style = self.format
        if style.objects is None:
            return json.dumps(parameters[tools[0]["name"]]) if style.json_arguments and len(tools) == 1 else None
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": name}, style.arguments: {"$ref": f"#/$defs/{name}"}},
                "required": ["name", style.arguments],
                "additionalProperties": False,
            }
            for name in parameters
        ]
        return json.dumps(
            {"anyOf": calls, "$defs": {name: _moved(one, f"#/$defs/{name}") for name, one in parameters.items()}}
        )

    def arguments(self) -> dict[str, object]:
        """Return the arguments for the chat template."""
        return {"tools": list(self.tools)} if self.tools and not self.generic else {}

    def opening(self) -> str:
        """Return the beginning of a reply that must be a call; empty if the model decides."""
        if not (chosen := self.chosen()):
            return ""
        if self.constrained and self.format.objects is not None:
            return self.format.objects
        return self.format.forced.format(name=chosen[0])

    def messages(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation for the chat template: as it is, or in the form of a template without tools."""
        if not self.generic:
            return list(messages)
        described = _GENERIC.format(tools="\n".join(json.dumps(tool["function"]) for tool in self.tools))
        plain = plain_turns(messages)
        if plain and plain[0].role == "system":
            return [replace(plain[0], content=f"{plain[0].content}\n\n{described}"), *plain[1:]]
        return [Message("system", described), *plain]


def _moved(schema: Any, to: str) -> Any:
    """Return a JSON schema with its references adapted to the place `to` in another schema."""
    if isinstance(schema, Mapping):
        moved = {key: _moved(value, to) for key, value in schema.items()}
        reference = schema.get("$ref")
        return moved | {"$ref": to + reference[1:]} if isinstance(reference, str) and reference[:1] == "#" else moved
    return [_moved(one, to) for one in schema] if isinstance(schema, list) else schema
