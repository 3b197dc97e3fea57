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
        self.context_length = 1_000

    def reply(self, messages: Sequence[Message], options: ReplyOptions) -> Any:
        length = sum(len(message.content) for message in messages)
        if length >= self.context_length:
            raise PromptTooLong("It is too long.", "Shorten it.")
        self.asked.append([(message.role, message.content) for message in messages])
        return SimpleNamespace(prompt_tokens=length)

    def count_tokens(self, text: str, most: int) -> int:
        if len(text) > most:
            raise PromptTooLong("It is too long.", "Shorten it.")
        return len(text)

    def longer_context(self, tokens: int) -> str:
        return f"Give {tokens}."


def heard(text: str) -> Any:
    stats = Stats()
    stats.pieces.append(text.encode())
    return stats.summary(3)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def talk(listener: Listener) -> ChatSession:
    return ChatSession(listener, ReplyOptions(), context=[("mug.txt", "The mug is red.")], system="Be kind.")  # type: ignore[arg-type]


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
    listener.context_length = 50
    with pytest.raises(PromptTooLong, match=r"The question has 100 tokens, 123 with .* holds 50 .* Give 199\.$"):
        talk.ask("x" * 100)
    with pytest.raises(PromptTooLong, match=r"The question has more than 1048576 tokens"):
        talk.ask("x" * (2**20 + 1))
    listener.context_length = 1_000
    talk.ask("Sure?")
    assert listener.asked[-1] == [*FIRST, ("assistant", "Red."), ("user", "Sure?")]


def test_a_long_conversation_loses_its_oldest_turns_and_neither_system_nor_context(
    listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    kept: list[Sequence[Message]] = []
    options = ReplyOptions(max_tokens=40)
    talk = ChatSession(listener, options, context=[("red.txt", "Red.")], system="Be kind.", keep=kept.append)  # type: ignore[arg-type]
    listener.context_length = 200
    for number in range(30):
        talk.ask(f"Question {number:02}?")
        talk.add_reply(heard(f"Answer {number:02}."))
        sent = listener.asked[-1]
        assert sent[0] == ("system", "Be kind.")
        assert sum("Red." in content for _, content in sent) == 1
        assert [role for role, _ in sent[1:]] == ["user", "assistant"] * (len(sent) // 2 - 1) + ["user"]
        assert sum(len(content) for _, content in sent) <= 160, "a reply has room"
    assert len(listener.asked[-1]) > 6
    assert len(kept[-1]) == 1 + 2 * 30, "all of it is stored"
    assert capsys.readouterr().err.count("oldest turns") == 1
    talk.clear()
    talk.ask("Which?")
    assert listener.asked[-1] == [("system", "Be kind."), ("user", "Red.\n\nWhich?")]


def test_a_stored_conversation_keeps_its_own_system_prompt(listener: Listener) -> None:
    past = [Message("system", "Be brief."), *[Message(role, "x" * 90) for role in ("user", "assistant") * 2]]
    talk = ChatSession(listener, ReplyOptions(max_tokens=40), context=(), system=None, history=past)  # type: ignore[arg-type]
    listener.context_length = 300
    talk.ask("And now?")
    assert [role for role, _ in listener.asked[-1]] == ["system", "user", "assistant", "user"]
