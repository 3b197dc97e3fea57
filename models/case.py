"""A case: one conversation of the little world, with its right reply."""

from collections.abc import Sequence
from dataclasses import dataclass

OPEN, CLOSE = "\x01", "\x02"


def look(value: object) -> str:
    """Mark a looked-up value in a reply, which only the right place in the context has."""
    return f"{OPEN}{value}{CLOSE}"


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn. `lookups` are the character spans of looked-up values in `text` (assistant turns only)."""

    role: str
    text: str
    lookups: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A conversation that ends with the assistant's turn to learn or judge. `metric` is `exact` or `rouge`."""

    family: str
    turns: tuple[Turn, ...]
    metric: str = "exact"

    @property
    def prompt(self) -> tuple[Turn, ...]:
        return self.turns[:-1]

    @property
    def answer(self) -> str:
        return self.turns[-1].text


def assistant(marked: str) -> Turn:
    """Return an assistant turn from text with `look` marks."""
    spans: list[tuple[int, int]] = []
    plain = ""
    start = 0
    for character in marked:
        if character == OPEN:
            start = len(plain)
        elif character == CLOSE:
            spans.append((start, len(plain)))
        else:
            plain += character
    return Turn("assistant", plain, tuple(spans))


def user(question: str, context: str = "") -> Turn:
    """Return a user turn: the context first, a blank line, then the question."""
    return Turn("user", f"{context}\n\n{question}" if context else question)


def conversation(family: str, context: str, pairs: Sequence[tuple[str, str]]) -> Case:
    """Return a conversation of questions about one context, in the first turn, and their marked answers."""
    turns: list[Turn] = []
    for question, answer in pairs:
        turns += [user(question, "" if turns else context), assistant(answer)]
    return Case(family, tuple(turns))


def sentence(text: str) -> str:
    """Return `text` with its first letter in upper case."""
    return text[:1].upper() + text[1:]
