"""Several turns: small talk, things to remember, and questions about what was said before (as in multi-turn chats)."""

from models.case import Case, Turn, assistant, look, user
from models.home.families import facts
from models.home.world import World, phrasings

HELLO = phrasings(
    "Hello! I am {n}.\nHi, my name is {n}.\nGood morning, {n} here.\nHey, I'm {n}.\nHello, this is {n}.\n"
    "It's me, {n}.\nGood evening, I am {n}.\nHello, you are talking with {n}.\n"
    "This is {n} speaking.\nGreetings from {n}.\nHere speaks {n}.\nHi, {n} is talking to you.",
    "Greetings, {n} speaking.\nGood evening, you are talking to {n}.",
)
THANKS = phrasings(
    "Thank you!\nThanks.\nGreat, thanks!\nthank you very much\nVery good, thanks.\nThanks a lot!\nMany thanks.\n"
    "Perfect, thanks!\nthank you so much\nThanks, perfect.",
    "Many thanks!\nPerfect, thank you so much.",
)
HOW = phrasings(
    "How are you?\nhow are you today\nHow is it going?\nAre you well?\nHow do you do?\n"
    "How have things been?\nIs everything fine?\nAre you fine?\nEverything well with you?\nHow has it been going?",
    "How have you been?\nEverything fine with you?",
)
REMEMBER = phrasings(
    "Remember this: {x}\nPlease note: {x}\nNote this: {x}\nKeep in mind: {x}\nWrite this down: {x}\nFor later: {x}\n"
    "Do not forget this: {x}\nSave: {x}\nPlease save this: {x}\nDon't forget: {x}",
    "Do not forget: {x}\nSave this: {x}",
)
NAME_ASK = phrasings(
    "What is my name?\nDo you know my name?\nWho am I?\nwhat's my name?\nDo you remember my name?\n"
    "Tell me my name.\nHow am I called?\nCan you say my name?\nWhat was I called?",
    "Can you tell me my name?\nWhat am I called?",
)
ABOUT = phrasings(
    "Who are you?\nWhat are you?\nWhat can you do?\nwho is this?\n"
    "Tell me who you are.\nWhat are you about?\nTell me something about yourself.\nAre you a helper?\n"
    "What kind of thing are you?",
    "Tell me about yourself.\nWhat kind of helper are you?",
)

GREETINGS = ("Hello", "Hi", "Hey", "Hello!", "hi", "Good morning", "Hi there!", "Good evening", "hello there")


def hello(world: World, name: str) -> list[Turn]:
    return [user(world.say(HELLO).format(n=name)), assistant(f"Hello {look(name)}! What can I do for you?")]


def how(world: World) -> list[Turn]:
    return [user(world.say(HOW)), assistant("I am fine, thank you. How can I help you?")]


def about(world: World) -> list[Turn]:
    return [
        user(world.say(ABOUT)),
        assistant("I am a small helper for your home. I read your notes and answer questions."),
    ]


def thanks(world: World) -> list[Turn]:
    return [user(world.say(THANKS)), assistant("You are welcome! Is there anything else?")]


def remember(world: World, fact: facts.Fact) -> list[Turn]:
    """Return a note and its confirmation, which repeats the fact in the words of the answer."""
    return [user(world.say(REMEMBER).format(x=fact.note)), assistant(f"I have noted it. {fact.answer}")]


def ask(fact: facts.Fact) -> list[Turn]:
    return [user(fact.question), assistant(fact.answer)]


def make(world: World, size: float) -> Case:
    """Return 2 to 6 exchanges; the last one asks for something said before."""
    name = world.name()
    drawn = facts.draw(world, world.number(1, 1 + round(3 * size)))
    opening = hello(world, name)
    middle = [remember(world, fact) for fact in drawn]
    for small in (how, thanks, about):
        if world.rng.random() < 0.35 * size:
            middle.insert(world.rng.randrange(len(middle) + 1), small(world))
    turns = opening + [turn for exchange in middle for turn in exchange]
    roll = world.rng.random()
    if roll < 0.25:
        turns += [user(world.say(NAME_ASK)), assistant(f"You told me that your name is {look(name)}.")]
    elif roll < 0.35:
        turns += world.rng.choice((how, thanks, about))(world)
    else:
        turns += ask(world.rng.choice(drawn))
    return Case("chat", tuple(turns))
