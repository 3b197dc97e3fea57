"""`pull`, `ls`, `show` and `rm`, against a hub on loopback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgellm import system
from edgellm.engine import ModelFile
from edgellm.engine.hardware import ComputeDevice
from testkit.gguf.split_file import split
from tests.cli.conftest import Done
from tests.storage.hub import REPO, Hub

Edge = Callable[..., Done]


def test_pull_says_what_was_chosen_and_why(edge: Edge, hub: Hub) -> None:
    done = edge("pull", REPO)
    assert done.code == 0
    assert "downloading tiny-Q4_K_M.gguf (200.1 kB; the default)" in done.err
    again = edge("pull", REPO)
    assert again.code == 0
    assert "is already on this machine" in again.err


def test_pull_of_a_split_model(edge: Edge, hub: Hub, draft_path: Path, tmp_path: Path) -> None:
    paths = ModelFile.open(split(draft_path, tmp_path, 2)).paths
    hub.repos["ann/split-GGUF"] = {f"Q8_0/{path.name}": path.read_bytes() for path in paths}
    hub.renamed = {"ann/former-GGUF": "ann/split-GGUF"}
    done = edge("pull", "ann/former-GGUF")
    assert done.code == 0
    assert "ann/former-GGUF is called ann/split-GGUF now." in done.err
    assert "downloading Q8_0/draft-00001-of-00002.gguf (1.4 MB in 2 files; the only model there)" in done.err
    answer = edge("pull", "ann/split-GGUF", "--json").answer
    assert answer["files"] == [f"Q8_0/{path.name}" for path in paths]
    assert answer["size"] == answer["received"] == sum(path.stat().st_size for path in paths)
    rows = edge("ls", "--json").answer
    assert [row["name"] for row in rows[-2:]] == ["ann/former-GGUF:Q8_0", "ann/split-GGUF:Q8_0"]
    assert edge("show", "ann/split-GGUF", "--json").answer["size"] == answer["size"]
    words = ("Hello", "--draft", "none", "--max-tokens", "3", "--retrieval", "off", "--json", "--no-history")
    replies = [edge("chat", *words, "--verifier", name).lines for name in ("ann/split-GGUF", "edgellm-draft")]
    split_up, whole = ([line.get("id") for line in lines] for lines in replies)
    assert split_up == whole
    assert edge("rm", "ann/split-GGUF", "--yes").code == 0
    assert [row["name"] for row in edge("ls", "--json").answer][-1:] == ["ann/former-GGUF:Q8_0"]


def test_pull_warns_of_a_model_that_is_too_large(edge: Edge, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "total_memory", lambda: 300_000)
    done = edge("pull", REPO)
    assert "downloading tiny-Q4_K_M.gguf" in done.err
    assert "three quarters" not in done.err
    done = edge("pull", f"{REPO}:Q8_0")
    assert "0.0 GB of weights are more than three quarters of this machine's memory of 0.0 GB" in done.err
    assert done.code == 0


def test_the_memory_of_graphics_cards_counts(edge: Edge, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card has its own, and what is part of the processor shares the machine's."""
    monkeypatch.setattr(system, "total_memory", lambda: 100_000)
    monkeypatch.setattr(sys, "platform", "linux")
    devices = [ComputeDevice("Vulkan0", "", "igpu", 0, 10**9)]
    monkeypatch.setattr("edgellm.engine.hardware.compute_devices", lambda: devices)
    assert "three quarters" in edge("pull", f"{REPO}:Q8_0").err
    devices.append(ComputeDevice("CUDA0", "", "gpu", 0, 10**6))
    assert "three quarters" not in edge("pull", f"{REPO}:Q8_0").err
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "three quarters" in edge("pull", f"{REPO}:Q8_0").err


def test_ls_lists_the_pair_and_what_was_pulled(edge: Edge, hub: Hub) -> None:
    assert "edgellm setup" in edge("ls").err
    edge("pull", REPO)
    done = edge("ls")
    names = [line.split()[0] for line in done.out.splitlines()]
    assert [*names[:3], names[-1]] == ["NAME", "edgellm-draft", "edgellm-verifier", f"{REPO}:Q4_K_M"]
    rows = edge("ls", "--json").answer
    assert [row["origin"] for row in rows] == [*["bundled"] * (len(rows) - 1), "hub"]
    assert all(Path(row["path"]).stat().st_size == row["size"] for row in rows)


def test_show_tells_what_a_model_is(edge: Edge, draft_path: Path) -> None:
    done = edge("show", "edgellm-draft")
    assert done.code == 0
    assert "llama" in done.out
    assert "% F32" in done.out or "% Q" in done.out
    facts = edge("show", str(draft_path), "--json").answer
    assert facts["size"] == draft_path.stat().st_size
    assert facts["layers"] >= 8
    assert facts["vocabulary"] <= 4096
    assert facts["chat_template"] is True
    assert len(facts["sha256"]) == 64


def test_names_from_a_file_cannot_command_the_terminal(edge: Edge, hub: Hub) -> None:
    data = hub.repos[REPO]["tiny-Q4_K_M.gguf"].replace(b"llama", b"\x1b[2Jm")
    hub.repos[REPO]["tiny-Q4_K_M.gguf"] = data
    edge("pull", REPO)
    done = edge("show", REPO)
    assert done.code == 0
    assert "\x1b" not in done.out


def test_rm_asks_where_it_can_and_wants_yes_where_it_cannot(edge: Edge, hub: Hub) -> None:
    edge("pull", REPO)
    refused = edge("rm", REPO)
    assert refused.code == 2
    assert "Add --yes" in refused.err
    done = edge("rm", REPO, "--yes")
    assert done.code == 0
    assert f"removed {REPO}:Q4_K_M (200.1 kB)" in done.err
    assert {row["origin"] for row in edge("ls", "--json").answer} == {"bundled"}
