"""Facts in plain words: as people tell a thing, ask for it and set it right in a chat, without a thought for notes.

The kinds of facts and the answers are those of `facts`. A telling may be full ("My mug is on the shelf.") or short
("it's on the shelf"), which only the question before it makes clear.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from models.case import look, sentence
from models.home.families import wordings
from models.home.families.facts import WEIGHTS
from models.home.families.plain_wordings import (
    CODE_ASK,
    CODE_SHORT,
    CODE_TELL,
    HAS_ASK,
    HAS_SHORT,
    HAS_TELL,
    PLACE_ASK,
    PLACE_SHORT,
    PLACE_TELL,
    SET_RIGHT,
    WHEN_ASK,
    WHEN_SHORT,
    WHEN_TELL,
    WHO_ASK,
    WHO_SHORT,
    WHO_TELL,
)
from models.home.world import FURNITURE, Phrasings, Split, World

NOTE_SHARE = 0.25
"""Share of the tellings and questions of the training that have the wordings of `facts`."""
CARELESS_SHARE = 0.25
"""Share of the sentences that begin in lower case, and of those that end without a full stop or question mark."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fact: its wordings, its `answer`, and how its subject and its value are drawn, as slots."""

    tell: Phrasings
    short: Phrasings
    ask: Phrasings
    note: Phrasings
    note_ask: Phrasings
    answer: str
    subject: Callable[[World], dict[str, str]]
    value: Callable[[World], dict[str, str]]


def _spot(world: World) -> dict[str, str]:
    """Return a place as one says it: a room, a spot in or outside one, somewhere of one's own or in town."""
    roll = world.rng.random()
    if roll < 0.3:
        return {"p": f"in the {world.room()}"}
    if roll < 0.38:
        return {"p": f"{world.rng.choice(('in', 'on', 'under'))} my {world.pick(FURNITURE)}"}
    return {"p": f"at the {world.venue()}" if roll < 0.45 else world.place()}


KINDS = {
    "place": Kind(
        PLACE_TELL,
        PLACE_SHORT,
        PLACE_ASK,
        wordings.PLACE_NOTE,
        wordings.PLACE_ASK,
        "The {t} is {p}.",
        lambda world: {"t": world.thing()},
        _spot,
    ),
    "when": Kind(
        WHEN_TELL,
        WHEN_SHORT,
        WHEN_ASK,
        wordings.WHEN_NOTE,
        wordings.WHEN_ASK,
        "The {e} is {d} at {c}.",
        lambda world: {"e": world.event()},
        lambda world: {"d": world.day(), "c": world.clock()},
    ),
    "who": Kind(
        WHO_TELL,
        WHO_SHORT,
        WHO_ASK,
        wordings.WHO_NOTE,
        wordings.WHO_ASK,
        "The one who has to {h} is {n}.",
        lambda world: {"h": world.chore()},
        lambda world: {"n": world.name()},
    ),
    "has": Kind(
        HAS_TELL,
        HAS_SHORT,
        HAS_ASK,
        wordings.HAS_NOTE,
        wordings.HAS_ASK,
        "For the {t} ask {n}.",
        lambda world: {"t": world.thing()},
        lambda world: {"n": world.name()},
    ),
    "code": Kind(
        CODE_TELL,
        CODE_SHORT,
        CODE_ASK,
        wordings.CODE_NOTE,
        wordings.CODE_ASK,
        "The code for the {t} is {k}.",
        lambda world: {"t": world.rng.choice((world.room(), world.thing()))},
        lambda world: {"k": world.code()},
    ),
}


@dataclass(frozen=True, slots=True)
class PlainFact:
    """A fact of a kind: the slots of its subject and of its value."""

    kind: Kind
    subject: dict[str, str]
    value: dict[str, str]

    @property
    def answer(self) -> str:
        """Return the answer, with the value marked."""
        return self.kind.answer.format(**self.subject, **{slot: look(value) for slot, value in self.value.items()})

    def changed(self, world: World) -> "PlainFact":
        """Return the fact with another value."""
        return replace(self, value=self.kind.value(world))

    def told(self, world: World) -> str:
        """Return a full telling."""
        return self._said(world, _either(world, self.kind.tell, self.kind.note))

    def told_shortly(self, world: World) -> str:
        """Return a telling that names only the value."""
        return self._said(world, self.kind.short)

    def set_right(self, world: World) -> str:
        """Return a telling, full or short, that sets right what was told before."""
        tellings = self.kind.short if world.rng.random() < 0.6 else self.kind.tell
        return self._said(world, tellings, frame=world.say(SET_RIGHT))

    def asked(self, world: World) -> str:
        """Return a question."""
        return self._said(world, _either(world, self.kind.ask, self.kind.note_ask))

    def stated(self, world: World) -> str:
        """Return a full telling, written with care."""
        return self._said(world, _either(world, self.kind.tell, self.kind.note), careful=True)

    def question(self, world: World) -> str:
        """Return a question, written with care."""
        return self._said(world, _either(world, self.kind.ask, self.kind.note_ask), careful=True)

    def _said(self, world: World, wordings: Phrasings, frame: str = "{x}", careful: bool = False) -> str:
        wording = world.say(wordings)
        if frame != "{x}" and not wording.startswith(("I ", "OK")):
            wording = wording[:1].lower() + wording[1:]
        wording = frame.replace("{x}", wording)
        slots = self.subject | self.value
        if "{n}" in wording and "n" not in slots:
            slots["n"] = world.name()
        if "{v}" in wording:
            slots["v"] = world.verb()
        if "{d}" in wording and not careful and world.rng.random() < 0.1:
            slots["d"] = slots["d"].lower()
        text = wording.format(**slots)
        if wording.startswith("{"):  # an entity keeps its token, but for the few words that a place begins with
            text = sentence(text) if wording.startswith("{p}") and world.rng.random() < 0.5 else text
        elif careful or wording.startswith("OK") or world.rng.random() >= CARELESS_SHARE:
            text = sentence(text)
        else:
            text = text[:1].lower() + text[1:]
        return text[:-1] if text[-1] in ".?" and not careful and world.rng.random() < CARELESS_SHARE else text


def _either(world: World, plain: Phrasings, noted: Phrasings) -> Phrasings:
    """Return the plain wordings, in training now and then those of notes."""
    return noted if world.split is Split.TRAIN and world.rng.random() < NOTE_SHARE else plain


def draw(world: World, count: int) -> list[PlainFact]:
    """Return `count` facts, at least two of one kind, so that the kind alone does not give the answer away."""
    kinds = list(KINDS.values())
    first = world.rng.choices(kinds, WEIGHTS)[0]
    chosen = [first, first, *world.rng.choices(kinds, WEIGHTS, k=max(0, count - 2))][:count]
    return [PlainFact(kind, kind.subject(world), kind.value(world)) for kind in chosen]
