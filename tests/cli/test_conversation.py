"""A conversation: what it remembers, and its commands."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from edgellm.cli.chat_session import Chat, ChatPairOpener
from edgellm.cli.interactive import COMMANDS, Conversing, SlashCompleter
from edgellm.cli.options import HardwareOptions
from edgellm.cli.views.reply_printer import Display
from edgellm.engine import Message
from edgellm.errors import EdgeError, InvalidOption, ModelNotFound, PromptTooLong
from edgellm.llm import LLM
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stats import Summary
from edgellm.spec.types import Source, Token
from edgellm.storage.chat_log import Conversation, History
from tests.cli.test_reply_printer import at_terminal
from tests.watching import Calls, calls_of

ROOT = Path(__file__).parents[2]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return calls_of(monkeypatch, LLM, "reply")


def sent(asked: Calls) -> list[tuple[str, str]]:
    """Return roles and texts of what the model was asked last."""
    _pair, messages, options = asked[-1]
    assert options.truncation == "auto", "the oldest turns are left out by whoever counts tokens"
    return [(message.role, message.content) for message in map(Message.whole, messages)]


def said(chat: Chat, question: str, answer: str) -> None:
    chat.ask(question)
    summary = Summary(3)
    summary.show(Token(0, answer.encode(), Source.VERIFIER))
    chat.add_reply(summary)


@pytest.fixture
def chat() -> Iterator[Chat]:
    with LLM.open(*PAIR) as pair:
        chat = Chat(pair, ReplyOptions(), system="Be kind.", stores=True)
        chat.add_context("mug.txt", "The mug is red.")
        yield chat


PAIR = ("edgellm-draft", "edgellm-verifier")
FIRST = [("system", "Be kind."), ("user", "The mug is red.\n\nWhich colour?")]


def test_context_and_system_open_the_conversation_once_and_a_question_that_failed_is_forgotten(
    chat: Chat, asked: Calls
) -> None:
    said(chat, "Which colour?", "Red.")
    assert sent(asked) == FIRST
    chat.ask("Sure?")
    second = [*FIRST, ("assistant", "Red."), ("user", "Sure?")]
    assert sent(asked) == second
    with pytest.raises(PromptTooLong, match=r"The question has 2002 tokens, 2018 with .* holds 1024 .* Shorten it"):
        chat.ask("mug " * 2000)
    with pytest.raises(PromptTooLong, match=r"The question has more than 1048576 tokens, and the context"):
        chat.ask("mug " * 2**20)
    chat.ask("Sure?")
    assert sent(asked) == second
    chat.clear()
    chat.ask("Which?")
    assert sent(asked) == [("system", "Be kind."), ("user", "The mug is red.\n\nWhich?")]


def test_a_turn_that_is_undone_was_never_said_and_can_be_put_back(
    chat: Chat, asked: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = calls_of(monkeypatch, LLM, "forget_prompts")
    said(chat, "Which colour?", "Red.")
    said(chat, "Sure?", "Yes.")
    taken = chat.undo()
    assert taken == [Message("user", "Sure?"), Message("assistant", "Yes.")]
    assert len(forgotten) == 1, "nor is what was read kept on disk"
    assert [text for _, text in History().latest().turns] == ["Be kind.", FIRST[1][1], "Red."]
    chat.put_back(taken)
    assert len(History().all()) == 1
    assert chat.turns == [("user", "Which colour?"), ("assistant", "Red."), ("user", "Sure?"), ("assistant", "Yes.")]
    chat.undo()
    chat.undo()
    assert History().all() == [], "nothing of it is left in the store"
    assert chat.undo() == []
    chat.ask("Which colour?")
    assert sent(asked) == FIRST, "with the context again"


def test_a_system_prompt_holds_from_the_beginning_on(chat: Chat, asked: Calls) -> None:
    said(chat, "Which colour?", "Red.")
    chat.set_system("Be brief.")
    chat.ask("Sure?")
    assert sent(asked)[0] == History().latest().turns[0] == ("system", "Be brief.")
    chat.set_system(None)
    chat.ask("Sure?")
    assert sent(asked)[0] == FIRST[1]
    past = Conversation.new().with_turns([("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello")])
    Chat(chat.pair, ReplyOptions(), system="Be kind.", past=past).ask("And now?")
    assert [text for _, text in sent(asked)] == ["Be kind.", "Hi", "Hello", "And now?"]


def test_context_comes_with_the_next_question_and_goes_from_where_it_was(chat: Chat, asked: Calls) -> None:
    said(chat, "Which colour?", "Red.")
    chat.add_context("cup.txt", "The cup is blue.")
    said(chat, "And the cup?", "Blue.")
    chat.ask("Sure?")
    cup = "The cup is blue.\n\nAnd the cup?"
    assert sent(asked)[3] == ("user", cup)
    assert chat.drop_context("mug.txt")
    assert not chat.drop_context("mug.txt")
    chat.ask("Sure?")
    assert [text for _, text in sent(asked)] == ["Be kind.", "Which colour?", "Red.", cup, "Blue.", "Sure?"]
    assert History().latest().turns == tuple(sent(asked)[:-1])
    chat.add_context("cup.txt", "The cup is green.")
    chat.ask("And the cup?")
    texts = [text for _, text in sent(asked)]
    assert texts[3:] == ["And the cup?", "Blue.", "The cup is green.\n\nAnd the cup?"]


# --- commands -----------------------------------------------------------------------------------------------------

ASKED, REPLY = "When is the film night?", "The film night is Friday at 20:00."


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Conversing]:
    """A conversation in a folder with notes."""
    (tmp_path / "notes.txt").write_bytes((ROOT / "docs" / "notes.txt").read_bytes())
    monkeypatch.chdir(tmp_path)
    options = ReplyOptions(max_tokens=30)
    opener = ChatPairOpener(options, HardwareOptions(), history=True)
    pair = opener.open(*PAIR)
    chat = Chat(pair, options, stores=True)
    yield Conversing(chat, Display(), opener, PAIR)
    chat.close()


def texts(talk: Conversing) -> list[str]:
    return [text for _, text in talk.chat.turns]


def test_a_conversation_with_commands(talk: Conversing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def typed(line: str, *says: str) -> str:
        capsys.readouterr()
        talk.enter(line)
        shown = "".join(capsys.readouterr())
        assert all(text in shown for text in says), shown
        return shown

    def refused(line: str, says: str) -> None:
        before = texts(talk)
        with pytest.raises(EdgeError, match=says):
            talk.enter(line)
        assert texts(talk) == before, "nothing is sent, and nothing is changed"

    typed("/context", "There is no file")
    typed("/context notes.txt", "notes.txt (")
    assert typed(f'"""{ASKED}"""').startswith(REPLY)
    assert texts(talk) == [ASKED, REPLY]
    typed("/retry", REPLY, "The same reply again")
    refused("/retry hot", "hot is not a temperature")
    refused("/retry -1", "temperature")
    typed("/system", "There is no system prompt")
    typed("/system Be kind.")
    assert typed("/system") == "Be kind.\n"
    typed("/save")
    typed("Who has the drill?")
    typed("/save")  # the same file once more
    saved = (tmp_path / "when-is-the-film-night.md").read_text()
    assert saved.startswith(f"# {ASKED}\n\n## System\n\nBe kind.\n\n## You\n\n{ASKED}\n")
    assert "For the drill ask Ben." in saved
    refused("/save notes.txt", r"notes\.txt exists")
    typed("/undo", "Taken back: Who has the drill?")
    typed("/stats", "prompt tokens")
    typed("/context drop notes.txt")
    (stored,) = History().all()
    assert stored.turns == (("system", "Be kind."), ("user", ASKED), ("assistant", REPLY))
    typed("/undo")
    assert History().all() == []
    for line, says in (("/undo", "nothing to undo"), ("/retry", "no question"), ("/save", "nothing to save")):
        typed(line, says)
    refused("/modle x", "Did you mean /model")
    refused("/frob temperature 1", "/help lists them")
    typed(" /etc is full?")
    assert texts(talk)[0] == "/etc is full?"
    typed("/clear")
    assert texts(talk) == []
    assert len(History().all()) == 1


def test_what_no_verifier_checked_is_checked_on_request(talk: Conversing, capsys: pytest.CaptureFixture[str]) -> None:
    alone = Chat(talk.chat.pair, ReplyOptions(max_tokens=30, gate="never"))
    talk = Conversing(alone, Display(), ChatPairOpener(ReplyOptions(), HardwareOptions(), history=False), PAIR)
    for line, says, share in (
        ("/verify", "There is no question", None), (ASKED, "not verified", None), ("/verify", f"> {ASKED}", 1.0),
        ("/verify", "Nothing is unchecked.", 1.0),
    ):  # fmt: skip
        talk.enter(line)
        assert says in "".join(capsys.readouterr())
        assert (None if alone.summary is None else alone.summary.share_verified) == share
    assert texts(talk) == [ASKED, "I do not know that yet. Tell me, and I will remember it."]


def test_another_model_goes_on_with_it(talk: Conversing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talk.enter("/context notes.txt")
    talk.enter(ASKED)
    with pytest.raises(ModelNotFound):
        talk.enter("/model edgellm-drafd")
    assert talk.chat.pair.draft_name is not None
    talk.enter("/model edgellm-verifier none")
    assert talk.chat.pair.draft_name is None
    talk.enter("Who has the drill?")
    assert texts(talk)[-1] == "For the drill ask Ben."
    talk.enter("/model edgellm-verifier")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(EdgeError):
        talk.enter("/model ./broken.gguf none")
    assert talk.models == PAIR
    assert "edgellm-verifier answers as before" in capsys.readouterr().err
    talk.enter("Hello")
    assert len(texts(talk)) == 6
    talk.enter("/model")
    assert "edgellm-draft" in capsys.readouterr().err


def test_colours_show_the_last_reply_too(talk: Conversing, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = at_terminal(monkeypatch)
    talk.enter("Hello")
    plain = out.getvalue()
    coloured = re.compile(r"\x1b\[[39]\d")  # bright where the verifier wrote a token without a draft
    assert not coloured.search(plain)
    talk.enter("/colors")
    assert coloured.search(out.getvalue().removeprefix(plain))
    assert talk.display.colours
    talk.enter("/colors off")
    assert not talk.display.colours
    with pytest.raises(InvalidOption):
        talk.enter("/colors maybe")


def test_everything_is_completed(talk: Conversing) -> None:
    def found(line: str) -> list[tuple[str, int, str]]:
        known = SlashCompleter(talk).get_completions(Document(line), CompleteEvent())
        return [(one.text, -one.start_position, one.display_meta_text) for one in known]

    assert {text for text, _, about in found("/") if about} == {one.name for one in COMMANDS}
    assert found("/und") == [("/undo", 4, "take back the last question and its reply")]
    assert found("/context no") == [("notes.txt", 2, "")]
    talk.enter("/context notes.txt")
    assert ("drop ", 0, "remove a file") in found("/context ")
    assert found("/context drop ") == [("drop notes.txt", 5, "")]
    assert [text for text, *_ in found("/model edgellm-v")] == ["edgellm-verifier"]
    assert next(text for text, *_ in found("/load edgellm-verifier ed")) == "edgellm-verifier edgellm-draft"
    assert not found("/nonsense ")
