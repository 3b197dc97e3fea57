"""Questions about time and quantity: small sums whose numbers stand in the context."""

from models.case import Case, conversation, look
from models.home.families.page import page
from models.home.world import Pool, World, phrasings

LEFT = phrasings(
    """
    Of the {t} we had {a}. {n} takes {b}.
    Of the {t}, {n} had {a} and gave {b} away.
    We had {t}, {a} of them. {b} are gone.
    The {t} were {a}; {n} used {b}.
    The {t}: {a}. {n} takes {b}.
    I bought {t}, {a} of them, and used {b}.
    The {t}, {a} {p}. {n} takes {b} of them away.
    {n} counted the {t}: {a}. Then {b} of them were sold.
    {n} removed some of the {t}: {a} minus {b}.
    There were {t}, {a} in number; {b} were removed.
    {n} counted the {t}, {a} of them, then took {b}.
    The {t}, once {a}: we sold {b}.
    {t}: {a}, and {n} took {b} away.
    Of all the {t}, {a} in number, {n} sold {b}.
    Of the {t}, {a} so far, {b} are gone now.
    """,
    """
    {n} counted the {t}, {a} of them, and removed {b}.
    Of the {t}, {a} in all, {b} were sold.
    """,
)
MORE = phrasings(
    """
    Of the {t} we had {a}. {n} brings {b} more.
    Of the {t}, {n} had {a} and got {b} more.
    We have {t}, {a} of them, and buy {b} more.
    The {t} were {a}; {n} gives me {b}.
    The {t}: {a}. {n} brings {b} more.
    I bought {t}, {a} of them, and found {b} more.
    The {t}, {a} {p}, and {n} adds {b}.
    {n} counted the {t}: {a}. Then came {b} more.
    {n} added some to the {t}: {a} plus {b}.
    There were {t}, {a} in number; {b} were added.
    {n} counted the {t}, {a} of them, then put {b} more there.
    The {t}, once {a}: we add {b}.
    {t}: {a}, and {n} brought {b} more.
    To all the {t}, {a} in number, {n} adds {b}.
    To the {t}, {a} so far, we add {b} now.
    """,
    """
    {n} counted the {t}, {a} of them, and put {b} more there.
    To the {t}, {a} in all, we add {b}.
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
    The {e} at {c} takes {m} minutes.
    The {e} begins at {c}. It lasts {m} minutes.
    {e}: {c}, {m} minutes
    There is the {e} at {c}, for {m} minutes.
    The {e} from {c} on, {m} minutes.
    Our {e} is at {c} and goes on for {m} minutes.
    There is the {e} from {c} on, {m} minutes long.
    The {e} at {c} goes {m} minutes.
    We planned the {e} for {c}. It goes {m} minutes.
    Our {e} at {c} lasts {m} minutes.
    For the {e} at {c} we have {m} minutes.
    We have our {e} at {c}, it goes on for {m} minutes.
    """,
    """
    We have the {e} at {c} for {m} minutes.
    Our {e} at {c} goes on for {m} minutes.
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


def count_sum(world: World) -> tuple[int, int, str, int]:
    """Return a number, the number added or removed, `minus` or `plus`, and the result."""
    if world.rng.random() < 0.5:
        total = world.number(2, 12)
        used = world.number(1, total - 1)
        return total, used, "minus", total - used
    total, used = world.number(1, 9), world.number(1, 6)
    return total, used, "plus", total + used


def clock_sum(world: World) -> tuple[str, int, str]:
    """Return the begin of an event, its minutes, and its end."""
    hour, start, minutes = (
        world.number(6, 21),
        world.rng.choice((0, 10, 15, 20, 30)),
        world.rng.choice((10, 15, 20, 30)),
    )
    end = hour * 60 + start + minutes
    return f"{hour}:{start:02d}", minutes, f"{end // 60}:{end % 60:02d}"


def _count(world: World) -> tuple[str, str, str]:
    things = world.pick(COUNTED)
    things += "" if things.endswith("s") else "s"
    total, used, how, result = count_sum(world)
    story = world.say(LEFT if how == "minus" else MORE)
    text = story.format(a=total, b=used, t=things, n=world.name(), p=world.place())
    answer = f"Of the {things}, {look(f'{total} {how} {used}')} makes {look(result)}."
    return text, world.say(HOW_MANY).format(t=things), answer


def _over(world: World) -> tuple[str, str, str]:
    event = world.event()
    begins, minutes, ends = clock_sum(world)
    text = world.say(READY).format(e=event, c=begins, m=minutes)
    answer = f"The {event} at {look(begins)} goes {look(minutes)} minutes, so it is over at {look(ends)}."
    return text, world.say(WHEN_OVER).format(e=event), answer


def make(world: World, size: float) -> Case:
    """Return one story, with others beside it as `size` grows; in training there may be a question about each."""
    stories = [world.rng.choice((_count, _count, _over))(world)]
    while len(stories) < 4 and world.rng.random() < 0.5 * size:
        stories.append((_over if stories[-1][2].startswith("Of") else _count)(world))
    pairs = [(ask, answer) for _, ask, answer in stories[: world.questions(len(stories))]]
    texts = [text for text, _, _ in stories]
    notes = page(world, world.rng.sample(texts, len(texts)), ("Today:", "Notes:", "This is what I know:"))
    return conversation("quantity", notes, pairs)
