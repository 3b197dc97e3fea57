"""Measure the time to render a conversation in a child process, and compare templates there with plain Jinja.

    python -m bench.engine.chat_templates [--repeats 200]
    python -m bench.engine.chat_templates --templates FOLDER

The bundled pair's template is known and rendered here; with a comment appended, it is rendered in a child process.
*First* is the first rendering: here it compiles the template, in the child Python also starts and imports Jinja.
Milliseconds: medians of turns in which both alternate.

With `--templates` nothing is timed. Every template of a folder, such as llama.cpp's `models/templates`, renders several
conversations in the child process and in plain Jinja, called as Hugging Face's `apply_chat_template` calls it. The
result has the outcome of each: `same` text, `both refuse` the conversation, `refused` by the child alone and why, or
`differs`; and the markup of thoughts that edgellm finds in the template.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, TypeAlias

from jinja2 import Environment
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser

from bench.harness.report import write
from bench.harness.statistics import alternate
from edgellm.engine import Model
from edgellm.engine.chat.template import Template
from edgellm.engine.chat.thinking import find_markup
from edgellm.errors import ModelUnsupported
from testkit import ROOT

LENGTHS = (2, 20, 200)  # messages
FIRST = 10  # new templates


def conversation(n: int) -> list[dict[str, str]]:
    """Return a conversation of `n` messages."""
    return [{"role": ("user", "assistant")[i % 2], "content": f"{i} " + "some words of a turn " * 10} for i in range(n)]


def timed(template: Template, messages: list[dict[str, str]]) -> float:
    """Return the milliseconds of one rendering."""
    began = perf_counter()
    template.render(messages, "<s>", "</s>")
    return 1e3 * (perf_counter() - began)


def first(source: str) -> float:
    """Return the milliseconds of the first rendering."""
    template = Template(source, "a model")
    taken = timed(template, conversation(1))
    template.close()
    return taken


def measured(repeats: int) -> list[dict[str, Any]]:
    """Return a row of milliseconds, here and in a child, for the first rendering and for each length."""
    with Model.load(ROOT / "models" / "draft.gguf", text_only=True) as model:
        source = model.metadata["tokenizer.chat_template"]
    other = source + "{# #}"
    here, child = alternate(FIRST, lambda: first(source), lambda: first(other))
    rows = [{"what": "first", "here": median(here), "child": median(child)}]
    templates = Template(source, "here"), Template(other, "child")
    for n in LENGTHS:
        messages = conversation(n)
        here, child = alternate(repeats, *(partial(timed, template, messages) for template in templates))
        rows.append({"what": f"{n} messages", "here": median(here), "child": median(child)})
    templates[1].close()
    return rows


Variables: TypeAlias = dict[str, Any]
QUESTION: Variables = {"role": "user", "content": "Where is the mug?"}
ANSWER: Variables = {"role": "assistant", "content": "On the shelf."}
SYSTEM: Variables = {"role": "system", "content": "Be brief."}
THANKS: Variables = {"role": "user", "content": " Thanks! And the <b>red</b> one?\n"}
THOUGHT: Variables = ANSWER | {"reasoning_content": "It was in the hall.", "thinking": "It was in the hall."}
TOOL: Variables = {
    "type": "function",
    "function": {
        "name": "find",
        "description": "Find a thing.",
        "parameters": {"type": "object", "properties": {"thing": {"type": "string"}}, "required": ["thing"]},
    },
}
CALL: Variables = {"id": "call00001", "type": "function", "function": {"name": "find", "arguments": {"thing": "mug"}}}
CALLED: list[Variables] = [
    QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "find", "tool_call_id": "call00001", "content": "shelf"},
]
CONVERSATIONS: dict[str, tuple[list[Variables], Variables]] = {
    "user": ([QUESTION], {}),
    "system and user": ([SYSTEM, QUESTION], {}),
    "many turns": ([SYSTEM, *[QUESTION, ANSWER, THANKS, ANSWER] * 5, QUESTION], {}),
    "assistant last": ([QUESTION, ANSWER], {}),
    "tools": ([SYSTEM, QUESTION], {"tools": [TOOL]}),
    "tool called": (CALLED, {"tools": [TOOL]}),
    "thinking on": ([SYSTEM, QUESTION, THOUGHT, THANKS], {"enable_thinking": True, "thinking": True}),
    "thinking off": ([SYSTEM, QUESTION, THOUGHT, THANKS], {"enable_thinking": False, "thinking": False}),
    "thought last": ([QUESTION, THOUGHT], {"enable_thinking": True}),
    "effort": ([QUESTION], {"reasoning_effort": "low"}),
}
"""Messages and further variables."""
SAME, BOTH_REFUSE, REFUSED, DIFFERS = "same", "both refuse", "refused", "differs"


class _Generation(Extension):
    """`{% generation %}`, whose contents are rendered as they are."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def plain_jinja(source: str) -> Callable[[Variables], str]:
    """Return a function that renders variables with Jinja, without a sandbox."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])

    def tojson(value: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)  # noqa: DTZ005
    template = environment.from_string(source)
    return lambda variables: template.render(**{"tools": None, "documents": None, **variables})


def outcome(
    template: Template, plain: Callable[[Variables], str], messages: list[Variables], variables: Variables
) -> str:
    """Return how the two renderings of a conversation compare."""
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
    try:
        wanted = plain({"messages": messages, **tokens, **variables})
    except Exception:  # noqa: BLE001  a template may raise anything
        wanted = None
    try:
        found = template.render(messages, "<s>", "</s>", variables)
    except ModelUnsupported as error:
        return BOTH_REFUSE if wanted is None else f"{REFUSED}: {error.what}"
    return SAME if found == wanted else DIFFERS


def compared(path: Path) -> dict[str, Any]:
    """Return the outcomes of a template's conversations, and its markup."""
    source = path.read_text(encoding="utf-8")
    template, markup = Template(source, path.stem), find_markup(source, lambda _: False)
    try:
        plain = plain_jinja(source)
        outcomes = {name: outcome(template, plain, *given) for name, given in CONVERSATIONS.items()}
    finally:
        template.close()
    return {
        "template": path.stem,
        "thinking": None if markup is None else [markup.opening, markup.closing],
        "outcomes": outcomes,
    }


