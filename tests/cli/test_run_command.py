"""`edgellm run MODEL`: the model is fetched if it must be, gets a draft model that fits it, and is talked to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm.cli.commands import models as command
from edgellm.system import config_file
from tests.cli.conftest import Done
from tests.conftest import Architectures, Heads
from tests.storage.hub import Hub

Edge = Callable[..., Done]
SHORT = ("--max-tokens", "4", "--json", "--no-history", "--retrieval", "off")


@pytest.fixture
def models(hub: Hub, draft_path: Path, verifier_path: Path) -> Hub:
    """The bundled pair under the names of a real one."""
    hub.repos["Qwen/Qwen3-0.6B-GGUF"] = {"Qwen3-0.6B-Q8_0.gguf": draft_path.read_bytes()}
    hub.repos["Qwen/Qwen3-4B-GGUF"] = {"Qwen3-4B-Q4_K_M.gguf": verifier_path.read_bytes()}
    return hub


def ids(done: Done) -> list[int]:
    assert done.code == 0, done.err
    return [line["id"] for line in done.lines if "id" in line]


def test_a_model_that_is_here_is_run_with_a_draft_model_or_alone(edge: Edge) -> None:
    alone = edge("run", "edgellm-verifier", "Hello", "--draft", "none", *SHORT)
    pair = edge("run", "edgellm-verifier", "Hello", *SHORT)
    assert ids(pair) == ids(alone)
    assert "edgellm-draft drafts for edgellm-verifier: it has its tokenizer and 21% of its size" in pair.err
    assert "drafts for" not in alone.err
    draft = edge("run", "edgellm-draft", "Hello", *SHORT)
    assert "edgellm-draft writes alone: no smaller model with its tokenizer is here." in draft.err


def test_a_head_that_was_made_for_it_drafts(edge: Edge, hub: Hub, architectures: Architectures, heads: Heads) -> None:
    hub.repos["Foo/Foo-GGUF"] = {"Foo-F32.gguf": architectures("llama").read_bytes()}
    hub.repos["Foo/Foo-eagle3-GGUF"] = {"Foo-eagle3-F32.gguf": heads("llama", own=True).read_bytes()}
    for name in ("Foo/Foo-GGUF", "Foo/Foo-eagle3-GGUF"):
        assert edge("pull", name).code == 0
    head = "Foo/Foo-eagle3-GGUF:F32"
    assert f"with the EAGLE-3 head {head}" in edge("show", "Foo/Foo-GGUF").out
    assert "as the draft model of Foo/Foo-GGUF:F32" in edge("show", head).out
    pair = edge("run", "Foo/Foo-GGUF", "Hello", *SHORT)
    assert f"{head} drafts for Foo/Foo-GGUF: it is an EAGLE-3 head for it. Alone: --draft none" in pair.err
    assert ids(pair) == ids(edge("run", "Foo/Foo-GGUF", "Hello", "--draft", "none", *SHORT))


def test_a_model_that_is_not_here_is_not_downloaded_unless_somebody_says_so(edge: Edge, models: Hub) -> None:
    done = edge("run", "qwen3:4b", "Hello", *SHORT)
    assert done.code == 1
    assert "edgellm pull qwen3:4b" in done.err
    assert "or add --yes to download it now" in done.err
    assert models.bytes_sent() == 0
    done = edge("run", "qwen3:4b", "Hello", "--yes", *SHORT)
    assert ids(done) == ids(edge("chat", "Hello", "--draft", "none", "--verifier", "edgellm-verifier", *SHORT))
    assert "downloading Qwen3-4B-Q4_K_M.gguf (6.8 MB; asked for)" in done.err


@pytest.mark.parametrize(("answer", "code"), [(b"n\n", 1), (b"\n", 0)])
def test_somebody_at_a_terminal_is_asked(
    edge: Edge, models: Hub, monkeypatch: pytest.MonkeyPatch, answer: bytes, code: int
) -> None:
    monkeypatch.setattr(command, "is_terminal", lambda _: True)
    done = edge("run", "qwen3:0.6b", "Hello", *SHORT, stdin=answer)
    assert "qwen3:0.6b is not here. Download Qwen3-0.6B-Q8_0.gguf (1.4 MB; asked for)?" in done.err
    assert done.code == code
    assert bool(models.bytes_sent()) is (code == 0)


def test_the_draft_model_of_a_known_verifier_is_named_if_it_is_not_here(
    edge: Edge, models: Hub, draft_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "other_models", lambda _: {})
    done = edge("run", "qwen3:4b", "Hello", "--yes", *SHORT)
    assert "qwen3:0.6b would draft for it: edgellm pull qwen3:0.6b" in done.err


def test_settings_of_chat_hold_except_those_of_another_pair(edge: Edge) -> None:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    text = '[chat]\nverifier = "nowhere:1"\npeer = ["nobody"]\nmax-tokens = 2\n'
    config_file().write_text(text, encoding="utf-8")
    done = edge("run", "edgellm-verifier", "Hello", "--json", "--no-history")
    assert len(ids(done)) == 2


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("Where is my mug?",), 1, "'Where is my mug?' is not a model. To ask the pair that is set up: edgellm chat"),
        (("--think", "off", "edgellm-draft"), 2, "Name the model first"),
        (("qwen3:4bb", "Hello"), 1, "Did you mean qwen3:4b?"),
        (("./none.gguf", "Hello"), 1, "There is no file ./none.gguf"),
        (("edgellm-draft", "Hello", "--budgt", "1"), 2, "No such option: --budgt"),
    ],
)
def test_what_cannot_be_run(edge: Edge, cache: Path, words: tuple[str, ...], code: int, text: str) -> None:
    done = edge("run", *words)
    assert done.code == code
    assert text in done.err
