"""Tasks that real code brings, on functions of the standard library: seeded streams of cases for both splits.

Some functions are shown with other names of their variables, which then cannot be known by heart.
"""

import ast
import keyword
import random
from collections.abc import Callable, Iterator

from models.case import Case, Turn, user
from models.code.stdlib import LONGEST, Function, Library, Split, library, renamed, variables

SIZE = 4096
"""Tokens of the vocabulary."""
TRAINING_SEED = 20_000_003
HELD_OUT_SEED = 77
_DISGUISED = 0.4  # the share of functions whose variables get other names
_NEXT = 5  # most lines that are asked for
_HEAD_LINES = 14  # of the definition above a call


def case_at(index: int, size: float, mixture: dict[str, float], seed: int = TRAINING_SEED) -> Case:
    """Return case number `index` of the training stream, always the same for one index and one Python. A `size` of 1
    stands for the longest functions."""
    rng = random.Random(f"{seed}/{index}")
    family = rng.choices(list(mixture), list(mixture.values()))[0]
    return TASKS[family](rng, library(Split.TRAIN), size)


def held_out(family: str, count: int, seed: int = HELD_OUT_SEED) -> Iterator[Case]:
    """Return `count` cases on files that training never shows."""
    for index in range(count):
        yield TASKS[family](random.Random(f"{seed}/{family}/{index}"), library(Split.TEST), 1.0)


def texts() -> Iterator[str]:
    """Return the texts from which the tokenizer learns."""
    yield from library(Split.TRAIN).files


def complete(rng: random.Random, found: Library, size: float) -> Case:
    """Return the task to write the next lines of a function, behind the end of the one before it in the file."""
    while len((function := found.functions[at := rng.randrange(len(found.functions))]).source) > _most(size):
        pass
    lines = _shown(rng, function, found).source.split("\n")
    text = [at for at, line in enumerate(lines) if line.strip()]
    place = rng.randrange(1, len(text))
    cut, last = text[place], text[min(place + rng.randrange(_NEXT), len(text) - 1)]
    shown = "\n".join(lines[:cut])
    before = found.functions[at - 1] if at else function
    if rng.random() < 0.5 * size and before.around == function.around and before != function:
        shown = f"{before.source}\n\n{shown}"
    what = "next line" if cut == last else f"next {last + 1 - cut} lines"
    return _case("complete", shown, f"Write the {what}.", "\n".join(lines[cut : last + 1]), "rouge")


def rename(rng: random.Random, found: Library, size: float) -> Case:
    """Return the task to write a function again with another name of one variable."""
    while True:
        function = _drawn(rng, found, 0.6 * size)
        names, new = variables(function.source), new_name(rng, found)
        if names and new not in function.source:
            old = rng.choice(names)
            answer = renamed(function.source, old, new)
            return _case("rename", function.source, f"Rename {old} to {new}.", answer, "rouge")


def signature(rng: random.Random, found: Library, size: float) -> Case:
    """Return the task to write the signature of a function again, with the first line of its docstring."""
    while True:
        source = _shown(rng, _drawn(rng, found, size), found).source
        node = ast.parse(source).body[0]
        doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if isinstance(node, ast.FunctionDef) and doc and (first := doc.strip().partition("\n")[0]):
            head = "\n".join(source.split("\n")[: node.body[0].lineno - 1])
            answer = f'{head}\n    """{first}"""'
            return _case("signature", source, "Write its signature and what it does.", answer)


def call(rng: random.Random, found: Library, size: float) -> Case:
    """Return the task to fill in a call, from the definition above it."""
    while True:
        one = rng.choice(found.calls)
        head = "\n".join(one.of.source.split("\n")[:_HEAD_LINES])
        blank = f"{one.source.partition('(')[0]}(...)"
        context = f"{head}\n\n{one.before}{blank}{one.after}"
        if len(context) <= _most(size):
            return _case("call", context, "Write the call for the dots.", one.source, "rouge")


def new_name(rng: random.Random, found: Library) -> str:
    """Return a name that people give, or one of two words of which nobody has heard together."""
    first, second = (rng.choice(found.functions).name.strip("_").lower() or "value" for _ in range(2))
    joined = f"{first.split('_')[0]}_{second.split('_')[-1]}"
    name = first if rng.random() < 0.5 else joined
    return name if name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__") else "value"


TASKS: dict[str, Callable[[random.Random, Library, float], Case]] = {
    "complete": complete,
    "rename": rename,
    "signature": signature,
    "call": call,
}
"""The families of the code pair."""


def _most(size: float) -> float:
    """Return the most characters of a function."""
    return 300 + (LONGEST - 300) * size


def _drawn(rng: random.Random, found: Library, size: float) -> Function:
    while True:
        function = rng.choice(found.functions)
        if len(function.source) <= _most(size):
            return function


def _case(family: str, context: str, question: str, answer: str, metric: str = "exact") -> Case:
    return Case(family, (user(question, context), Turn("assistant", answer)), metric)


def _shown(rng: random.Random, function: Function, found: Library) -> Function:
    """Return the function, of some with other names of up to three variables."""
    if rng.random() >= _DISGUISED:
        return function
    source = function.source
    names = variables(source)
    for old in rng.sample(names, min(len(names), rng.randrange(1, 4))):
        new = new_name(rng, found)
        if new not in source:
            source = renamed(source, old, new)
    return Function(function.around, function.name, source)
