"""Questions about time and quantity: small sums whose numbers stand in the context."""

from __future__ import annotations

from models.case import Case, conversation, look
from models.world import Pool, World, phrasings

LEFT = phrasings(
    """
    There are {a} {t} {p}. {n} takes {b}.
    {n} had {a} {t} and gave {b} away.
    We had {a} {t}. {b} are gone.
    Of {a} {t}, {n} used {b}.
    I bought {a} {t} and used {b} of them.
    {a} {t} lie {p}. {n} takes {b} of them away.
    {n} counted {a} {t}. {b} of them were sold.
    {n} removed {b} of {a} {t}.
    There were {a} {t} {p}; {b} were removed.
    {n} counted {a} {t} and took {b}.
    We sold {b} of {a} {t}.
    From the {a} {t}, {n} took {b} away.
    {n} sold {b} from {a} {t}.
    """,
    """
    {n} counted {a} {t} {p} and removed {b}.
    From {a} {t}, {b} were sold.
    """,
)
MORE = phrasings(
    """
    There are {a} {t} {p}. {n} brings {b} more.
    {n} had {a} {t} and got {b} more.
    We have {a} {t} and buy {b} more.
    I have {a} {t}. {n} gives me {b}.
    {a} {t} lie {p} and {n} adds {b}.
    First there were {a} {t}, then came {b} more.
    {n} counted {a} {t}. We add {b}.
    Add {b} to the {a} {t}.
    {n} put {b} more to the {a} {t} {p}.
    To the {a} {t} {n} adds {b}.
    {n} has {a} {t} {p} and puts {b} there.
    {n} counted {a} {t}, and {b} more were put there.
    """,
    """
    {n} counted {a} {t} {p} and put {b} more there.
    To {a} {t} we add {b}.
    """,
)
HOW_MANY = phrasings(
    """
    How many {t} are there now?
    How many {t} are that?
    how many {t} do we have now
    So how many {t} is that?
    Count the {t} for me.
    What is the number of {t} now?
    How many {t} does that make?
    What do we have in {t}?
    How many would that be, in {t}?
    What would the number of {t} be?
    How many {t} would we have?
    """,
    """
    How many {t} would that make?
    What do we have now in {t}?
    """,
)
READY = phrasings(
    """
    The {e} starts at {c} and takes {m} minutes.
    The {e} begins at {c}. It lasts {m} minutes.
    {c}: {e}, {m} minutes
    At {c} there is the {e}, for {m} minutes.
    The {e} is planned from {c} on, {m} minutes.
    Our {e} is at {c} and goes on for {m} minutes.
    From {c} on there is the {e}, {m} minutes long.
    With {m} minutes the {e} begins at {c}.
    We planned the {e} for {c}. It goes {m} minutes.
    We have {m} minutes from {c} for the {e}.
    """,
    """
    The {e} is planned for {c} with {m} minutes.
    Our {e} goes on for {m} minutes from {c}.
    """,
)
WHEN_OVER = phrasings(
    """
    When is the {e} over?
    When does the {e} end?
    Until when does the {e} take?
    At what time is the {e} over?
    when will the {e} be over
    When is the {e} done?
    When does the {e} finish?
    At which time does the {e} end?
    At what hour is the {e} over?
    When are we finished with the {e}?
    In which hour are we done with the {e}?
    """,
    """
    When are we done with the {e}?
    At which hour does the {e} finish?
    """,
)
COUNTED = Pool(
    (
        "eggs",
        "apples",
        "plates",
        "chairs",
        "books",
        "pears",
        "candles",
        "bottles",
        "cups",
        "spoons",
        "towels",
        "nails",
        "stamps",
        "coins",
    ),
    ("cushions", "lemons", "batteries", "tickets", "jars"),
)


def _count(world: World) -> tuple[str, str, str]:
    things = world.pick(COUNTED)
    things += "" if things.endswith("s") else "s"
    if world.rng.random() < 0.5:
        total = world.number(2, 12)
        used = world.number(1, total - 1)
        story, result, how = LEFT, total - used, f"{total} minus {used}"
    else:
        total, used = world.number(1, 9), world.number(1, 6)
        story, result, how = MORE, total + used, f"{total} plus {used}"
    text = world.say(story).format(a=total, b=used, t=things, n=world.name(), p=world.place())
    answer = f"That is {look(how)}, so there are now {look(result)} {things}."
    return text, world.say(HOW_MANY).format(t=things), answer


def _over(world: World) -> tuple[str, str, str]:
    event, hour = world.event(), world.number(6, 21)
    start, minutes = world.rng.choice((0, 10, 15, 20, 30)), world.rng.choice((10, 15, 20, 30))
    end = hour * 60 + start + minutes
    text = world.say(READY).format(e=event, c=f"{hour}:{start:02d}", m=minutes)
    begins, ends = look(f"{hour}:{start:02d}"), look(f"{end // 60}:{end % 60:02d}")
    answer = f"It is {look(minutes)} minutes from {begins}, so the {event} is over at {ends}."
    return text, world.say(WHEN_OVER).format(e=event), answer


def make(world: World, size: float) -> Case:
    """One story; with growing `size` others beside it. Where it teaches, each of them may be asked for."""
    stories = [world.rng.choice((_count, _count, _over))(world)]
    while len(stories) < 4 and world.rng.random() < 0.5 * size:
        stories.append((_over if stories[-1][2].startswith("That") else _count)(world))
    asked = [(ask, answer) for _, ask, answer in stories[: world.questions(len(stories))]]
    texts = [text for text, _, _ in stories]
    return conversation("quantity", "\n".join(world.rng.sample(texts, len(texts))), asked)
