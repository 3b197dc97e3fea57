"""`edgellm setup`, against a hub on loopback that serves the bundled pair under real names."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm.cli.commands import setup as command
from edgellm.rpc.trust.handshake import OfferedModel
from edgellm.rpc.trust.rights import Right
from edgellm.storage.pair_choice import ModelRoom
from edgellm.system import config_file
from testkit.gguf.random_model import SHAPES, write
from tests.cli.conftest import Done
from tests.storage.hub import Hub

Edge = Callable[..., Done]
DRAFT, VERIFIER = "unsloth/Qwen3.5-0.8B-GGUF", "unsloth/Qwen3.5-2B-GGUF"
SHORT = ("--max-tokens", "4", "--json", "--no-history", "--retrieval", "off")


@pytest.fixture
def models(hub: Hub, draft_path: Path, verifier_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The bundled pair under the names of the smallest one of the catalogue, and a machine that has room for that."""
    hub.repos[DRAFT] = {"Qwen3.5-0.8B-Q4_K_M.gguf": draft_path.read_bytes(), "mmproj-F16.gguf": b"x"}
    hub.repos[VERIFIER] = {"Qwen3.5-2B-Q4_K_M.gguf": verifier_path.read_bytes(), "Qwen3.5-2B-Q8_0.gguf": b"x"}
    room = ModelRoom(2 * 10**9, "three quarters of its memory, 2.0 GB", read_speed=20e9)
    monkeypatch.setattr(ModelRoom, "look", lambda **_: room)
    return hub


def paired(monkeypatch: pytest.MonkeyPatch, *offers: OfferedModel, rights: frozenset[Right] = frozenset(Right)) -> None:
    """Have a paired device, desk, offer these models."""
    answer = SimpleNamespace(
        peer=SimpleNamespace(name="desk"), info=SimpleNamespace(offers=offers, rights=rights), error=None
    )
    monkeypatch.setattr("edgellm.rpc.discovery.peer_probe.probe_peers", lambda *_: [answer])
    monkeypatch.setattr("edgellm.rpc.trust.peer_store.Peers.all", lambda _: [answer.peer])


def settings() -> dict[str, Any]:
    return tomllib.loads(config_file().read_text(encoding="utf-8"))


def test_a_dry_run_says_what_would_be_done_and_why(edge: Edge, models: Hub, verifier_path: Path) -> None:
    answer = edge("setup", "--dry-run", "--json").answer
    size = verifier_path.stat().st_size
    expected = {
        "name": "qwen3.5:2b",
        "size": size,
        "runs_on": "the processor",
        "file": "Qwen3.5-2B-Q4_K_M.gguf",
        "here": False,
    }
    assert answer["verifier"] == expected
    assert answer["draft"]["name"] == "qwen3.5:0.8b"
    assert answer["download"] == answer["draft"]["size"] + size
    assert "1.3 GB of weights, and there is room for 2.0 GB" in answer["reasons"][0]
    done = edge("setup", "--dry-run")
    assert [line.split()[:2] for line in done.out.splitlines()][1:] == [["verifier", "qwen3.5:2b"], ["draft", "model"]]
    assert "The verifier alone writes at most 16 tokens a second here" in done.err
    assert not config_file().exists()
    assert models.bytes_sent() == 0


def test_a_pair_is_downloaded_and_used_from_then_on(edge: Edge, models: Hub) -> None:
    done = edge("setup", "--yes")
    assert done.code == 0, done.err
    pair = {"draft": "qwen3.5:0.8b", "verifier": "qwen3.5:2b"}
    assert settings() == {"chat": pair, "serve": pair, "profile": pair}
    assert 'edgellm chat "Why is the sky blue?"' in done.err
    chat = edge("chat", "Hello", *SHORT)
    assert chat.code == 0, chat.err
    bundled = edge("chat", "Hello", *SHORT, "--draft", "edgellm-draft", "--verifier", "edgellm-verifier")
    ids = [[line.get("id") for line in found.lines] for found in (chat, bundled)]
    assert ids[0] == ids[1]
    models.sent.clear()
    again = edge("setup", "--yes", "--json").answer
    assert (again["download"], again["received"], again["verifier"]["here"]) == (0, 0, True)
    assert models.bytes_sent() == 0


