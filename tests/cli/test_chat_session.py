"""What a conversation remembers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.cli.chat_session import ChatSession
from edgellm.engine import Message
from edgellm.errors import PromptTooLong
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stats import Stats


class Listener:
    """A pair that only notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []
        self.full = False

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> Any:
        if self.full:
            raise PromptTooLong("It is too long.", "Shorten it.")
        self.asked.append([(message.role, message.content) for message in messages])
        return SimpleNamespace()


def heard(text: str) -> Any:
    stats = Stats()
    stats.pieces.append(text.encode())
    return stats.summary(3)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def talk(listener: Listener) -> ChatSession:
    return ChatSession(listener, ReplyOptions(), context=["The mug is red."], system="Be kind.")  # type: ignore[arg-type]


FIRST = [("system", "Be kind."), ("user", "The mug is red.\n\nWhich colour?")]


def test_context_and_system_open_the_conversation_once(talk: ChatSession, listener: Listener) -> None:
    talk.ask("Which colour?")
    talk.add_reply(heard("Red."))
    talk.ask("Sure?")
    assert listener.asked == [FIRST, [*FIRST, ("assistant", "Red."), ("user", "Sure?")]]


def test_clear_forgets_what_was_said_and_keeps_the_context(talk: ChatSession, listener: Listener) -> None:
    talk.ask("Which colour?")
    talk.add_reply(heard("Red."))
    talk.clear()
    talk.ask("Which colour?")
    assert listener.asked[1] == FIRST
    assert talk.summary is None


def test_a_reply_without_a_word_is_no_turn(talk: ChatSession, listener: Listener) -> None:
    talk.ask("Which colour?")
    talk.add_reply(heard(""))
    talk.ask("Which colour?")
    assert listener.asked[1] == FIRST


def test_a_question_that_could_not_be_asked_is_forgotten(talk: ChatSession, listener: Listener) -> None:
    talk.ask("Which colour?")
    talk.add_reply(heard("Red."))
    listener.full = True
    with pytest.raises(PromptTooLong):
        talk.ask("x" * 100)
    listener.full = False
    talk.ask("Sure?")
    assert listener.asked[-1] == [*FIRST, ("assistant", "Red."), ("user", "Sure?")]
