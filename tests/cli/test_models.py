"""`catalog`, `pull`, `ls`, `show`, `rm`, `run` and `setup`, against a hub on loopback."""

import hashlib
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from edgellm import system
from edgellm.cli.commands import setup
from edgellm.engine import ModelFile
from edgellm.engine.hardware import ComputeDevice
from edgellm.rpc.protos.trust_pb2 import Offer
from edgellm.rpc.trust.trust import Right
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.pair_choice import ModelRoom
from edgellm.system import config_file
from testkit.gguf.split_file import split
from tests.cli.conftest import Edge, ids
from tests.conftest import Architectures, Heads
from tests.storage.hub import REPO, Hub, tiny_gguf

SHORT = ("--max-tokens", "4", "--json", "--no-history", "--retrieval", "off")


def test_pull_says_what_was_chosen_and_why(edge: Edge, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory, a card has its own, and what is part of the processor shares the machine's."""
    done = edge("pull", REPO).told("downloading tiny-Q4_K_M.gguf (200.1 kB; the default)")
    assert "three quarters" not in done.err
    edge("pull", REPO).told("is already on this machine")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(system, "total_memory", lambda: 100_000)
    devices = [ComputeDevice("Vulkan0", "", "igpu", 0, 10**9)]
    monkeypatch.setattr("edgellm.engine.hardware.compute_devices", lambda: devices)
    larger = "of weights are more than three quarters of this machine's memory of 100.0 kB"
    edge("pull", f"{REPO}:Q8_0").told(larger)
    devices.append(ComputeDevice("CUDA0", "", "gpu", 0, 10**6))
    assert larger not in edge("pull", f"{REPO}:Q8_0").err
    monkeypatch.setattr(sys, "platform", "darwin")
    edge("pull", f"{REPO}:Q8_0").told(larger)


def test_a_split_model_is_pulled_and_shown_like_a_whole(edge: Edge, hub: Hub, draft_path: Path, tmp_path: Path) -> None:
    paths = ModelFile.open(split(draft_path, tmp_path, 2)).paths
    hub.repos["ann/split-GGUF"] = {f"Q8_0/{path.name}": path.read_bytes() for path in paths}
    hub.renamed = {"ann/former-GGUF": "ann/split-GGUF"}
    edge("pull", "ann/former-GGUF").told(
        "ann/former-GGUF is called ann/split-GGUF now.",
        "downloading Q8_0/draft-00001-of-00002.gguf (1.4 MB in 2 files; the only model there)",
    )
    answer = edge("pull", "ann/split-GGUF", "--json").answer
    assert answer["files"] == [f"Q8_0/{path.name}" for path in paths]
    assert answer["size"] == answer["received"] == sum(path.stat().st_size for path in paths)
    whole, facts = edge("show", "edgellm-draft", "--json").answer, edge("show", str(paths[0]), "--json").answer
    parts = facts.pop("parts")
    assert [part["sha256"] for part in parts] == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert facts["size"] == sum(part["size"] for part in parts) == answer["size"]
    assert facts["sha256"] == fingerprint(paths[0])
    assert "parts" not in whole
    changed = ("path", "size", "sha256", "abilities")  # which models are drafts for it goes by their sizes
    assert {key: facts[key] for key in facts.keys() - changed} == {key: whole[key] for key in whole.keys() - changed}
    assert edge("show", str(paths[0])).out.count("-of-00002.gguf") == 3


def test_a_file_is_given_a_name_listed_used_and_forgotten(edge: Edge, hub: Hub, draft_path: Path) -> None:
    edge("add", str(draft_path), "mine").told("the file stays where it is")
    edge("ls").told("mine 1.4 MB added")
    assert ids(edge("run", "mine", "Hello", *SHORT)) == ids(edge("run", "edgellm-draft", "Hello", *SHORT))
    edge("rm", "mine", "--yes").told(f"its file stays: {draft_path}")


def test_show_tells_what_a_model_is_and_lets_it_command_no_terminal(edge: Edge, hub: Hub, draft_path: Path) -> None:
    edge("show", "edgellm-draft").told("llama", "%")
    facts = edge("show", str(draft_path), "--json").answer
    assert (facts["size"], facts["chat_template"]) == (draft_path.stat().st_size, True)
    assert (facts["layers"] >= 8, facts["vocabulary"] <= 4096, len(facts["sha256"])) == (True, True, 64)
    hub.repos[REPO]["tiny-Q4_K_M.gguf"] = hub.repos[REPO]["tiny-Q4_K_M.gguf"].replace(b"llama", b"\x1b[2Jm")
    edge("pull", REPO)
    assert "\x1b" not in edge("show", REPO).told().out


def test_models_are_listed_and_removed_where_somebody_says_so(edge: Edge, hub: Hub) -> None:
    edge("ls").told("edgellm setup")
    edge("pull", REPO)
    names = [line.split()[0] for line in edge("ls").out.splitlines()]
    assert [*names[:3], names[-1]] == ["NAME", "edgellm-draft", "edgellm-verifier", f"{REPO}:Q4_K_M"]
    rows = edge("ls", "--json").answer
    assert [row["origin"] for row in rows] == [*["bundled"] * (len(rows) - 1), "hub"]
    assert all(Path(row["path"]).stat().st_size == row["size"] for row in rows)
    edge("rm", REPO).told("Add --yes", code=2)
    edge("rm", REPO, "--yes").told(f"removed {REPO}:Q4_K_M (200.1 kB)")
    assert {row["origin"] for row in edge("ls", "--json").answer} == {"bundled"}


def test_the_catalogue_says_what_fits_and_what_is_here(edge: Edge, hub: Hub) -> None:
    hub.repos["Qwen/Qwen3-0.6B-GGUF"] = {"Qwen3-0.6B-Q8_0.gguf": tiny_gguf()}
    edge("pull", "Qwen3:0.6b").told("Qwen3-0.6B-Q8_0.gguf")
    rows = {row["name"]: row for row in edge("catalog", "--json").answer}
    assert (rows["qwen3:0.6b"]["here"], rows["qwen3:4b"]["here"]) == (True, False)
    assert rows["qwen3:4b"]["draft"] == "qwen3:0.6b"
    assert (rows["qwen3:0.6b"]["fits"], rows["qwen3:0.6b"]["runs_on"]) == (True, "the processor")
    lines = [line.split() for line in edge("catalog", "qwen3").told("edgellm pull NAME").out.splitlines()]
    assert lines[0][:3] == ["NAME", "SIZE", "CONTEXT"]
    assert {line[0].partition(":")[0] for line in lines[1:]} == {"qwen3"}
    listed = edge("ls", "--json").answer[-1]
    assert (listed["name"], listed["repository"]) == ("qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF")
    edge("rm", "qwen3:0.6b", "--yes").told("removed qwen3:0.6b")


# --- run ----------------------------------------------------------------------------------------------------------


def test_a_model_that_is_here_is_run_with_a_draft_model_or_alone(edge: Edge) -> None:
    """By the settings of chat, except those of another pair."""
    config_file().parent.mkdir(parents=True, exist_ok=True)
    text = '[chat]\nverifier = "nowhere:1"\npeer = ["nobody"]\nmax-tokens = 2\n'
    config_file().write_text(text, encoding="utf-8")
    assert len(ids(edge("run", "edgellm-verifier", "Hello", "--json", "--no-history"))) == 2
    alone = edge("run", "edgellm-verifier", "Hello", "--draft", "none", *SHORT)
    pair = edge("run", "edgellm-verifier", "Hello", *SHORT)
    assert ids(pair) == ids(alone)
    pair.told("edgellm-draft drafts for edgellm-verifier: it has its tokenizer and 21% of its size")
    assert "drafts for" not in alone.err
    writes_alone = "edgellm-draft writes without a draft model: no model here has its tokenizer"
    edge("run", "edgellm-draft", "Hello", *SHORT).told(writes_alone)


def test_a_model_is_named_in_one_way_everywhere(edge: Edge, draft_path: Path) -> None:
    wanted = ids(edge("run", "edgellm-draft", "Hello you", *SHORT))
    file = str(draft_path)
    assert ids(edge("run", "-m", "edgellm-draft", "Hello", "you", *SHORT)) == wanted
    assert ids(edge("chat", "-m", "edgellm-draft", "--draft", "none", "Hello you", *SHORT)) == wanted
    for name in (file, "edgellm-draft"):
        in_front = edge("chat", name, "Hello", "you", *SHORT).told(f"{name} is taken as the model, as with -m {name};")
        assert ids(in_front) == wanted
        assert ids(edge("chat", name, *SHORT, stdin=b"Hello you")) == wanted
    other = ids(edge("chat", file, "Hello", "--verifier", "edgellm-verifier", *SHORT))
    assert other == ids(edge("chat", f"{file} Hello", *SHORT)), "another one is named, so it is asked about"


def test_a_draft_model_that_is_bigger_and_a_temperature_that_is_high_are_told(edge: Edge) -> None:
    swapped = ("--draft", "edgellm-verifier", "--verifier", "edgellm-draft")
    said = edge("chat", "Hello", *swapped, *SHORT).told("The draft model edgellm-verifier is bigger than edgellm-draft")
    assert ids(said) == ids(edge("chat", "Hello", "--verifier", "edgellm-draft", "--draft", "none", *SHORT))
    hot = ("chat", "Hello", "--max-tokens", "2", "--temperature")
    edge(*hot, "5").told("A temperature of 5 makes unlikely words nearly as likely as others")
    assert "likely" not in edge(*hot, "1").told().err


def test_a_head_that_was_made_for_it_drafts(edge: Edge, hub: Hub, architectures: Architectures, heads: Heads) -> None:
    hub.repos["Foo/Foo-GGUF"] = {"Foo-F32.gguf": architectures("llama").read_bytes()}
    hub.repos["Foo/Foo-eagle3-GGUF"] = {"Foo-eagle3-F32.gguf": heads("llama", own=True).read_bytes()}
    for name in ("Foo/Foo-GGUF", "Foo/Foo-eagle3-GGUF"):
        edge("pull", name).told()
    head = "Foo/Foo-eagle3-GGUF:F32"
    edge("show", "Foo/Foo-GGUF").told(f"with the EAGLE-3 head {head}")
    edge("show", head).told("as the draft model of Foo/Foo-GGUF:F32")
    pair = edge("run", "Foo/Foo-GGUF", "Hello", *SHORT)
    pair.told(f"{head} drafts for Foo/Foo-GGUF: it is an EAGLE-3 head for it. Alone: --draft none")
    assert ids(pair) == ids(edge("run", "Foo/Foo-GGUF", "Hello", "--draft", "none", *SHORT))


def test_a_model_that_is_not_here_is_downloaded_if_somebody_says_so(
    edge: Edge, hub: Hub, draft_path: Path, verifier_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled pair, under the names of a real one."""
    hub.repos["Qwen/Qwen3-0.6B-GGUF"] = {"Qwen3-0.6B-Q8_0.gguf": draft_path.read_bytes()}
    hub.repos["Qwen/Qwen3-4B-GGUF"] = {"Qwen3-4B-Q4_K_M.gguf": verifier_path.read_bytes()}
    refused = edge("run", "qwen3:4b", "Hello", *SHORT)
    refused.told("edgellm pull qwen3:4b", "or add --yes to download it now", code=1)
    monkeypatch.setattr("edgellm.cli.views.console.is_terminal", lambda _: True)
    for answer, code in ((b"n\n", 1), (b"\n", 0)):
        assert hub.bytes_sent() == 0
        done = edge("run", "qwen3:0.6b", "Hello", *SHORT, stdin=answer)
        done.told("qwen3:0.6b is not here. Download Qwen3-0.6B-Q8_0.gguf (1.4 MB; asked for)?", code=code)
    monkeypatch.setattr("edgellm.llm.abilities.other_models", lambda _: {})
    done = edge("run", "qwen3:4b", "Hello", "--yes", *SHORT)
    assert ids(done) == ids(edge("chat", "Hello", "--draft", "none", "--verifier", "edgellm-verifier", *SHORT))
    done.told("downloading Qwen3-4B-Q4_K_M.gguf (6.8 MB; asked for)", "qwen3:0.6b would draft for it: edgellm pull")


# --- setup --------------------------------------------------------------------------------------------------------

DRAFT, VERIFIER = "unsloth/Qwen3.5-0.8B-GGUF", "unsloth/Qwen3.5-2B-GGUF"


@pytest.fixture
def smallest(hub: Hub, draft_path: Path, verifier_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The bundled pair under the names of the smallest one of the catalogue, and a machine that has room for that."""
    hub.repos[DRAFT] = {"Qwen3.5-0.8B-Q4_K_M.gguf": draft_path.read_bytes(), "mmproj-F16.gguf": b"x"}
    hub.repos[VERIFIER] = {"Qwen3.5-2B-Q4_K_M.gguf": verifier_path.read_bytes(), "Qwen3.5-2B-Q8_0.gguf": b"x"}
    room = ModelRoom(2 * 10**9, "three quarters of its memory, 2.0 GB", read_speed=20e9)
    monkeypatch.setattr(ModelRoom, "look", lambda **_: room)
    return hub


def settings() -> dict[str, Any]:
    return tomllib.loads(config_file().read_text(encoding="utf-8"))


def test_a_pair_is_proposed_downloaded_and_used_from_then_on(edge: Edge, smallest: Hub, verifier_path: Path) -> None:
    size = verifier_path.stat().st_size
    answer = edge("setup", "--dry-run", "--json").answer
    assert answer["verifier"] == {
        "name": "qwen3.5:2b", "size": size, "runs_on": "the processor", "file": "Qwen3.5-2B-Q4_K_M.gguf", "here": False,
    }  # fmt: skip
    assert answer["draft"]["name"] == "qwen3.5:0.8b"
    assert answer["download"] == answer["draft"]["size"] + size
    assert "1.3 GB of weights, and there is room for 2.0 GB" in answer["reasons"][0]
    done = edge("setup", "--dry-run").told("The verifier alone writes at most 16 tokens a second here")
    assert [line.split()[:2] for line in done.out.splitlines()][1:] == [["verifier", "qwen3.5:2b"], ["draft", "model"]]
    assert not config_file().exists()
    assert smallest.bytes_sent() == 0

    edge("setup", "--yes").told('edgellm chat "Why is the sky blue?"')
    pair = {"draft": "qwen3.5:0.8b", "verifier": "qwen3.5:2b"}
    assert settings() == {"chat": pair, "serve": pair, "profile": pair}
    bundled = edge("chat", "Hello", *SHORT, "--draft", "edgellm-draft", "--verifier", "edgellm-verifier")
    assert ids(edge("chat", "Hello", *SHORT)) == ids(bundled)
    smallest.sent.clear()
    again = edge("setup", "--yes", "--json").answer
    assert (again["download"], again["received"], again["verifier"]["here"]) == (0, 0, True)
    assert smallest.bytes_sent() == 0


def test_a_paired_devices_larger_verifier_is_used(edge: Edge, smallest: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = SimpleNamespace(name="desk")
    info = SimpleNamespace(peer=desk, rights=frozenset(Right), offers=[
        Offer(model="Qwen3.6-27B-Q4_K_M.gguf", size=16_817_244_384, vocabulary=bytes.fromhex("ab")),
        Offer(model="unknown.gguf", size=90 * 10**9, vocabulary=bytes.fromhex("ab")),
    ])  # fmt: skip
    monkeypatch.setattr("edgellm.rpc.discovery.peer_probe.probe_peers", lambda *_: [(desk, info)])
    monkeypatch.setattr("edgellm.rpc.trust.trust.Peers.all", lambda _: [desk])
    chosen = edge("setup", "--yes", "--json").answer
    assert (chosen["verifier"]["name"], chosen["verifier"]["runs_on"]) == ("auto", "desk")
    assert chosen["draft"]["name"] == "qwen3.5:0.8b"
    assert "desk reads your prompts" in chosen["expect"]
    assert settings()["chat"] == {"draft": "qwen3.5:0.8b", "verifier": "auto"}
    dry = ("setup", "--dry-run", "--json")
    assert edge(*dry, "--verifier", "qwen3.5:2b").answer["verifier"]["name"] == "qwen3.5:2b"
    info.rights = frozenset()
    assert edge(*dry).answer["verifier"]["name"] == "qwen3.5:2b"
    edge(*dry, "--verifier", "auto").told("No paired device serves a verifier", code=2)


def test_without_the_hub_a_dry_run_goes_by_the_catalogue_and_nothing_else_is_done(edge: Edge, smallest: Hub) -> None:
    smallest.status = 503
    done = edge("setup", "--dry-run", "--json").told("The size of qwen3.5:2b is that of the catalogue.")
    assert done.answer["download"] == 1_280_835_840 + 532_517_120
    edge("setup", "--yes").told(code=1)
    assert not config_file().exists()


def test_somebody_at_a_terminal_is_asked(edge: Edge, smallest: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ((), ("--json",)):
        edge("setup", *words).told("Add --yes, or --dry-run", code=2)
    monkeypatch.setattr(setup, "is_terminal", lambda _: True)
    edge("setup", stdin=b"n\n").told(code=1)
    assert not config_file().exists()
    edge("setup", stdin=b"\n").told("Download 8.2 MB, and use this pair from now on?", "edgellm service install")
    assert settings()["chat"]["verifier"] == "qwen3.5:2b"
