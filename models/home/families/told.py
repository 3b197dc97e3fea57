"""Facts told in a chat, in plain words: before a question, after one asked in vain, and set right later."""

from models.case import Case, Turn, assistant, user
from models.home.families import chat
from models.home.families.facts import UNKNOWN
from models.home.families.plain import PlainFact, draw
from models.home.world import World


def noted(facts: list[PlainFact]) -> Turn:
    """Return the confirmation, which repeats each fact in the words of the answer."""
    return assistant(" ".join(("I have noted it.", *(fact.answer for fact in facts))))


def tell(world: World, facts: list[PlainFact], asked: bool) -> list[Turn]:
    """Return a telling of one fact or more and its confirmation; after a question one fact may be told shortly."""
    if len(facts) == 1:
        text = facts[0].told_shortly(world) if asked and world.rng.random() < 0.6 else facts[0].told(world)
    else:
        joint = world.rng.choice((" ", " ", "\n"))
        text = joint.join(_closed(fact.stated(world)) for fact in facts)
    return [user(text), noted(facts)]


def greet(world: World) -> list[Turn]:
    if world.rng.random() < 0.5:
        return chat.hello(world, world.name())
    return [user(world.rng.choice(chat.GREETINGS)), assistant("Hello! What can I do for you?")]


def ask(world: World, fact: PlainFact) -> list[Turn]:
    return [user(fact.asked(world)), assistant(fact.answer)]


def ask_in_vain(world: World, fact: PlainFact) -> list[Turn]:
    return [user(fact.asked(world)), assistant(UNKNOWN)]


def make(world: World, size: float) -> Case:
    """Return tellings of 1 to 4 facts, with questions, changes and small talk between; the last turns ask for facts."""
    drawn = draw(world, world.number(1, 1 + round(3 * size)) + 1)
    never_told, *left = world.rng.sample(drawn, len(drawn))
    turns = greet(world) if world.rng.random() < 0.25 else []
    told: list[PlainFact] = []
    while left:
        count = min(len(left), 1 if world.rng.random() < 0.85 else world.number(2, 3))
        facts, left = left[:count], left[count:]
        asked = world.rng.random() < 0.55
        if asked:
            turns += ask_in_vain(world, facts[0])
        turns += tell(world, facts, asked)
        if count == 1 and world.rng.random() < 0.5:
            facts = [facts[0].changed(world)]
            turns += [user(facts[0].set_right(world)), noted(facts)]
        told += facts
        turns += _between(world, told, never_told)
    if world.rng.random() < 0.1:
        turns += ask_in_vain(world, never_told)
    else:
        for fact in world.rng.sample(told, min(len(told), world.questions(len(told)))):
            turns += ask(world, fact)
    return Case("told", tuple(turns))


def _between(world: World, told: list[PlainFact], never_told: PlainFact) -> list[Turn]:
    """Return what is said before the next telling: often nothing, else a question or small talk."""
    roll = world.rng.random()
    if roll < 0.2:
        return ask(world, world.rng.choice(told))
    if roll < 0.28:
        return ask_in_vain(world, never_told)
    if roll < 0.45:
        return world.rng.choice((chat.how, chat.thanks, chat.about))(world)
    return []


def _closed(text: str) -> str:
    return text if text[-1] in ".!?" else f"{text}."
