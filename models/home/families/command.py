"""Device commands: from a person's request and a list of devices to one line that a home hub can run."""

from collections.abc import Callable

from models.case import Case, conversation, look, sentence
from models.home.families.page import page
from models.home.world import Phrasings, World, phrasings

ON = phrasings(
    """
    Turn on the {t}.
    Switch the {t} on.
    switch on the {t}
    The {t} on, please.
    Please start the {t}.
    Can you turn the {t} on?
    I want the {t} on.
    turn the {t} on please
    Power on the {t}.
    Could you start the {t}?
    Get the {t} running.
    Let the {t} start.
    Get the {t} going now.
    Could you put the {t} on?
    Let us have the {t} on.
    Run the {t}.
    Up with the {t}, give it power.
    Give power to the {t}.
    Power to the {t}, please.
    I want the {t} up and running.
    I want the {t} going.
    Would you get the {t} going, please?
    Make the {t} run.
    May the {t} run?
    The {t} has to run now.
    """,
    """
    Power up the {t}.
    Could you get the {t} going?
    Let the {t} run.
    """,
)
OFF = phrasings(
    """
    Turn off the {t}.
    Switch the {t} off.
    switch off the {t}
    The {t} off, please.
    Please stop the {t}.
    Can you turn the {t} off?
    I want the {t} off.
    Nobody needs the {t}, turn it off.
    Power off the {t}.
    Shut off the {t}.
    Put the {t} off for me.
    The {t} should be off now.
    Can you shut down the {t}?
    The {t} can go off.
    Take the power from the {t}, down with it.
    """,
    """
    Power down the {t}.
    Shut the {t} off for me.
    The {t} can be off now.
    """,
)
LEVEL = phrasings(
    """
    Set the {t} to {m} percent.
    Turn the {t} to {m} percent.
    Make it {m} percent on the {t}.
    The {t} at {m} percent, please.
    Dim the {t} to {m} percent.
    I want the {t} at {m} percent.
    put the {t} on {m} percent
    Bring the {t} up to {m} percent.
    Change the {t} to {m} percent.
    Change it so that the {t} has {m} percent.
    The {t} is to be at {m} percent.
    Let the {t} be at {m} percent.
    """,
    """
    Bring the {t} to {m} percent.
    Change the {t} so that it is at {m} percent.
    """,
)
HEAT = phrasings(
    """
    Set the {t} to {m} degrees.
    Make it {m} degrees with the {t}.
    Turn the {t} to {m} degrees.
    For the {t}: {m} degrees please.
    I would like {m} degrees from the {t}.
    heat to {m} degrees with the {t}
    Keep it at {m} degrees with the {t}.
    The {t} should give {m} degrees.
    Hold the {t} at {m} degrees.
    It should be {m} degrees, use the {t}.
    The {t} is to keep {m} degrees.
    """,
    """
    Keep the {t} at {m} degrees.
    The {t} should be at {m} degrees.
    """,
)
TIMER = phrasings(
    """
    Turn on the {t} for {m} minutes.
    Let the {t} run for {m} minutes.
    Start the {t} for {m} minutes.
    I need the {t} for {m} minutes.
    The {t} on for {m} minutes, please.
    Have the {t} run for {m} minutes.
    The {t} may be on for {m} minutes.
    During the next {m} minutes I need the {t} on.
    Run the {t} {m} minutes.
    I may need the {t} on during {m} minutes.
    """,
    """
    Have the {t} on during {m} minutes.
    The {t} may run {m} minutes.
    """,
)
LIST = phrasings(
    "Devices:\nMy devices:\nDevices at home:\nThe hub knows:\nConnected to the hub:\nAvailable here:\n"
    "All devices:\nAvailable:\nWhat is connected:",
    "Connected devices:\nAvailable devices:",
)

INTENTS: dict[str, tuple[Phrasings, Callable[[World], int], str]] = {
    "on": (ON, lambda _: 0, "state = on"),
    "off": (OFF, lambda _: 0, "state = off"),
    "level": (LEVEL, lambda world: world.number(1, 20) * 5, "level = {m} percent"),
    "heat": (HEAT, lambda world: world.number(5, 30), "target = {m} degrees"),
    "timer": (TIMER, lambda world: world.number(1, 60), "timer = {m} minutes"),
}


def device(world: World) -> str:
    """Return a device such as `hall lamp` or `blue fan`."""
    kind = world.rng.choice(("lamp", "heater", "fan", "radio", "blinds", "oven", "pump", "speaker", "camera", "light"))
    return f"{world.room()} {kind}" if world.rng.random() < 0.7 else f"{world.adjective()} {kind}"


def make(world: World, size: float) -> Case:
    """Return a request about one of 2 to 7 devices with random addresses."""
    count = world.number(2, 2 + round(5 * size))
    names: list[str] = []
    while len(names) < count:
        if (name := device(world)) not in names:
            names.append(name)
    addresses = [f"{world.rng.choice('abcdefghkmpqrstuvwxyz')}{world.number(10, 99)}" for _ in names]
    lines = [f"{name} = {address}" for name, address in zip(names, addresses, strict=True)]
    heading = world.say(LIST)
    known = f"{heading} {', '.join(lines)}" if world.rng.random() < 0.3 else page(world, lines, (heading,))
    pairs = []
    for at in world.rng.sample(range(count), min(count, world.questions(count))):
        phrasing, draw, action = world.rng.choice(list(INTENTS.values()))
        amount = draw(world)
        address, run = look(addresses[at]), action.format(m=look(amount))
        request = sentence(world.say(phrasing).format(t=names[at], m=amount))
        pairs.append((request, f"The {names[at]} = {address}. Run: {address} {run}."))
    return conversation("command", known, pairs)
