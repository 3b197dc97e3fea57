"""`edgellm catalog`, and short names on the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cli.conftest import Done
from tests.storage.hub import Hub, tiny_gguf

Edge = Callable[..., Done]


def test_the_catalogue_says_what_fits_and_what_is_here(edge: Edge, hub: Hub) -> None:
    hub.repos["Qwen/Qwen3-0.6B-GGUF"] = {"Qwen3-0.6B-Q8_0.gguf": tiny_gguf()}
    assert edge("pull", "qwen3:0.6b").code == 0
    rows = {row["name"]: row for row in edge("catalog", "--json").answer}
    assert rows["qwen3:0.6b"]["here"]
    assert not rows["qwen3:4b"]["here"]
    assert rows["qwen3:4b"]["draft"] == "qwen3:0.6b"
    assert rows["qwen3:0.6b"]["fits"]
    assert rows["qwen3:0.6b"]["runs_on"] == "the processor"
    done = edge("catalog", "qwen3")
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0][:3] == ["NAME", "SIZE", "CONTEXT"]
    assert {line[0].partition(":")[0] for line in lines[1:]} == {"qwen3"}
    assert "edgellm pull NAME" in done.err


def test_a_family_that_is_not_there(edge: Edge) -> None:
    done = edge("catalog", "quen")
    assert done.code == 2
    assert "It has smollm2, qwen3, qwen3.5" in done.err


def test_a_short_name_is_listed_shown_and_removed(edge: Edge, hub: Hub, draft_path: Path) -> None:
    hub.repos["Qwen/Qwen3-0.6B-GGUF"] = {"Qwen3-0.6B-Q8_0.gguf": draft_path.read_bytes()}
    assert "Qwen3-0.6B-Q8_0.gguf" in edge("pull", "Qwen3:0.6b").err
    assert [line.split() for line in edge("ls").out.splitlines()][-1] == [
        "qwen3:0.6b",
        "1.4",
        "MB",
        "Qwen/Qwen3-0.6B-GGUF",
    ]
    assert edge("ls", "--json").answer[-1]["repository"] == "Qwen/Qwen3-0.6B-GGUF"
    assert edge("show", "qwen3:0.6b", "--json").answer["size"] == draft_path.stat().st_size
    words = ("Hello", "--verifier", "none", "--max-tokens", "3", "--retrieval", "off", "--json", "--no-history")
    ids = [
        [line.get("id") for line in edge("chat", *words, "-m", name).lines] for name in ("qwen3:0.6b", "edgellm-draft")
    ]
    assert ids[0] == ids[1]
    assert "removed qwen3:0.6b" in edge("rm", "qwen3:0.6b", "--yes").err


def test_a_known_name_that_is_not_here_says_how_to_get_it_in_every_command(
    edge: Edge, cache: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("Where is my mug?", encoding="utf-8")
    for words in (
        ("chat", "Hello", "--verifier", "qwen3:8b"),
        ("serve", "--draft", "qwen3:8b"),
        ("serve", "--role", "verifier", "-m", "qwen3:8b"),
        ("profile", "--verifier", "qwen3:8b", "--prompts", str(tmp_path / "prompts")),
        ("mesh", "plan", "qwen3:8b"),
        ("show", "qwen3:8b"),
        ("rm", "qwen3:8b", "--yes"),
    ):
        done = edge(*words)
        assert done.code == 1, done.err
        assert "Fetch it with: edgellm pull qwen3:8b (5.0 GB, Qwen/Qwen3-8B-GGUF:Q4_K_M)" in done.err
    assert "Did you mean qwen3:8b?" in edge("chat", "Hello", "--verifier", "qwen3:8bb").err
