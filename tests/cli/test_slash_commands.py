"""The commands of a conversation, with the bundled pair."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgellm.cli.chat_session import Chat, ChatPairOpener, StoredConversation
from edgellm.cli.interactive import COMMANDS, Conversing, completions
from edgellm.cli.options import HardwareOptions
from edgellm.cli.views.reply_printer import Display
from edgellm.errors import EdgeError, InvalidOption, ModelNotFound
from edgellm.spec.params import ReplyOptions
from edgellm.storage.chat_log import Conversations
from tests.cli.test_reply_printer import at_terminal

ROOT = Path(__file__).parents[2]
PAIR = ("edgellm-draft", "edgellm-verifier")
ASKED, REPLY = "When is the film night?", "The film night is Friday at 20:00."


@pytest.fixture
def talk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Conversing]:
    """A conversation in a folder with notes."""
    (tmp_path / "notes.txt").write_bytes((ROOT / "docs" / "notes.txt").read_bytes())
    monkeypatch.chdir(tmp_path)
    options = ReplyOptions(max_tokens=30)
    opener = ChatPairOpener(options, HardwareOptions(), history=True)
    pair = opener.open(*PAIR)
    stored = StoredConversation.open(False, None, True)
    session = Chat(pair, options, context=(), system=None, remember=opener.recall(pair), stored=stored)
    yield Conversing(session, Display(), opener, PAIR)
    session.close()


def texts(talk: Conversing) -> list[str]:
    return [text for _, text in talk.session.turns]


def test_a_conversation_with_commands(talk: Conversing, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def typed(line: str) -> str:
        capsys.readouterr()
        talk.enter(line)
        shown = capsys.readouterr()
        return shown.out + shown.err

    assert "There is no file" in typed("/context")
    assert "notes.txt (" in typed("/context notes.txt")
    assert typed(f'"""{ASKED}"""').startswith(REPLY)
    assert texts(talk) == [ASKED, REPLY]
    again = typed("/retry")
    assert REPLY in again
    assert "The same reply again" in again
    assert texts(talk) == [ASKED, REPLY]
    with pytest.raises(InvalidOption, match="hot is not a temperature"):
        talk.enter("/retry hot")
    with pytest.raises(EdgeError, match="temperature"):
        talk.enter("/retry -1")
    assert texts(talk) == [ASKED, REPLY], "a retry that fails changes nothing"
    assert "There is no system prompt" in typed("/system")
    typed("/system Be kind.")
    assert typed("/system") == "Be kind.\n"
    typed("/save")
    typed("Who has the drill?")
    typed("/save")  # the same file once more
    saved = (tmp_path / "when-is-the-film-night.md").read_text()
    assert saved.startswith(f"# {ASKED}\n\n## System\n\nBe kind.\n\n## You\n\n{ASKED}\n")
    assert "For the drill ask Ben." in saved
    with pytest.raises(InvalidOption, match=r"notes\.txt exists"):
        talk.enter("/save notes.txt")
    assert "Taken back: Who has the drill?" in typed("/undo")
    assert "prompt tokens" in typed("/stats")
    typed("/context drop notes.txt")
    (stored,) = Conversations().all()
    assert stored.turns == (("system", "Be kind."), ("user", ASKED), ("assistant", REPLY))
    typed("/undo")
    assert Conversations().all() == []
    assert "nothing to undo" in typed("/undo")
    assert "no question" in typed("/retry")
    assert "nothing to save" in typed("/save")
    typed(" /etc is full?")
    assert texts(talk)[0] == "/etc is full?"
    typed("/clear")
    assert texts(talk) == []
    assert len(Conversations().all()) == 1


def test_another_model_goes_on_with_the_conversation(talk: Conversing, capsys: pytest.CaptureFixture[str]) -> None:
    talk.enter("/context notes.txt")
    talk.enter(ASKED)
    with pytest.raises(ModelNotFound):
        talk.enter("/model edgellm-drafd")
    assert talk.session.pair.draft_name is not None
    talk.enter("/model edgellm-verifier none")
    assert talk.session.pair.draft_name is None
    assert talk.models == ("none", "edgellm-verifier")
    talk.enter("Who has the drill?")
    assert texts(talk)[-1] == "For the drill ask Ben."
    talk.enter("/model edgellm-verifier")
    assert talk.models == PAIR
    capsys.readouterr()
    talk.enter("/model")
    assert "edgellm-draft" in capsys.readouterr().err


def test_a_model_that_cannot_be_opened_leaves_the_former_one(
    talk: Conversing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(EdgeError):
        talk.enter("/model ./broken.gguf none")
    assert talk.models == PAIR
    assert "edgellm-verifier answers as before" in capsys.readouterr().err
    talk.enter("Hello")
    assert len(texts(talk)) == 2


def test_colours_show_the_last_reply_too(talk: Conversing, monkeypatch: pytest.MonkeyPatch) -> None:
    out, _ = at_terminal(monkeypatch)
    talk.enter("Hello")
    plain = out.getvalue()
    coloured = re.compile(r"\x1b\[[39]\d")  # bright where the verifier wrote a token without a draft
    assert not coloured.search(plain)
    talk.enter("/colors")
    assert coloured.search(out.getvalue().removeprefix(plain))
    talk.enter("Hello")
    assert talk.display.colours
    talk.enter("/colors off")
    assert not talk.display.colours
    with pytest.raises(InvalidOption):
        talk.enter("/colors maybe")


def test_an_unknown_command_is_not_sent(talk: Conversing) -> None:
    with pytest.raises(InvalidOption, match="Did you mean /model"):
        talk.enter("/modle x")
    with pytest.raises(InvalidOption, match="/help lists them"):
        talk.enter("/frob temperature 1")
    assert texts(talk) == []


def test_everything_is_completed(talk: Conversing) -> None:
    assert {text for text, _, about in completions(talk, "/") if about} == {one.name for one in COMMANDS}
    assert list(completions(talk, "/und")) == [("/undo", 4, "take back the last question and its reply")]
    assert [text for text, _, _ in completions(talk, "/context no")] == ["notes.txt"]
    talk.enter("/context notes.txt")
    assert ("drop ", 0, "remove a file") in completions(talk, "/context ")
    assert [text for text, _, _ in completions(talk, "/context drop ")] == ["drop notes.txt"]
    assert "edgellm-verifier" in [text for text, _, _ in completions(talk, "/model edgellm-")]
    assert "edgellm-verifier edgellm-draft" in [text for text, _, _ in completions(talk, "/model edgellm-verifier ed")]
    assert [text for text, _, _ in completions(talk, "/load edgellm-v")] == ["edgellm-verifier"]
    assert not list(completions(talk, "/nonsense "))
