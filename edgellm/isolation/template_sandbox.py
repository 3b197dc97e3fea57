"""Chat templates in Jinja's sandbox, and the functions of the process for them.

The sandbox protects Python's internals, but lets a template loop for ever or write `'a' * 10**10`. So an untrusted
template is rendered in this process, which cannot open a file or a socket or start a process, and has limits of time
and memory for each request. It imports nothing of llama.cpp.
"""

import json
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import TypeAlias

from jinja2 import BaseLoader
from jinja2.exceptions import UndefinedError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Filter, Name, Node, Test
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from edgellm.errors import ModelUnsupported
from edgellm.isolation.serving import Functions, Report
from edgellm.system import address_space, limit

SECONDS = 2.0  # processor time of a request; a template takes milliseconds
MEMORY, MEMORY_PER_BYTE = 2**26, 32  # bytes beyond an idle process's: once, and for each byte of a request
Renderer: TypeAlias = Callable[[Mapping[str, object]], str]
"""Returns a conversation as text, followed by the opening of the assistant's turn. The keys of a conversation are
`messages`, `bos_token`, `eos_token` and any arguments of the template."""

_FOR_MISSING = ("defined", "undefined", "default", "d")  # tests and filters for arguments that may be missing
_MAX_MESSAGE = 300  # characters of an error's message
_EVERYTHING = "{{ '\u00e9' ~ [1]|tojson ~ strftime_now('%c') ~ lipsum(n=1)|wordwrap }}{{ missing.attribute }}"
"""A template that has Python import all that a template may need; its error has Jinja import more."""


class _Generation(Extension):
    """The tag `{% generation %}`, which marks a model's training text; its contents are rendered as they are."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=4)
def compile_template(source: str) -> Renderer:
    """Return the function that renders conversations, with the functions of Hugging Face's `apply_chat_template` and
    today's date, in place of which some templates would write that of their making. Raises Jinja's errors; the function
    raises any error of the template."""
    render = _environment().from_string(source).render
    defaults: dict[str, object] = {
        "add_generation_prompt": True, "functions": "", "function_call": None, "tools": None, "tool_choice": None,
        "raise_exception": _raise_exception,
    }  # fmt: skip

    def rendered(conversation: Mapping[str, object]) -> str:
        now = datetime.now().strftime  # noqa: DTZ005  templates mean the local date
        dates = {"strftime_now": now, "datetime": now("%b %d %Y"), "date_string": now("%d %b %Y")}
        return render({**defaults, **dates, **conversation})

    return rendered


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        loader=BaseLoader(), trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols],
        optimized=False,  # optimising evaluates an expression once for each of its levels
    )  # fmt: skip
    environment.filters["tojson"] = _tojson
    return environment


def arguments(source: str) -> list[str]:
    """Return the names of the arguments that a template reads, sorted: variables that it does not set, or that it sets
    only where they are missing. Raises Jinja's errors."""
    tree = _environment().parse(source)
    written = {name.name for name in tree.find_all(Name) if name.ctx != "load"}
    optional = {
        one.node.name for one in tree.find_all((Test, Filter))
        if one.name in _FOR_MISSING and isinstance(one.node, Name)
    }  # fmt: skip
    return sorted(find_undeclared_variables(tree) - (written - optional))


def describe(error: Exception) -> str:
    """Return an error's type and the beginning of its message."""
    return f"{type(error).__name__}: {str(error)[:_MAX_MESSAGE]}"


def _raise_exception(message: str) -> None:
    raise ValueError(message)


def _tojson(
    value: object, ensure_ascii: bool = False, indent: int | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    given = list(value) if isinstance(value, Generator) else value  # as of the filter `map`
    return json.dumps(given, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _render(asked: bytes) -> bytes:
    source, conversation = json.loads(asked)
    return compile_template(source)(conversation).encode("utf-8", "surrogatepass")


ANSWERS: Mapping[str, Callable[[bytes], object]] = {
    "render": _render, "arguments": lambda source: arguments(source.decode("utf-8", "surrogatepass")),
}  # fmt: skip
"""The text of a source and a conversation, as a `Renderer` takes it, in JSON; and the names of a source's arguments."""


def functions(_report: Report) -> Functions:
    """Lower this process's limits and return `ANSWERS`. They raise ModelUnsupported, with a sentence on what Jinja or
    the template raises."""
    with suppress(UndefinedError):
        compile_template(_EVERYTHING)({})
    idle_size = address_space()
    for name in ("RLIMIT_CORE", "RLIMIT_FSIZE", "RLIMIT_NOFILE", "RLIMIT_NPROC"):
        limit(name, 0)

    def limited(function: Callable[[bytes], object]) -> Callable[[memoryview], object]:
        def limited_function(data: memoryview) -> object:
            limit("RLIMIT_CPU", int(time.process_time() + SECONDS) + 2, soft=True)  # the parent may have ended
            if idle_size is not None:
                limit("RLIMIT_AS", idle_size + MEMORY + MEMORY_PER_BYTE * len(data), soft=True)
            try:
                return function(bytes(data))
            except MemoryError:
                raise
            except Exception as error:  # noqa: BLE001  a template is a stranger's program: it may raise anything
                raise ModelUnsupported(describe(error), "Use another model.") from None

        return limited_function

    return {name: limited(function) for name, function in ANSWERS.items()}
