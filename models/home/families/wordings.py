"""Wordings of facts and of questions about them: one list for training, one for held-out cases."""

from models.home.world import phrasings

PLACE_NOTE = phrasings(
    """
    The {t} is {p}.
    I put the {t} {p}.
    {n} left the {t} {p}.
    {t}: {p}
    Remember that the {t} is {p}.
    You can find the {t} {p}.
    We keep the {t} {p}.
    The {t} is now {p}.
    {n} says the {t} is {p}.
    {n} put the {t} {p}.
    The {t} lies {p}.
    Found the {t} {p}.
    There is the {t}, right {p}.
    The {t} was {p} this morning.
    {t} {p}
    Moved the {t}; it is {p} now.
    I was looking for the {t}: it is {p}.
    {n} will store the {t} {p}.
    Store the {t} {p}, please.
    The {t} stays {p}.
    In the end the {t} was {p}.
    A note to myself: the {t} is {p}.
    If you look for it: the {t} is {p}.
    The search has ended: the {t} was {p}.
    {n} saw the {t} {p}.
    Since yesterday the {t} has been {p}.
    Stored: {t} {p}
    Somebody hid the {t} {p}.
    The {t} once was up {p}.
    The {t} must stay {p}.
    We looked for a long time, then we saw the {t} {p}.
    {n} {v} the {t} {p}.
    The {t} has {v} {p}.
    """,
    """
    Look for the {t} {p}.
    {n} stored the {t} {p}.
    The {t} ended up {p}.
    Note: the {t} stays {p}.
    """,
)
PLACE_ASK = phrasings(
    """
    Where is the {t}?
    where is my {t}
    Where did we put the {t}?
    Do you know where the {t} is?
    I need the {t}. Where is it?
    Where can I find the {t}?
    Where are we keeping the {t}?
    Can you tell me where the {t} is?
    Where did I leave the {t}?
    I can't find the {t}. Where is it?
    where's the {t}?
    Where should I look for the {t}?
    Any idea where I put the {t}?
    Where might the {t} be?
    Please tell me where the {t} is.
    Has anybody seen where the {t} is?
    Tell me where the {t} has gone.
    Where did the {t} go?
    I wonder where the {t} went.
    Have you any idea? Where is the {t}?
    """,
    """
    Any idea where the {t} might be?
    Please tell me where the {t} went.
    Where has the {t} gone?
    """,
)
WHEN_NOTE = phrasings(
    """
    The {e} is on {d} at {c}.
    {e}: {d}, {c}
    We have the {e} on {d} at {c}.
    Do not forget the {e} on {d} at {c}.
    {n} moved the {e} to {d} at {c}.
    The {e} starts on {d} at {c}.
    {e} {d} {c}
    {n} has the {e} on {d} at {c}.
    There is the {e} on {d} at {c}.
    The {e} will be on {d}, at {c}.
    {n} wrote that the {e} is on {d} at {c}.
    {n} put down the {e} for {d} at {c}.
    There will be our {e} on {d} at {c}.
    The {e}: {d} at {c}
    The {e} is taking place on {d} at {c}.
    I put down the {e} for {d} at {c}.
    Get ready for the {e}: {d} at {c}.
    {n} put the {e} on {d} at {c}.
    Ready for the {e}? It is on {d} at {c}.
    The {e}, {d}, {c}.
    The {e} was moved to {d} at {c}.
    Come to the {e} on {d} at {c}.
    Be there for the {e}: {d}, {c}.
    {n} takes us to the {e} on {d} at {c}.
    The {e} takes the place of the walk on {d} at {c}.
    We {v} the {e} on {d} at {c}.
    {n} {v} for the {e} on {d} at {c}.
    """,
    """
    Come to our {e} on {d} at {c}.
    {n} wrote down the {e} on {d} at {c}.
    Be ready for the {e} on {d} at {c}.
    """,
)
WHEN_ASK = phrasings(
    """
    When is the {e}?
    What day is the {e}?
    when is the {e}
    Do you know when the {e} is?
    When does the {e} start?
    On which day and at what time is the {e}?
    Tell me when the {e} is.
    When do we have the {e}?
    At what time is the {e}?
    When will we have the {e}?
    Can you tell me when the {e} is?
    Look up when the {e} is.
    When again is the {e}?
    On what day exactly is the {e}?
    Will you tell me when the {e} is?
    So when is the {e} again?
    When will it be, the {e}?
    When {v} the {e}?
    When will the {e} {v}?
    """,
    """
    When will the {e} be?
    Can you look up when the {e} is?
    When exactly is the {e} again?
    """,
)
WHO_NOTE = phrasings(
    """
    {n} has to {h}.
    {n} will {h}.
    To {h} is the job of {n}.
    The one who will {h} is {n}.
    The one to {h} is {n}.
    Somebody has to {h}, and that is {n}.
    It was decided to {h}, by {n}.
    {h} - that is for {n}.
    {h}: {n}
    {h}, {n}!
    {h} ({n})
    Please {h}, {n}.
    Can you {h}, {n}?
    Will you {h}, {n}?
    It is your turn to {h}, {n}.
    You promised to {h}, {n}.
    Today you must {h}, {n}.
    Could somebody {h}, perhaps {n}?
    Do not forget to {h}, {n}.
    To {h}: {n}
    To {h} is for {n}.
    This week you {h}, {n}.
    The plan is to {h} with {n}.
    It is time to {h}, {n}.
    You wanted to {h}, {n}.
    I told you to {h}, {n}.
    We have to {h}, and {n} will do it.
    I do not want to {h}, so I asked {n}.
    You {v} to {h}, {n}.
    Please {v} to {h}, {n}.
    """,
    """
    You must {h}, {n}.
    Could you {h}, {n}?
    Please do not forget to {h}, {n}.
    """,
)
WHO_ASK = phrasings(
    """
    Who has to {h}?
    Who will {h}?
    who is going to {h}
    Who promised to {h}?
    Do you know who has to {h}?
    Whose job is it to {h}?
    Who must {h}?
    Tell me who will {h}.
    Who is the one that has to {h}?
    Who should {h}?
    Can you tell me who has to {h}?
    Say who will {h}.
    Which one of us has to {h}?
    Please say who must {h}.
    Who {v} to {h}?
    Can you {v} who will {h}?
    """,
    """
    Who is the one to {h}?
    Can you say who should {h}?
    """,
)
HAS_NOTE = phrasings(
    """
    {n} has the {t}.
    {n} took the {t}.
    I lent the {t} to {n}.
    The {t} is with {n}.
    I gave the {t} to {n}.
    The {t} went to {n}.
    I handed the {t} to {n}.
    The {t} was given to {n}.
    {t}: {n}
    {t} - {n}
    {t} ({n})
    The {t} was taken by {n}.
    We left the {t} with {n}.
    The {t} went away with {n}.
    The {t} was picked up by {n}.
    Send the {t} to {n}.
    I passed the {t} to {n}.
    I sold the {t} to {n}.
    We sent the {t} to {n}.
    I brought the {t} to {n}.
    Get the {t} from {n}.
    I had to give the {t} to {n}.
    I returned the {t} to {n}.
    You get the {t} from {n}.
    I promised the {t} to {n}.
    Yesterday I gave the {t} to {n}.
    Somebody handed the {t} to {n}.
    The {t} is still at home with {n}.
    I {v} the {t} to {n}.
    Yesterday we {v} the {t} to {n}.
    """,
    """
    We handed the {t} to {n}.
    Somebody gave the {t} to {n}.
    Yesterday I sent the {t} to {n}.
    """,
)
HAS_ASK = phrasings(
    """
    Who has the {t}?
    who took the {t}?
    Who did I give the {t} to?
    Do you know who has the {t}?
    Who borrowed the {t}?
    I miss the {t}. Who has it?
    Who has got my {t}?
    Who could have it, the {t}?
    With whom did I leave the {t}?
    To whom did I give the {t}?
    Could you tell me who has the {t}?
    Who is it that has the {t}?
    Whom did we give the {t}?
    With whom {v} the {t}?
    With whom is it, the {t}?
    Who {v} the {t}?
    """,
    """
    With whom is the {t}?
    Who could have the {t}?
    """,
)
CODE_NOTE = phrasings(
    """
    The code for the {t} is {k}.
    {t} code: {k}
    The {t} opens with {k}.
    Code of the {t}: {k}.
    {n} set the code for the {t} to {k}.
    For the {t} remember {k}.
    {t} {k}
    The {t} has the code {k}.
    At the {t} type {k}.
    {n} says that the {t} opens with {k}.
    To get into the {t}, use {k}.
    You open the {t} with {k}.
    At the {t} {n} types {k}.
    To open the {t}, you need {k}.
    To {v} the {t}, use {k}.
    """,
    """
    To open the {t}, type {k}.
    {n} says the code of the {t} is {k}.
    """,
)
CODE_ASK = phrasings(
    """
    What is the code for the {t}?
    what's the {t} code?
    Which code opens the {t}?
    I forgot the code for the {t}. What is it?
    Tell me the code for the {t}.
    Do you know the code of the {t}?
    How can I open the {t}?
    I need the code for the {t}.
    Give me the code for the {t}.
    Which code belongs to the {t}?
    What do I type to open the {t}?
    How do we get into the {t}? What is the code?
    How can I {v} the {t}? I need the code.
    """,
    """
    How do I open the {t}? I need the code.
    Give me the code that belongs to the {t}.
    """,
)
