"""Plain wordings, as people type them: at least twenty of each kind for training, others for held-out cases.

Full tellings name the thing, short ones only the value.
"""

from models.home.world import phrasings

PLACE_TELL = phrasings(
    """
    The {t} is {p}.
    My {t} is {p}.
    Our {t} is {p}.
    The {t}'s {p}.
    The {t} are {p}.
    My {t} are {p}.
    I put the {t} {p}.
    I put my {t} {p}.
    I left the {t} {p}.
    I left my {t} {p}.
    We put the {t} {p}.
    We keep the {t} {p}.
    We have our {t} {p}.
    I have the {t} {p}.
    I just put the {t} {p}.
    I saw the {t} {p}.
    I found my {t} {p}.
    I found the {t}, it is {p}.
    The {t} should be {p}.
    I think the {t} is {p}.
    I think my {t} is {p}.
    I know the {t} is {p}.
    OK, the {t} is {p}.
    Well, my {t} is {p}.
    So the {t} is {p}.
    The {t} is {p} now.
    I moved the {t}, it is {p} now.
    You find the {t} {p}.
    The {t} is still {p}.
    Look, the {t} is {p}.
    {n} put the {t} {p}.
    """,
    """
    I just left my {t} {p}.
    OK, my {t} is {p} now.
    I think we left the {t} {p}.
    """,
)
PLACE_SHORT = phrasings(
    """
    It is {p}.
    It's {p}.
    {p}.
    {p}
    It is {p} now.
    I put it {p}.
    I left it {p}.
    I left them {p}.
    We keep it {p}.
    They are {p}.
    I put them {p}.
    It should be {p}.
    I think it is {p}.
    I found it {p}.
    It was {p}.
    It lies {p}.
    Well, it is {p}.
    OK, it's {p}.
    You find it {p}.
    It's right {p}.
    I saw it {p}.
    That is {p}.
    I know, it is {p}.
    It is still {p}.
    Look, it's {p}.
    {n} put it {p}.
    """,
    """
    I just put it {p}.
    Well, it's {p} now.
    I think they are {p}.
    """,
)
PLACE_ASK = phrasings(
    """
    Where is my {t}?
    Where is the {t}?
    Where's my {t}?
    Where's the {t}?
    Where are my {t}?
    Where are the {t}?
    Where did I put my {t}?
    Where did I leave my {t}?
    Where did I put the {t}?
    And where is the {t}?
    So where is my {t}?
    So where's the {t}?
    OK, where is the {t}?
    Where is the {t} now?
    Now where is my {t}?
    Do you know where my {t} is?
    Do you know where the {t} is now?
    Where can I find my {t}?
    Where do I find the {t}?
    I need my {t}. Where is it?
    Can you tell me where my {t} is?
    Tell me where my {t} is.
    I forgot where my {t} is.
    Remind me where the {t} is.
    Where was my {t}?
    Where was the {t} again?
    Where do we keep the {t}?
    Please, where is my {t}?
    """,
    """
    So where are my {t}?
    Remind me, where is my {t}?
    Now tell me where I put the {t}.
    """,
)
WHEN_TELL = phrasings(
    """
    The {e} is on {d} at {c}.
    My {e} is on {d} at {c}.
    Our {e} is on {d} at {c}.
    The {e}'s on {d} at {c}.
    The {e} is {d} at {c}.
    My {e} is {d} at {c}.
    We have the {e} on {d} at {c}.
    I have the {e} on {d} at {c}.
    I have my {e} on {d} at {c}.
    The {e} starts on {d} at {c}.
    The {e} begins on {d} at {c}.
    The {e} starts {d} at {c}.
    The {e} will be on {d} at {c}.
    I think the {e} is on {d} at {c}.
    I know the {e} is on {d} at {c}.
    OK, the {e} is on {d} at {c}.
    Well, my {e} is on {d} at {c}.
    So the {e} is on {d} at {c}.
    We go to the {e} on {d} at {c}.
    There is a {e} on {d} at {c}.
    We planned the {e} for {d} at {c}.
    I planned my {e} for {d} at {c}.
    The {e} is this {d} at {c}.
    The {e} is next {d} at {c}.
    The {e} is on {d}, {c}.
    The {e} is on {d} at {c} now.
    We moved the {e} to {d} at {c}.
    """,
    """
    I think our {e} is {d} at {c}.
    My {e} starts on {d} at {c}.
    We planned our {e} for {d} at {c}.
    """,
)
WHEN_SHORT = phrasings(
    """
    It is on {d} at {c}.
    It's on {d} at {c}.
    On {d} at {c}.
    {d} at {c}.
    {d} at {c}
    {d}, {c}
    It is {d} at {c}.
    It's {d} at {c}.
    It is on {d}, {c}.
    It starts on {d} at {c}.
    It begins on {d} at {c}.
    It starts {d} at {c}.
    It will be on {d} at {c}.
    I think it is on {d} at {c}.
    It is this {d} at {c}.
    It is next {d} at {c}.
    This {d} at {c}.
    We have it on {d} at {c}.
    We planned it for {d} at {c}.
    Well, it is on {d} at {c}.
    OK, it's on {d} at {c}.
    That is on {d} at {c}.
    I know, it is {d} at {c}.
    It is on {d} at {c} now.
    We moved it to {d} at {c}.
    """,
    """
    I think it's on {d} at {c}.
    We have it this {d} at {c}.
    Well, it starts {d} at {c}.
    """,
)
WHEN_ASK = phrasings(
    """
    When is my {e}?
    When is the {e}?
    When's the {e}?
    When's my {e}?
    When is our {e}?
    And when is the {e}?
    So when is the {e}?
    So when's my {e}?
    OK, when is my {e}?
    When is the {e} now?
    Now when is our {e}?
    When does the {e} start?
    When does my {e} begin?
    When do I have my {e}?
    When do we have the {e}?
    Do you know when my {e} is?
    Can you tell me when my {e} is?
    Tell me when the {e} is.
    I forgot when my {e} is.
    Remind me when the {e} is.
    When was the {e} again?
    What day is my {e}?
    Which day is the {e}?
    Please, when is the {e}?
    When did we plan the {e}?
    """,
    """
    So when does our {e} start?
    Remind me, when is the {e}?
    Now tell me when my {e} is.
    """,
)
WHO_TELL = phrasings(
    """
    {n} has to {h}.
    {n} will {h}.
    {n} must {h}.
    {n} is going to {h}.
    {n} should {h}.
    {n} wants to {h}.
    {n} promised to {h}.
    {n} can {h}.
    It is {n} who has to {h}.
    I asked {n} to {h}.
    I told {n} to {h}.
    We asked {n} to {h}.
    The one who has to {h} is {n}.
    To {h} is the job of {n}.
    I think {n} has to {h}.
    I think {n} will {h}.
    I know {n} has to {h}.
    OK, {n} has to {h}.
    Well, {n} will {h}.
    So {n} has to {h}.
    This time {n} has to {h}.
    Today {n} has to {h}.
    I want {n} to {h}.
    Let {n} {h}.
    It is the turn of {n} to {h}.
    Now {n} has to {h}.
    """,
    """
    I think {n} should {h}.
    We told {n} to {h}.
    This time it is {n} who has to {h}.
    """,
)
WHO_SHORT = phrasings(
    """
    It is {n}.
    It's {n}.
    {n}.
    {n}
    {n} has to do it.
    {n} does it.
    {n} will do it.
    {n} should do it.
    {n} will.
    {n} must.
    {n} does that.
    {n} is the one.
    That is {n}.
    That is the job of {n}.
    It is the job of {n}.
    I asked {n}.
    I asked {n} to do it.
    I told {n} to do it.
    I think it is {n}.
    It has to be {n}.
    It's {n} this time.
    OK, it is {n}.
    Well, it's {n}.
    The one is {n}.
    I know, it is {n}.
    It is {n} now.
    """,
    """
    I think it's {n}.
    That has to be {n}.
    I told {n} to do that.
    """,
)
WHO_ASK = phrasings(
    """
    Who has to {h}?
    Who will {h}?
    Who must {h}?
    Who should {h}?
    Who is going to {h}?
    Who wants to {h}?
    Who can {h}?
    Who's going to {h}?
    And who has to {h}?
    So who has to {h}?
    So who will {h}?
    OK, who has to {h}?
    Who has to {h} now?
    Now who has to {h}?
    Who promised to {h}?
    Who did I ask to {h}?
    Do you know who has to {h}?
    Can you tell me who has to {h}?
    Tell me who has to {h}.
    I forgot who has to {h}.
    Remind me who has to {h}.
    Who was it who has to {h}?
    Whose turn is it to {h}?
    Whose job is it to {h}?
    Please, who has to {h}?
    """,
    """
    So who should {h}?
    Remind me, who has to {h}?
    Now tell me who will {h}.
    """,
)
HAS_TELL = phrasings(
    """
    {n} has the {t}.
    {n} has my {t}.
    {n} took the {t}.
    {n} took my {t}.
    {n} borrowed the {t}.
    {n} borrowed my {t}.
    {n} has got the {t}.
    {n} still has the {t}.
    {n} keeps the {t}.
    {n} has the {t} now.
    I gave the {t} to {n}.
    I gave my {t} to {n}.
    I lent the {t} to {n}.
    I lent my {t} to {n}.
    I gave {n} the {t}.
    I lent {n} my {t}.
    We gave the {t} to {n}.
    I left the {t} with {n}.
    The {t} is with {n}.
    My {t} is with {n}.
    The {t} went to {n}.
    I think {n} has the {t}.
    I know {n} has my {t}.
    OK, {n} has the {t}.
    Well, {n} has my {t}.
    So {n} has the {t}.
    Now {n} has the {t}.
    It is {n} who has the {t}.
    """,
    """
    I left my {t} with {n}.
    We lent the {t} to {n}.
    I think {n} took the {t}.
    """,
)
HAS_SHORT = phrasings(
    """
    {n} has it.
    {n} has them.
    {n} took it.
    {n} took them.
    {n} borrowed it.
    {n} has got it.
    {n} still has it.
    {n} has it now.
    {n}.
    {n}
    It is with {n}.
    It's with {n}.
    They are with {n}.
    I gave it to {n}.
    I lent it to {n}.
    I gave them to {n}.
    We gave it to {n}.
    I left it with {n}.
    I think {n} has it.
    It is {n}.
    It's {n}.
    OK, {n} has it.
    Well, {n} has it.
    Now {n} has it.
    I know, {n} has it.
    It went to {n}.
    """,
    """
    We lent it to {n}.
    I think it's with {n}.
    Well, {n} took it.
    """,
)
HAS_ASK = phrasings(
    """
    Who has my {t}?
    Who has the {t}?
    Who's got my {t}?
    Who has got the {t}?
    Who took my {t}?
    Who took the {t}?
    Who borrowed my {t}?
    Who did I give my {t} to?
    Who did I lend my {t} to?
    And who has the {t}?
    So who has my {t}?
    OK, who has the {t}?
    Who has the {t} now?
    Now who has my {t}?
    Who still has my {t}?
    Do you know who has my {t}?
    Can you tell me who has my {t}?
    Tell me who has my {t}.
    I forgot who has my {t}.
    Remind me who has the {t}.
    Who was it who has my {t}?
    I need my {t}. Who has it?
    With whom is my {t}?
    Please, who has my {t}?
    Who keeps the {t}?
    """,
    """
    So who's got the {t}?
    Remind me, who has my {t}?
    Now tell me who took the {t}.
    """,
)
CODE_TELL = phrasings(
    """
    The code for the {t} is {k}.
    The code of the {t} is {k}.
    The code for my {t} is {k}.
    The {t} code is {k}.
    My {t} code is {k}.
    The {t} opens with {k}.
    My {t} opens with {k}.
    You open the {t} with {k}.
    We open the {t} with {k}.
    For the {t} it is {k}.
    For the {t} type {k}.
    The {t} has the code {k}.
    My {t} has the code {k}.
    The {t} needs {k}.
    The {t} needs the code {k}.
    To open the {t} type {k}.
    I think the code for the {t} is {k}.
    I know the code for the {t} is {k}.
    OK, the code for the {t} is {k}.
    Well, the code of my {t} is {k}.
    So the code for the {t} is {k}.
    Now the code for the {t} is {k}.
    The code for the {t} is {k} now.
    I set the code for the {t} to {k}.
    """,
    """
    I think the {t} code is {k}.
    I open my {t} with {k}.
    OK, the {t} needs {k}.
    """,
)
CODE_SHORT = phrasings(
    """
    It is {k}.
    It's {k}.
    {k}.
    {k}
    The code is {k}.
    The code's {k}.
    My code is {k}.
    That is {k}.
    I think it is {k}.
    Type {k}.
    Use {k}.
    It opens with {k}.
    You open it with {k}.
    We open it with {k}.
    It has the code {k}.
    It needs {k}.
    It needs the code {k}.
    OK, it's {k}.
    Well, it is {k}.
    It is {k} now.
    I set it to {k}.
    The number is {k}.
    I know, it is {k}.
    """,
    """
    I think it's {k}.
    Well, the code is {k}.
    OK, type {k}.
    """,
)
CODE_ASK = phrasings(
    """
    What is the code for the {t}?
    What is the code for my {t}?
    What's the code for the {t}?
    What is the {t} code?
    What's my {t} code?
    What is the code of the {t}?
    Which code opens the {t}?
    And what is the code for the {t}?
    So what is the code for the {t}?
    OK, what's the code for my {t}?
    Now what is the code for the {t}?
    How do I open the {t}?
    How do I open my {t}?
    Do you know the code for my {t}?
    Can you tell me the code for the {t}?
    Tell me the code for the {t}.
    I forgot the code for my {t}.
    I forgot my {t} code.
    Remind me of the code for the {t}.
    What was the code for the {t} again?
    I need the code for my {t}.
    Please, what is the code for the {t}?
    Give me the code for the {t}.
    """,
    """
    So what's the code of my {t}?
    Remind me, what is the code for the {t}?
    Now tell me the {t} code.
    """,
)
SET_RIGHT = phrasings(
    """
    No, {x}
    No, {x}
    No no, {x}
    No: {x}
    {x}
    {x}
    Sorry, {x}
    Oh, {x}
    Oh no, {x}
    Wait, {x}
    Stop, {x}
    Actually, {x}
    Actually {x}
    That is wrong, {x}
    That's wrong: {x}
    Wrong, {x}
    I was wrong, {x}
    Not any more, {x}
    Not now: {x}
    Now {x}
    That has changed, {x}
    Please change that: {x}
    Change it: {x}
    Correction: {x}
    """,
    """
    No, that is wrong, {x}
    Oh, sorry, {x}
    That was wrong: {x}
    """,
)
