"""Facts that notes state and questions ask for: shared by the families that look things up.

A fact is stated by one of many wordings; its question has many wordings, too; its answer has one, so that it can be
judged by exact match. The answer first names the subject of the question, then the value: a small model is better at
looking up what it has just named.
"""

from collections.abc import Callable
from dataclasses import dataclass

from models.case import look, sentence
from models.home.families.page import page
from models.home.families.wordings import (
    CODE_ASK,
    CODE_NOTE,
    HAS_ASK,
    HAS_NOTE,
    PLACE_ASK,
    PLACE_NOTE,
    WHEN_ASK,
    WHEN_NOTE,
    WHO_ASK,
    WHO_NOTE,
)
from models.home.world import Phrasings, World

UNKNOWN = "I do not know that yet. Tell me, and I will remember it."


@dataclass(frozen=True, slots=True)
class Fact:
    """A fact: the `note` that states it, its `question` and marked `answer`; `key` and `value` for multiple choice."""

    kind: str
    note: str
    question: str
    answer: str
    key: str
    value: str


def _fact(
    kind: str, world: World, notes: Phrasings, asks: Phrasings, answer: str, key: str, value: str, **slots: str
) -> Fact:
    """Fill a wording of the note and of the question; `answer` is already filled and marked."""
    note, ask = world.say(notes), world.say(asks)
    if "{n}" in note and "n" not in slots:
        slots["n"] = world.name()
    if "{v}" in note + ask:
        slots["v"] = world.verb()
    return Fact(kind, _filled(note, slots), _filled(ask, slots), answer, key, value)


def _filled(wording: str, slots: dict[str, str]) -> str:
    """Return `wording` with its slots filled; an entity at the start keeps its case, else it is another token."""
    text = wording.format(**slots)
    return text if wording.startswith("{") else sentence(text)


def place(world: World) -> Fact:
    thing, where = world.thing(), world.place()
    answer = f"The {thing} is {look(where)}."
    return _fact("place", world, PLACE_NOTE, PLACE_ASK, answer, f"the {thing}", where, t=thing, p=where)


def when(world: World) -> Fact:
    event, day, clock = world.event(), world.day(), world.clock()
    answer = f"The {event} is {look(day)} at {look(clock)}."
    return _fact(
        "when", world, WHEN_NOTE, WHEN_ASK, answer, f"the {event}", f"{day} at {clock}", e=event, d=day, c=clock
    )


def who(world: World) -> Fact:
    name, chore = world.name(), world.chore()
    answer = f"The one who has to {chore} is {look(name)}."
    return _fact("who", world, WHO_NOTE, WHO_ASK, answer, chore, name, n=name, h=chore)


def has(world: World) -> Fact:
    name, thing = world.name(), world.thing()
    answer = f"For the {thing} ask {look(name)}."
    return _fact("has", world, HAS_NOTE, HAS_ASK, answer, f"the {thing}", name, n=name, t=thing)


def code(world: World) -> Fact:
    thing = world.rng.choice((world.room(), world.thing()))
    value = world.code()
    answer = f"The code for the {thing} is {look(value)}."
    return _fact("code", world, CODE_NOTE, CODE_ASK, answer, f"the {thing}", value, t=thing, k=value)


KINDS: dict[str, Callable[[World], Fact]] = {"place": place, "when": when, "who": who, "has": has, "code": code}
WEIGHTS = (5, 4, 4, 4, 1)


def draw(world: World, count: int, kind: str | None = None) -> list[Fact]:
    """Return `count` facts, at least two of one kind, so that the kind alone does not give the answer away."""
    kinds = list(KINDS)
    first = kind or world.rng.choices(kinds, WEIGHTS)[0]
    chosen = [first, first, *world.rng.choices(kinds, WEIGHTS, k=max(0, count - 2))][:count]
    return [KINDS[each](world) for each in chosen]


def notes(world: World, facts: list[Fact]) -> str:
    """Return the facts as a page of notes, shuffled."""
    lines = [fact.note for fact in facts]
    world.rng.shuffle(lines)
    return page(world, lines, ("Notes:", "My notes:", "From the notebook:"))
