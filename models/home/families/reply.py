"""Answering a message with the right name, day, time and place (as in the papers' message-reply data)."""

from models.case import Case, assistant, look, sentence, user
from models.home.world import World, phrasings

MESSAGE = phrasings(
    """
    {hi} {me}, can we meet on {d} at {c} at the {v}? {s}
    {hi} {me}, do you want to come to the {e} on {d} at {c}? We meet at the {v}. {s}
    {hi} {me}! The {e} is on {d} at {c} at the {v}. Are you coming? {s}
    {hi} {me}, I am going to the {v} on {d} at {c}. Will you join me? {s}
    {hi} {me}, shall we go to the {e} at the {v}? It is on {d} at {c}. Yours, {s}
    {hi} {me}, {d} at {c} at the {v}, does that suit you? {s}
    {hi} {me}, let us do the {e} on {d}. I will be at the {v} at {c}. Love, {s}
    {hi} {me}, are you free on {d}? I thought of the {v} at {c}. Best wishes, {s}
    {hi} {me}! See you at the {v} on {d} at {c} for the {e}? - {s}
    {hi} {me}, I would like to see you on {d}, perhaps at the {v} at {c}? {s}
    {hi} {me}, could we meet on {d} at {c}? I will be at the {v}. Regards, {s}
    {hi} {me}, the {e} starts at {c} on {d}. Our meeting point: the {v}. {s}
    {hi} {me}, would it work for you to come to the {v} on {d} at {c}? {s}
    {hi} {me}! What about {d} at {c}? We could go to the {v}. Kind regards, {s}
    {hi} {me}, can you make it to the {v} on {d} at {c} for the {e}? {s}
    {hi} {me}, I am at the {v} on {d} from {c} on, what about you? {s}
    {hi} {me}, how about {d}? I could be at the {v} at {c}. Regards from {s}
    {hi} {me}, the {v} on {d}, say at {c}? Would you like that? {s}
    {hi} {me}, the {e} begins on {d} at {c} at the {v}. Will you be there? {s}
    {hi} {me}, we meet on {d} at {c} at the {v}. Could you come? {s}
    {hi} {me}, what about {d} at {c} at the {v}? {s}
    {hi} {me}, the meeting point on {d} at {c} is the {v}. Can you come? {s}
    {hi} {me}, would you come to the {v} on {d} at {c}? Say yes! Regards, {s}
    {hi} {me}, would you have time on {d} at {c}? The {v} would be good. Regards, {s}
    {hi} {me}, on {d} at {c} the {e} starts at the {v}. What do you say? {s}
    {hi} {me}, the {e} goes on from {c} on {d}, our meeting point is the {v}. Is that possible? {s}
    {hi} {me}, {d} at {c}, the {e}, meeting place the {v}. Can you? {s}
    {hi} {me}, the {e} is on {d} at {c}, and the point to meet is the {v}. Will you make it? {s}
    {hi} {me}, would you meet me on {d} at {c}? I could be at the {v}. {s}
    """,
    """
    {hi} {me}, would {d} at {c} work for you? We could meet at the {v}. Regards, {s}
    {hi} {me}, the {e} starts on {d} at {c}, meeting point is the {v}. Can you make it? {s}
    {hi} {me}, what about the {v} on {d} at {c}? {s}
    """,
)
HELLO = phrasings(
    "Hi\nHello\nDear\nHey\nGood evening\nGood day\nHello there\nHey there\nHi again\nMorning\nGood afternoon\nHi dear"
    "\nFine morning\nBright morning\nWhat a morning\nGood weekend\nGood old\nHappy morning",
    "Good morning\nHi there",
)

YES = phrasings(
    """
    Write back that I will come.
    Answer yes.
    Reply: yes, gladly.
    Tell them that I can.
    Accept, please.
    Write a reply that says yes.
    Say that it suits me.
    Please answer that I am coming.
    Let them know that I am coming.
    Reply that I will be there.
    Answer and accept.
    Say yes and thank them.
    Let them know: yes.
    Accept and let them know.
    """,
    """
    Let them know that I will be there.
    Reply and accept.
    """,
)
NO = phrasings(
    """
    Write back that I can't come.
    Answer no.
    Reply: no, sorry.
    Tell them that I have no time.
    Decline, please.
    Write a reply that says no.
    Say that it does not suit me.
    Please answer that I am not coming.
    Let them know that I am not coming.
    Reply that I won't come.
    Answer and decline.
    Say no and thank them.
    I won't be there, tell them.
    Decline and let them know.
    """,
    """
    Let them know that I won't be there.
    Reply and decline.
    """,
)
LATE = phrasings(
    """
    Write back that I will be {m} minutes late.
    Say that I need {m} minutes more.
    Reply that I come {m} minutes later.
    Tell them: {m} minutes late.
    Let them know: {m} minutes late.
    Answer that I am {m} minutes late.
    It will be {m} minutes later, write that.
    I am running late by {m} minutes, tell them.
    Tell them it is {m} minutes later for me.
    For me it will be {m} minutes more, reply that.
    """,
    """
    Let them know I am running {m} minutes late.
    Answer that it will be {m} minutes later for me.
    """,
)


def make(world: World, size: float) -> Case:
    """Return an answer to one message, with growing `size` sometimes below an unrelated one from another person."""
    del size
    me, sender, event, venue = world.name(), world.name(), world.event(), world.venue()
    day, clock, minutes = world.day(), world.clock(), world.rng.choice((5, 10, 15, 20, 25, 30, 40, 45))
    message = world.say(MESSAGE).format(hi=world.say(HELLO), me=me, s=sender, d=day, c=clock, v=venue, e=event)
    mood = world.rng.choice((YES, YES, NO, LATE))
    greeting = f"Hi {look(sender)}, "
    at = f"at {look(clock)}"
    if mood is YES:
        text = f"thank you for asking. {look(day)} {at} at the {look(venue)} is fine with me. See you then!"
    elif mood is NO:
        text = f"thank you for asking. I am sorry, but on {look(day)} {at} I can't come. Maybe next time!"
    else:
        delay = f"I will be {look(minutes)} minutes late"
        text = f"I am on my way to the {look(venue)}, but {delay}. Please wait for me!"
    ask = sentence(world.say(mood).format(m=minutes))
    heading = world.rng.choice(("", "Message:\n", "From my inbox:\n"))
    return Case("reply", (user(ask, heading + message), assistant(f"{greeting}{text} {look(me)}")))
