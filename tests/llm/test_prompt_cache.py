"""What a process has read, the next one need not read again."""

import pytest

from edgellm.engine import Message
from edgellm.engine.kv.saved_prompts import prompts_folder
from edgellm.llm import LLM, compose
from edgellm.storage.chat_log import History
from tests.decodes import Watched
from tests.spec.real import ids

pytestmark = pytest.mark.usefixtures("home")

LIMIT = 10**9
FACTS = " ".join(f"The box {number} is in the room {number % 7}." for number in range(40))
QUESTION = "Where is the box 12?"


def turn(turns: list[Message], models: tuple[str | None, str | None], limit: int = LIMIT) -> list[int]:
    """Return the reply of a new process: nothing is shared with the last one but the disk."""
    with LLM.open(*models, prompt_cache=limit) as pair:
        return ids(pair.reply(turns, max_tokens=12))


def read(decodes: Watched) -> int:
    """Return how many rows were decoded since the last call."""
    rows = sum(n for n, _ in decodes[0])
    decodes[0].clear()
    return rows


@pytest.mark.parametrize(
    "models", [("edgellm-draft", "edgellm-verifier"), (None, "edgellm-verifier"), ("edgellm-draft", None)]
)
def test_the_next_turn_reads_only_what_is_new(decodes: Watched, models: tuple[str | None, str | None]) -> None:
    first = compose(QUESTION, context=[FACTS])
    turn(first, models)
    turns = [*first, Message("assistant", "It is in the room 5."), Message("user", "And the box 13?")]
    read(decodes)
    expected = turn(turns, models, limit=0)
    plain = read(decodes)
    assert turn(turns, models) == expected
    assert read(decodes) < plain / 2
    assert len(list(prompts_folder().iterdir())) == (2 if all(models) else 1)


@pytest.mark.parametrize("how", ["history off", "no history", "taken back"])
def test_nothing_is_kept_that_the_user_does_not_want(how: str) -> None:
    if how == "history off":
        History().turn_off()
    with LLM.open(None, "edgellm-verifier", prompt_cache=LIMIT, history=how != "no history") as pair:
        ids(pair.reply(compose(QUESTION, context=[FACTS]), max_tokens=4))
        if how == "taken back":
            pair.forget_prompts()
    assert not prompts_folder().exists() or not list(prompts_folder().iterdir())