def outcome_table(found: Mapping[str, Any]) -> str:
    """Return a line for each template, and the number of conversations with each outcome."""
    lines, totals = [], Counter[str]()
    for row in found["templates"]:
        counts = Counter(text.partition(":")[0] for text in row["outcomes"].values())
        totals += counts
        shown = ", ".join(f"{count} {name}" for name, count in counts.items())
        lines.append(f"{row['template']:<50} {shown:<30} {' … '.join(row['thinking'] or ())}")
        lines += [f"    {name}: {text}" for name, text in row["outcomes"].items() if text not in (SAME, BOTH_REFUSE)]
    shown = ", ".join(f"{count} {name}" for name, count in totals.items())
    return "\n".join([*lines, f"{len(found['templates'])} templates: {shown}"]) + "\n"


def table(found: Mapping[str, Any]) -> str:
    """Return the milliseconds of each length, here and in the child; or the outcomes of templates."""
    if "templates" in found:
        return outcome_table(found)
    lines = [f"{'milliseconds':<14}{'here':>9}{'child':>9}"]
    lines += [f"{row['what']:<14}{row['here']:>9.2f}{row['child']:>9.2f}" for row in found["rows"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--templates", type=Path, metavar="FOLDER", help="compare its templates, and time nothing")
    parser.add_argument("--name", default="chat_templates", help="of the result file")
    arguments = parser.parse_args()
    found: dict[str, Any]
    if arguments.templates is None:
        name, found = arguments.name, {"rows": measured(arguments.repeats)}
    else:
        paths = sorted(arguments.templates.glob("*.jinja"))
        name, found = f"{arguments.name}_outcomes", {"templates": [compared(path) for path in paths]}
    sys.stdout.write(table(found))
    write(name, "bench.engine.chat_templates", found)


if __name__ == "__main__":
    main()
