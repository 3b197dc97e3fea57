"""What a conversation remembers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.cli.chat_session import Chat, StoredConversation
from edgellm.engine import Message
from edgellm.errors import PromptTooLong
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stats import Summary
from edgellm.spec.types import Source, Token
from edgellm.storage.chat_log import Conversation


class Listener:
    """A pair that only notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, str]]] = []
        self.context_length = 1_000
        self.forgotten = 0

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

    def forget_prompts(self) -> None:
        self.forgotten += 1

    def longer_context(self, tokens: int) -> str:
        return f"Give {tokens}."


class Kept(StoredConversation):
    """A stored conversation, in a list instead of a database."""

    def __init__(self, *turns: tuple[str, str]) -> None:
        self.saved: list[tuple[str, Sequence[tuple[str, str]]]] = []
        store = SimpleNamespace(
            save=lambda one: self.saved.append((one.id, one.turns)), remove=lambda one: self.saved.append((one.id, ()))
        )
        super().__init__(store, Conversation.new().with_turns(turns), True)  # type: ignore[arg-type]


def heard(text: str) -> Any:
    summary = Summary(3)
    summary.show(Token(0, text.encode(), Source.VERIFIER))
    return summary


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def talk(listener: Listener) -> Chat:
    return Chat(listener, ReplyOptions(), context=[("mug.txt", "The mug is red.")], system="Be kind.")  # type: ignore[arg-type]


FIRST = [("system", "Be kind."), ("user", "The mug is red.\n\nWhich colour?")]


def test_context_and_system_open_the_conversation_once(talk: Chat, listener: Listener) -> None:
    talk.ask("Which colour?")
    talk.add_reply(heard("Red."))
    talk.ask("Sure?")
    assert listener.asked == [FIRST, [*FIRST, ("assistant", "Red."), ("user", "Sure?")]]


def test_a_question_that_could_not_be_asked_is_forgotten(talk: Chat, listener: Listener) -> None:
    talk.ask("Which colour?")
    talk.add_reply(heard("Red."))
    listener.context_length = 50
    with pytest.raises(PromptTooLong, match=r"The question has 100 tokens, 123 with .* holds 50 .* Give 199\.$"):
        talk.ask("x" * 100)
    with pytest.raises(PromptTooLong, match=r"The question has more than 1048576 tokens, and the context"):
        talk.ask("x" * (2**20 + 1))
    listener.context_length = 1
    with pytest.raises(PromptTooLong, match=r"The question has 1 token, and "):
        Chat(listener, ReplyOptions(), context=[], system="").ask("x")  # type: ignore[arg-type]
    listener.context_length = 1_000
    talk.ask("Sure?")
    assert listener.asked[-1] == [*FIRST, ("assistant", "Red."), ("user", "Sure?")]


def test_a_long_conversation_loses_its_oldest_turns_and_neither_system_nor_context(
    listener: Listener, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Kept()
    options = ReplyOptions(max_tokens=40)
    talk = Chat(listener, options, context=[("red.txt", "Red.")], system="Be kind.", stored=kept)  # type: ignore[arg-type]
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
    assert len(kept.conversation.turns) == 1 + 2 * 30, "all of it is stored"
    assert capsys.readouterr().err.count("oldest turns") == 1
    talk.clear()
    talk.ask("Which?")
    assert listener.asked[-1] == [("system", "Be kind."), ("user", "Red.\n\nWhich?")]


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def stored(listener: Listener, kept: Kept) -> Chat:
    return Chat(
        listener,  # type: ignore[arg-type]
        ReplyOptions(), context=[("mug.txt", "The mug is red.")], system="Be kind.", stored=kept,
    )  # fmt: skip


def said(talk: Chat, question: str, answer: str) -> None:
    talk.ask(question)
    talk.add_reply(heard(answer))


def test_a_turn_that_is_undone_was_never_said_and_can_be_put_back(stored: Chat, listener: Listener, kept: Kept) -> None:
    said(stored, "Which colour?", "Red.")
    said(stored, "Sure?", "Yes.")
    turn = stored.undo()
    assert turn is not None
    assert [turn.question, *turn.replies] == [Message("user", "Sure?"), Message("assistant", "Yes.")]
    assert listener.forgotten == 1, "nor is what was read kept on disk"
    assert [text for _, text in kept.saved[-1][1]] == ["Be kind.", FIRST[1][1], "Red."]
    stored.put_back(turn)
    assert stored.turns == [("user", "Which colour?"), ("assistant", "Red."), ("user", "Sure?"), ("assistant", "Yes.")]
    stored.undo()
    stored.undo()
    assert kept.saved[-1][1] == (), "nothing of it is left in the store"
    assert stored.undo() is None
    stored.ask("Which colour?")
    assert listener.asked[-1] == FIRST, "with the context again"
    assert len({conversation for conversation, _ in kept.saved}) == 1


def test_a_system_prompt_holds_from_the_beginning_on(stored: Chat, listener: Listener, kept: Kept) -> None:
    said(stored, "Which colour?", "Red.")
    stored.set_system("Be brief.")
    stored.ask("Sure?")
    assert listener.asked[-1][0] == kept.saved[-1][1][0] == ("system", "Be brief.")
    stored.set_system(None)
    stored.ask("Sure?")
    assert listener.asked[-1][0] == FIRST[1]
    past = Kept(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"))
    talk = Chat(listener, ReplyOptions(), system="Be kind.", stored=past)  # type: ignore[arg-type]
    talk.ask("And now?")
    assert [text for _, text in listener.asked[-1]] == ["Be kind.", "Hi", "Hello", "And now?"]


def test_context_comes_with_the_next_question_and_goes_from_where_it_was(
    stored: Chat, listener: Listener, kept: Kept
) -> None:
    said(stored, "Which colour?", "Red.")
    stored.add_context("cup.txt", "The cup is blue.")
    said(stored, "And the cup?", "Blue.")
    stored.ask("Sure?")
    assert listener.asked[-1][3] == ("user", "The cup is blue.\n\nAnd the cup?")
    assert stored.drop_context("mug.txt")
    assert not stored.drop_context("mug.txt")
    stored.ask("Sure?")
    assert [text for _, text in listener.asked[-1]] == [
        "Be kind.", "Which colour?", "Red.", "The cup is blue.\n\nAnd the cup?", "Blue.", "Sure?",
    ]  # fmt: skip
    assert kept.saved[-1][1] == tuple(listener.asked[-1][:-1])
    stored.add_context("cup.txt", "The cup is green.")
    stored.ask("And the cup?")
    assert [text for _, text in listener.asked[-1]][3:] == [
        "And the cup?",
        "Blue.",
        "The cup is green.\n\nAnd the cup?",
    ]
