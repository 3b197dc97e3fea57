"""Summaries of a house log in other words than the log's (as in CNN/DM and XSum).

Routine lines are left out; notable events come in order, each kind with the summary's own words.
"""

from dataclasses import dataclass

from models.case import Case, assistant, look, sentence, user
from models.home.world import Phrasings, World, phrasings


@dataclass(frozen=True, slots=True)
class Happening:
    """An event: its wordings in the `log`, and its wording in the `summary`."""

    log: Phrasings
    summary: str


NOTABLE = (
    Happening(
        phrasings(
            "front door opened by {n}\ndoor: {n} entered\n{n} unlocked the front door\nkey of {n} used at the door\n"
            "{n} came in\n{n} came in through the garden door\nfront door: entry, {n}\nentry: {n}",
            "{n} came through the front door\nentry by {n}",
        ),
        "{n} came home",
    ),
    Happening(
        phrasings(
            "{n} left, door locked\ndoor locked behind {n}\n{n} went out\nkey of {n}: locked from outside\n"
            "{n} stepped out\nexit: {n}\n{n} locked up and left\ndoor: exit, {n}",
            "{n} stepped out and locked up\nexit of {n}",
        ),
        "{n} went out",
    ),
    Happening(
        phrasings(
            "parcel for {n} delivered\ncourier left a parcel for {n}\nparcel at the door, for {n}\n"
            "a package for {n} arrived\npackage for {n} dropped at the door\nparcel addressed to {n}\n"
            "arrived: parcel for {n}",
            "package dropped off for {n}\na parcel arrived, addressed to {n}",
        ),
        "{n} got a parcel",
    ),
    Happening(
        phrasings(
            "smoke alarm in the {r}\nalarm: smoke, {r}\nsmoke detector {r} went off\n"
            "smoke in the {r} detected\nwarning: smoke in the {r}\nfire warning, {r}: smoke\ndetector {r}: smoke",
            "{r}: smoke detected\nsmoke warning from the {r}",
        ),
        "there was smoke in the {r}",
    ),
    Happening(
        phrasings(
            "water on the floor of the {r}\nleak sensor {r}: wet\nalarm: water, {r}\n"
            "water reported in the {r}\nleak detected in the {r}\nwetness sensor {r}: alarm\n"
            "warning: water in the {r}",
            "{r}: water detected\nwetness reported in the {r}",
        ),
        "water ran out in the {r}",
    ),
    Happening(
        phrasings(
            "window in the {r} still open\n{r}: window not closed\nwindow sensor {r}: open\n"
            "{r}: window ajar\nthe {r} window was not closed\nfound the window of the {r} open\n"
            "window left open in the {r}",
            "open window found in the {r}\n{r} window was left ajar",
        ),
        "the {r} window stayed open",
    ),
    Happening(
        phrasings(
            "missed call from {n}\n{n} called, no answer\nphone: {n}, not answered\n"
            "{n} called and nobody was there\ncall by {n} unanswered\nnobody answered {n}\n"
            "{n} rang the phone, not picked up",
            "nobody picked up when {n} called\nunanswered call by {n}",
        ),
        "{n} tried to call",
    ),
    Happening(
        phrasings(
            "washing machine finished\nlaundry program done\nwashing machine: end\n"
            "washer done\nwashing machine: cycle complete\nthe washer has finished\nlaundry cycle over\n"
            "washing program stopped, complete",
            "the laundry cycle is complete\nwasher has stopped, program over",
        ),
        "the laundry was done",
    ),
    Happening(
        phrasings(
            "power lost in the {r}\nfuse of the {r} blown\nno current in the {r}\n"
            "electricity off in the {r}\nno electricity: {r}\nthe {r} is without current\npower failed in the {r}",
            "{r} without electricity\nelectricity failed in the {r}",
        ),
        "the {r} had no power",
    ),
    Happening(
        phrasings(
            "cat fed by {n}\n{n} filled the bowl of the cat\n{n}: cat has eaten\n"
            "{n} gave the cat some food\nthe cat has its food, from {n}\nfood for the cat from {n}\ncat feeding: {n}\n"
            "{n} put out food for the cat",
            "{n} gave the cat its food\nfeeding of the cat by {n}",
        ),
        "{n} fed the cat",
    ),
    Happening(
        phrasings(
            "doorbell: {n}\n{n} rang the bell\n{n} at the door, bell rung\n"
            "bell rung by {n}\ndoorbell pressed: {n}\n{n} pressed the bell\nring at the door, it was {n}",
            "the bell was rung by {n}\n{n} pressed the doorbell",
        ),
        "{n} visited",
    ),
    Happening(
        phrasings(
            "reminder for {n}: {h}\n{n} has to {h}\nto do for {n}: {h}\n"
            "task for {n}: {h}\nreminded {n} to {h}\n{n} was told to {h}\nnew task, {n}: {h}",
            "{n} was reminded to {h}\ntask of {n}: {h}",
        ),
        "{n} was asked to {h}",
    ),
)
ROUTINE = phrasings(
    """
    temperature in the {r} {m} degrees
    {r}: {m} degrees
    motion in the {r}
    light on in the {r}
    light off in the {r}
    humidity {m} percent
    heating on
    heating off
    backup done
    battery of the sensor in the {r}: {m} percent
    all quiet
    blinds up in the {r}
    temperature {r}: {m}
    movement in the {r}
    sensor reads {m} degrees in the {r}
    lights on in the {r}
    {r}: lights out
    blinds of the {r} down
    nothing seen in the {r}
    somebody seen in the {r}
    """,
    """
    {r} temperature reads {m}
    movement seen in the {r}
    lights out in the {r}
    blinds down in the {r}
    """,
)
ASK = phrasings(
    """
    Summarise the log.
    What happened?
    Sum this up.
    Give me a summary.
    What happened at home?
    Tell me in short what happened.
    A short summary, please.
    what was important
    Can you tell me what happened?
    Tell me about the day.
    One sentence about the log, please.
    What went on at home?
    Sum up what happened.
    Can you sum this up?
    What was the day like, in a sentence?
    """,
    """
    Can you sum up the day?
    In one sentence, what went on?
    """,
)


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def make(world: World, size: float) -> Case:
    """Return a log of 1 to 3 notable events among up to 6 routine lines, and its summary."""
    happenings = world.rng.sample(NOTABLE, world.number(1, min(3, 1 + round(2 * size))))
    lines, parts = [], []
    for happening in happenings:
        slots = {"n": world.name(), "r": world.room(), "h": world.chore()}
        lines.append(world.say(happening.log).format(**slots))
        parts.append(happening.summary.format(**{key: look(value) for key, value in slots.items()}))
    entries: list[str] = list(lines)
    for _ in range(world.number(0, 1 + round(5 * size))):
        routine = world.say(ROUTINE).format(r=world.room(), m=world.number(1, 60))
        entries.insert(world.rng.randrange(len(entries) + 1), routine)
    minute = world.number(0, 600)
    stamped = []
    for entry in entries:
        minute += world.number(1, 90)
        stamped.append(f"{minute // 60 % 24}:{minute % 60:02d} {entry}")
    context = world.rng.choice(("", "Log:\n", "House log\n")) + "\n".join(stamped)
    answer = sentence(f"In short, {_joined(parts)}.")
    return Case("summary", (user(world.say(ASK), context), assistant(answer)), metric="rouge")
