"""Runs a chat template, which is a stranger's program, within limits of work and memory.

A template comes with a model file. Jinja's sandbox keeps it from Python's insides, but lets it loop for ever or write
`'a' * 10**10`. So each of its actions is charged to a budget beforehand: each step of a loop, each call, each text and
list that is made, by its length. Actions that cannot be charged are not offered: filters and methods of texts that no
template needs and that make large values of small ones. The budget grows with the conversation, so that an honest
template never exhausts it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from types import BuiltinMethodType, ModuleType
from typing import Any

from jinja2 import BaseLoader, nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

MOST_SOURCE = 2**16  # characters of a template; known ones have 20,000 at most
MOST_WORK = 2**23  # units: characters and items made, steps and calls; a text takes four bytes a character at most
PER_CHARACTER = 64  # units more for each character of the conversation
SECONDS = 2.0  # of the processor; a template takes milliseconds
_STEP = 16  # units that a step costs, whatever it does
_DIGITS = 4096  # bits of a number

# Filters that walk through everything in their value, and filters that do not look inside it.
_DEEP = ("capitalize", "e", "escape", "float", "int", "lower", "safe", "sort", "string", "title", "trim", "truncate",
         "unique", "upper")  # fmt: skip
_SHALLOW = ("abs", "attr", "count", "d", "default", "dictsort", "first", "items", "last", "length", "list", "map",
            "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr")  # fmt: skip
_PRODUCTS = ("indent", "join", "replace", "tojson")  # their result is at most as long as value times other arguments
_LIST = """
    capitalize casefold copy count endswith find get index isalnum isalpha isdecimal isdigit islower isnumeric isspace
    istitle isupper items join keys lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition
    rsplit rstrip split splitlines startswith strip swapcase title upper values
"""
_METHODS = frozenset(_LIST.split())
_PLAIN = (str, bytes, int, float, list, tuple, dict, set, frozenset)  # their methods may make large values


class Budget:
    """The work that one rendering may still do."""

    def __init__(self, most: int) -> None:
        self.left = most
        self._end = time.thread_time() + SECONDS

    def spend(self, units: int) -> None:
        """Spend `units`. Raises SecurityError where fewer are left, or no time."""
        self.left -= units + _STEP
        if self.left < 0 or time.thread_time() > self._end:
            raise SecurityError("it wants to do more than a chat template may")

    def spend_on(self, *values: object, deep: bool = True) -> int:
        """Spend the weight of `values`, and return it."""
        weight = sum(_weight(value, self.left, deep) for value in values)
        self.spend(weight)
        return weight


def _weight(value: object, most: int, deep: bool = True) -> int:
    """Return the characters and items in `value`, with `deep` at every level, until they are more than `most`.

    Raises:
        SecurityError: a namespace is in it, which could hold itself.
    """
    total, waiting = 0, [value]
    while waiting and total <= most:
        one = waiting.pop()
        if isinstance(one, (str, bytes, range)):
            total += len(one)
        elif isinstance(one, (list, tuple, set, frozenset, Mapping)):
            total += len(one)
            if deep:
                total += _STEP * len(one)
                waiting.extend((*one.keys(), *one.values()) if isinstance(one, Mapping) else one)
        elif deep and isinstance(one, Namespace):
            raise SecurityError("it puts a namespace into something else")
    return total


class Template:
    """A compiled chat template; several threads may render it at the same time."""

    def __init__(self, source: str) -> None:
        """Compile `source`. Raises Jinja's errors where that fails, SecurityError where it is too long."""
        if len(source) > MOST_SOURCE:
            raise SecurityError(f"it has {len(source)} characters; {MOST_SOURCE} are allowed")
        self._sandbox = _Sandbox()
        with self._sandbox.working(MOST_WORK):
            tree = _Charged().visit(self._sandbox.parse(source))
            self._template = self._sandbox.from_string(tree)

    def render(self, messages: list[dict[str, str]], bos: str, eos: str) -> str:
        """Return the conversation as text, followed by the opening of the assistant's turn.

        Raises whatever the template raises, and SecurityError where it goes beyond its limits.
        """
        said = sum(len(text) for message in messages for text in message.values())
        with self._sandbox.working(MOST_WORK + PER_CHARACTER * said):
            return self._template.render(
                messages=messages, bos_token=bos, eos_token=eos, add_generation_prompt=True, functions=None,
                function_call=None, tools=None, tool_choice=None, raise_exception=_raise,
                strftime_now=Jinja2ChatFormatter.strftime_now,
            )  # fmt: skip


def _raise(message: str) -> None:
    raise ValueError(message)


class _Work(threading.local):
    """The budget of the rendering in this thread."""

    budget: Budget | None = None


class _Working:
    def __init__(self, work: _Work, most: int) -> None:
        self._work, self._most = work, most

    def __enter__(self) -> None:
        self._work.budget = Budget(self._most)

    def __exit__(self, *_raised: object) -> None:
        self._work.budget = None