def test_a_draft_model_with_another_tokenizer_is_left_out(edge: Edge, models: Hub, tmp_path: Path) -> None:
    write(tmp_path / "other.gguf", SHAPES["tiny-draft"], "Q8_0")
    models.repos[DRAFT]["Qwen3.5-0.8B-Q4_K_M.gguf"] = (tmp_path / "other.gguf").read_bytes()
    done = edge("setup", "--yes")
    assert done.code == 0, done.err
    assert "qwen3.5:0.8b has another tokenizer than qwen3.5:2b, which writes alone." in done.err
    assert settings()["chat"] == {"draft": "none", "verifier": "qwen3.5:2b"}


def test_the_larger_verifier_of_a_paired_device_is_used(
    edge: Edge, models: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    paired(
        monkeypatch,
        OfferedModel("verifier", "Qwen3.6-27B-Q4_K_M.gguf", 16_817_244_384, "ab"),
        OfferedModel("verifier", "unknown.gguf", 90 * 10**9, "ab"),
        OfferedModel("worker", "Qwen3-32B-Q4_K_M.gguf", 20 * 10**9, "ab"),
    )
    answer = edge("setup", "--yes", "--json").answer
    assert (answer["verifier"]["name"], answer["verifier"]["runs_on"]) == ("auto", "desk")
    assert answer["draft"]["name"] == "qwen3.5:0.8b"
    assert "desk reads your prompts" in answer["expect"]
    assert settings()["chat"] == {"draft": "qwen3.5:0.8b", "verifier": "auto"}
    assert edge("setup", "--dry-run", "--json", "--verifier", "qwen3.5:2b").answer["verifier"]["name"] == "qwen3.5:2b"
    paired(monkeypatch, OfferedModel("verifier", "Qwen3.6-27B-Q4_K_M.gguf", 1, "ab"), rights=frozenset())
    assert edge("setup", "--dry-run", "--json").answer["verifier"]["name"] == "qwen3.5:2b"
    done = edge("setup", "--dry-run", "--verifier", "auto")
    assert done.code == 2
    assert "No paired device serves a verifier" in done.err


def test_without_the_hub_a_dry_run_goes_by_the_catalogue_and_nothing_else_is_done(edge: Edge, models: Hub) -> None:
    models.status = 503
    done = edge("setup", "--dry-run", "--json")
    assert done.answer["download"] == 1_280_835_840 + 532_517_120
    assert "The size of qwen3.5:2b is that of the catalogue." in done.err
    done = edge("setup", "--yes")
    assert done.code == 1
    assert not config_file().exists()


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_where_nobody_can_be_asked_a_flag_is_needed(edge: Edge, models: Hub, words: tuple[str, ...]) -> None:
    done = edge("setup", *words)
    assert done.code == 2
    assert "Add --yes, or --dry-run" in done.err


def test_somebody_at_a_terminal_is_asked(edge: Edge, models: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "is_terminal", lambda _: True)
    called: list[tuple[str, ...]] = []
    monkeypatch.setattr(command, "_call", lambda _, *words: called.append(words))
    assert edge("setup", stdin=b"n\n").code == 1
    assert not config_file().exists()
    done = edge("setup", stdin=b"\n\n\n")
    assert done.code == 0
    assert "Download 8.2 MB, and use this pair from now on?" in done.err
    assert settings()["chat"]["verifier"] == "qwen3.5:2b"
    assert called == []
    assert edge("setup", stdin=b"\ny\ny\n").code == 0
    assert called == [("service", "install"), ("pair",)]
