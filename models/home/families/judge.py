"""Opinions to judge: does a person like a thing? Yes or no, with several opinions in sight (as in BoolQ and SST)."""

from models.case import Case, conversation, look
from models.home.families.page import page
from models.home.world import World, phrasings

LIKES = phrasings(
    """
    {n} is very happy with the {t}.
    {n}: the {t} is great!
    {n} loves the {t}.
    {n} uses the {t} every day and would buy it again.
    {n} says the {t} is the best one so far.
    {n} thinks that the {t} is really good.
    {n} was not sure at first, but now likes the {t} a lot.
    {n} finds the {t} a bit dear, but wonderful.
    {n} can't live without the {t}.
    {n} wrote: the {t} works very well.
    {n} has no complaint at all about the {t}.
    {n} told everybody to get the {t}.
    {n} was delighted by the {t}.
    {n} is full of praise for the {t}.
    {n} praised the {t}.
    {n} would buy it once more, the {t}.
    {n}, delighted about the {t}.
    {n} says once more that the {t} is great.
    {n} is pleased with the {t}.
    The {t}: {n} praised it and is delighted.
    {n} would buy once again the {t}.
    {n} found the {t} wonderful.
    {n} would buy the {t} any time.
    {n} calls the {t} wonderful.
    {n} says the {t} is great.
    {n} wrote that the {t} is wonderful.
    {n} would buy the {t} a second time.
    {n} would buy the {t} again and again.
    {n} would once more buy the {t}.
    {n} would take the {t} once more.
    {n} would choose the {t} once more.
    {n} would want the {t} once more.
    {n} is so happy about the {t} again.
    """,
    """
    {n} is delighted with the {t}.
    {n} praised the {t} again.
    {n} would buy the {t} once more.
    {n} says the {t} is wonderful.
    """,
)
DISLIKES = phrasings(
    """
    {n} is very unhappy with the {t}.
    {n}: the {t} is awful!
    {n} hates the {t}.
    {n} never uses the {t} and would not buy it again.
    {n} says the {t} is the worst one so far.
    {n} thinks that the {t} is really bad.
    {n} liked the {t} at first, but not any more.
    {n} finds the {t} cheap, but useless.
    {n} wants to give the {t} away.
    {n} wrote: the {t} does not work well.
    {n} had nothing but trouble with the {t}.
    {n} told everybody not to get the {t}.
    {n} was disappointed by the {t}.
    {n} complained about it: the {t}.
    {n} would not want the {t} once more.
    {n}, disappointed about the {t}.
    {n} complains that the {t} is bad.
    {n} is annoyed with the {t}.
    {n} had to complain about the {t}.
    The {t}: {n} complained and is disappointed.
    {n} would not buy once again the {t}.
    {n} found the {t} useless.
    {n} would not buy the {t} at any time.
    {n} calls the {t} useless.
    {n} says the {t} is awful.
    {n} wrote that the {t} is useless.
    {n} would not buy the {t} a second time.
    {n} would not buy the {t} again.
    {n} would not once more buy the {t}.
    {n} would not take the {t} once more.
    {n} would not choose the {t} once more.
    {n} is so unhappy about the {t} again.
    """,
    """
    {n} is disappointed with the {t}.
    {n} complained about the {t} again.
    {n} would not buy the {t} once more.
    {n} says the {t} is useless.
    """,
)
ASK = phrasings(
    """
    Does {n} like the {t}?
    Is {n} happy with the {t}?
    does {n} like the {t}
    What about {n}, is the {t} good?
    Has {n} a good opinion of the {t}?
    Would {n} buy the {t} again?
    Did {n} like the {t}?
    Tell me if {n} likes the {t}.
    Is the {t} something {n} likes?
    Is {n} liking the {t}?
    Do you think the {t} pleases {n}?
    Do you think {n} is happy with the {t}?
    Do we think that {n} likes the {t}?
    Would {n} say yes about the {t}?
    Would {n} say yes to the {t}?
    Do we know if {n} likes the {t}?
    What does {n} think, is the {t} good?
    Is the {t} to {n} a good thing?
    What would {n} say about the {t}?
    Was the {t} to the taste of {n}?
    Is the {t} to the delight of {n}?
    Is the {t} much to the taste of {n}?
    Would {n} say that the {t} is any good?
    """,
    """
    Is the {t} to the liking of {n}?
    Would {n} say the {t} is good?
    Do you think {n} likes the {t}?
    """,
)


def make(world: World, size: float) -> Case:
    """Return 2 to 5 opinions of people about things; both answers stand in the context, so that it must be read."""
    count = world.number(2, 2 + round(3 * size))
    likes = [True, False, *(world.rng.random() < 0.5 for _ in range(count - 2))]
    world.rng.shuffle(likes)
    people, things = [world.name() for _ in likes], [world.thing() for _ in likes]
    lines = [
        world.say(LIKES if like else DISLIKES).format(n=name, t=thing)
        for like, name, thing in zip(likes, people, things, strict=True)
    ]
    pairs = []
    for at in world.rng.sample(range(count), min(count, world.questions(count))):
        mood, word = ("happy", "yes") if likes[at] else ("unhappy", "no")
        answer = f"About the {things[at]} {people[at]} is {look(mood)}, so the answer is {look(word)}."
        pairs.append((world.say(ASK).format(n=people[at], t=things[at]), answer))
    return conversation("judge", page(world, lines, ("Opinions:", "What people say:", "I asked around:")), pairs)