class _Generator(CodeGenerator):
    """Jinja's compiler, charged for each node."""

    def visit(self, node: nodes.Node, *values: Any, **named: Any) -> Any:
        self.environment.budget.spend(0)  # type: ignore[attr-defined]
        return super().visit(node, *values, **named)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which everything is charged."""

    code_generator_class = _Generator
    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            loader=BaseLoader(), trim_blocks=True, lstrip_blocks=True,
            optimized=False,  # it evaluates each expression once for every level of it
            extensions=[Jinja2ChatFormatter.IgnoreGenerationTags, loopcontrols],
        )  # fmt: skip
        self._work = _Work()
        known: dict[str, Any] = {
            **self.filters,
            "tojson": Jinja2ChatFormatter.tojson,
            "safe": str,
        }  # nothing is escaped
        self.filters = {name: self._charging(known[name], deep=name in _DEEP) for name in (*_DEEP, *_SHALLOW)}
        self.filters |= {name: self._charging(known[name], product=True) for name in _PRODUCTS}
        self.filters |= {"_steps": self._steps, "_made": self._made, "_cut": self._cut, "_joined": self._joined}
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: self._charging(test, deep=False) for name, test in tests.items()}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace")}

    def working(self, most: int) -> _Working:
        """Return a context manager in which this thread may spend `most` units."""
        return _Working(self._work, most)

    @property
    def budget(self) -> Budget:
        return self._work.budget or Budget(0)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self.budget
        if operator == "*":
            budget.spend(_product(left, [right], budget.left))
        elif operator in "+-":
            budget.spend_on(left, right, deep=False)
        elif isinstance(left, (str, bytes)):
            raise SecurityError(f"it formats text with {operator}")
        budget.spend(0)
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 1) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _DIGITS:
                raise SecurityError(f"it makes a number of {bits} bits")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *values: Any, **named: Any) -> Any:  # noqa: N805, PYI063
        budget, given = __self.budget, [*values, *named.values()]
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, _PLAIN) or (isinstance(__obj, BuiltinMethodType) and not isinstance(owner, ModuleType)):
            if __obj.__name__ not in _METHODS:
                raise SecurityError(f"it calls {__obj.__name__!r}, which no chat template needs")
            if __obj.__name__ in ("replace", "join"):
                budget.spend(_product(owner, given, budget.left))
            else:
                budget.spend_on(owner, *given, deep=False)
        elif getattr(__obj, "__name__", "") in ("format", "format_map"):
            raise SecurityError("it formats text with 'format'")
        else:
            budget.spend_on(*given, deep=isinstance(__obj, type))  # a type builds something from them
        made = super().call(__context, __obj, *values, **named)
        budget.spend_on(made, deep=False)
        return made

    def _charging(self, function: Callable[..., Any], *, deep: bool = True, product: bool = False) -> Any:
        """Return a filter or test that is charged for its arguments: for their sum, or their product with its value."""
        own = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja puts an argument of its own in front

        @wraps(function)
        def charged(*values: Any, **named: Any) -> Any:
            budget, given = self.budget, [*values[own:], *named.values()]
            if product:
                budget.spend(_product(given[0], given[1:], budget.left))
            else:
                budget.spend_on(*given, deep=deep)
            return function(*values, **named)

        return charged

    @pass_context
    def _steps(self, _context: Context, items: Iterable[Any]) -> Iterator[Any]:
        """Yield the items of a loop, each charged."""
        for item in items:
            self.budget.spend(0)
            yield item

    @pass_context
    def _made(self, _context: Context, value: Any) -> Any:
        """Charge for a text that is written, or a list that is built."""
        self.budget.spend_on(value)
        return value

    @pass_context
    def _cut(self, _context: Context, value: Any) -> Any:
        """Charge for a part of a text or a list."""
        self.budget.spend_on(value, deep=False)
        return value

    @pass_context
    def _joined(self, _context: Context, values: list[Any]) -> str:
        """Return the operands of `~` joined; `values` have been charged when their list was built."""
        return "".join(map(str, values))


def _product(value: object, others: list[Any], most: int) -> int:
    """Return the most that `value` can weigh after the others are put between its parts, or it is repeated."""
    sizes = [abs(other) if isinstance(other, int) else _weight(other, most) for other in others]
    if isinstance(value, int):
        return abs(value) * sum(sizes) if not all(isinstance(other, int) for other in others) else 0
    return (1 + _weight(value, most)) * (1 + sum(sizes))


class _Charged(NodeTransformer):
    """Puts a charge on everything that the compiled template would do without calling the sandbox."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - Jinja's own name
        self.generic_visit(node)
        node.iter = _through("_steps", node.iter)
        return node

    def visit_Output(self, node: nodes.Output) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_through("_made", child) for child in node.nodes]
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through("_joined", _through("_made", nodes.List(node.nodes)))

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through("_cut", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:  # noqa: N802
        return _through("_made", self.generic_visit(node))

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:  # noqa: N802
        return _through("_made", self.generic_visit(node))

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _through("_made", node) if node.ctx == "load" else node


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    """Return `node | name`, on the same line."""
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
