"""Single turns without notes, for the curriculum: greetings, and questions that no note can answer."""

from models.case import Case, assistant, user
from models.home.families import chat, facts
from models.home.world import World


def make(world: World, size: float) -> Case:
    """Return one turn, now and then a second one."""
    del size
    turns = []
    for _ in range(world.number(1, 2)):
        roll = world.rng.random()
        if roll < 0.5:
            kind = world.rng.choice(tuple(facts.KINDS.values()))
            turns += [user(kind(world).question), assistant(facts.UNKNOWN)]
        elif roll < 0.6:
            turns += [user(world.say(chat.NAME_ASK)), assistant("You have not told me your name yet.")]
        elif roll < 0.75:
            turns += [user(world.rng.choice(chat.GREETINGS)), assistant("Hello! What can I do for you?")]
        else:
            turns += world.rng.choice((chat.how, chat.thanks, chat.about))(world)
    return Case("alone", tuple(turns))
