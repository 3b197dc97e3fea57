"""What chat templates make of the conversations that clients have.

Each conversation goes the way of a request: from OpenAI's messages to the tokens of a model with that template. The
templates are the `.jinja` files of FOLDER, such as llama.cpp's collection in `models/templates`, by default our own
small ones, each with a trait of a family. `as it is`: every word is in the prompt. `changed`: also that, in another
form, by the rules below. `loses words` or `refused`: neither, which is a fault.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.engine import Model
from edgellm.engine.model import LoadSpec
from edgellm.errors import EdgeError
from edgellm.http.schemas.requests import ChatRequest
from edgellm.llm.messages import PromptWriter
from edgellm.spec.params import ReplyOptions
from edgellm.storage.model_files import resolve
from testkit.chat_traits import TRAITS
from testkit.thinking_templates import with_template

RESULTS = ("as it is", "changed", "loses words", "refused")
WORDS = ("SYSTEM", "LATER", "ONE", "TWO", "SAID", "ROME", "BERN", "RESULT 0", "RESULT 1", "PICTURE")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "TOLD", "parameters": CITY}}]


def _turn(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def _calls(*cities: str, ids: bool = True, **fields: Any) -> list[dict[str, Any]]:
    """Return calls for these cities, and their results."""
    calls, results = list[Any](), list[Any]()
    for number, city in enumerate(cities):
        name = f"call_{number}" if ids else None
        calls.append({"id": name, "function": {"name": "weather", "arguments": json.dumps({"city": city})}})
        results.append(_turn("tool", f"RESULT {number}", tool_call_id=name))
    return [_turn("assistant", None, tool_calls=calls, **fields), *results]


SYSTEM, LATER = _turn("system", "SYSTEM"), _turn("system", "LATER")
ONE, TWO, SAID = _turn("user", "ONE"), _turn("user", "TWO"), _turn("assistant", "SAID")
PICTURE = [{"type": "text", "text": "PICTURE"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
SHAPES: Mapping[str, list[dict[str, Any]]] = {
    "system first": [SYSTEM, ONE, SAID, TWO],
    "system late": [SYSTEM, ONE, SAID, LATER, TWO],
    "system twice": [SYSTEM, LATER, ONE],
    "two user turns": [ONE, TWO],
    "assistant first": [SAID, ONE],
    "a tool's result, then the user": [ONE, *_calls("ROME"), TWO],
    "parallel calls": [ONE, *_calls("ROME", "BERN")],
    "calls without ids": [ONE, *_calls("ROME", "BERN", ids=False), SAID, TWO],
    "empty turns": [ONE, _turn("assistant", ""), TWO, _turn("assistant", None), _turn("user", "")],
    "developer": [_turn("developer", "SYSTEM"), ONE, SAID, _turn("developer", "LATER"), TWO],
    "thoughts": [ONE, {**SAID, "reasoning_content": "HM"}, TWO, *_calls("ROME", reasoning_content="HM")],
    "pictures": [_turn("user", PICTURE), SAID, TWO],
    "the assistant last": [ONE, SAID],
}


def attempt(writer: PromptWriter, turns: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return what becomes of a conversation, and the rules that changed it, or what is wrong."""
    asked, told = json.dumps(turns), list[str]()
    request = ChatRequest.model_validate({"messages": turns, "tools": TOOLS if "tool_calls" in asked else None})
    try:
        ids = writer.ids(request.turns(), request.options(ReplyOptions(), writer.context), tell=told.append)
    except EdgeError as error:
        return "refused", [error.what]
    text = b"".join(map(writer.model.control_text, ids.tolist())).decode("utf-8", "replace")
    if lost := [word for word in WORDS if word in asked and word not in text]:
        return "loses words", lost
    return "changed" if told else "as it is", [one.partition(".")[0] for one in dict.fromkeys(told)]


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each shape, the rules that were needed, and all faults."""
    lines = [f"{'':32}{''.join(f'{name:>13}' for name in RESULTS)}"]
    lines += [f"{shape:32}{''.join(f'{one[name]:13}' for name in RESULTS)}" for shape, one in found["shapes"].items()]
    lines += [f"{count:5} {rule}" for rule, count in sorted(found["rules"].items(), key=lambda one: -one[1])]
    return "\n".join([*lines, *found["faults"], f"{found['templates']} templates"]) + "\n"


def measure(folder: Annotated[Path | None, "of .jinja files; without it, our own"] = None) -> Figures:
    """Return for each shape how many templates do what, and how often each rule was needed."""
    sources = dict(TRAITS)
    if folder is not None:
        sources = {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}
    shapes = {shape: dict.fromkeys(RESULTS, 0) for shape in ("all", *SHAPES)}
    rules, faults = Counter[str](), list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        for name, source in track(sources.items(), "templates"):
            path = with_template(resolve("edgellm-draft"), Path(temporary) / "model.gguf", source)
            with Model.load(path, LoadSpec(chat=True)) as model:
                for shape, turns in SHAPES.items():
                    result, why = attempt(PromptWriter(model, 8192, grammars=True), turns)
                    shapes[shape][result] += 1
                    shapes["all"][result] += 1
                    if result in ("as it is", "changed"):
                        rules.update(why)
                    else:
                        faults.append(f"{name}: {shape}: {result}: {', '.join(why)}")
    return {"templates": len(sources), "shapes": shapes, "rules": dict(rules), "faults": faults}


def failures(found: Figures) -> list[str]:
    """Return the conversations that some template does not write whole."""
    return list(found["faults"])
