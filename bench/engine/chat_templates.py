"""Measure the time to render a conversation in a child process, against this process.

    python -m bench.engine.chat_templates [--repeats 200]

The bundled pair's template is known and rendered here; with a comment appended, it is rendered in a child process.
*First* is the first rendering: here it compiles the template, in the child Python also starts and imports Jinja.
Milliseconds: medians of turns in which both alternate.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from bench.harness.report import write
from bench.harness.statistics import alternate
from edgellm.engine import Model
from edgellm.engine.chat_template import Template
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


def table(found: Mapping[str, Any]) -> str:
    """Return the milliseconds of each length, here and in the child."""
    lines = [f"{'milliseconds':<14}{'here':>9}{'child':>9}"]
    lines += [f"{row['what']:<14}{row['here']:>9.2f}{row['child']:>9.2f}" for row in found["rows"]]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--name", default="chat_templates", help="of the result file")
    arguments = parser.parse_args()
    found = {"rows": measured(arguments.repeats)}
    sys.stdout.write(table(found))
    write(arguments.name, "bench.engine.chat_templates", found)


if __name__ == "__main__":
    main()
