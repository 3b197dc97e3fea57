"""`edgellm pair` and `peers`: two users, each with a home of their own, on one machine; what they then serve each other
over mutual TLS; and `edgellm doctor`."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from edgellm.cli.commands import peers as command
from edgellm.rpc.trust.trust import Peers, Trust
from tests.cli.conftest import Edge
from tests.cli.serving import ROOT, Served
from tests.rpc.strangers import befriend

Shown: TypeAlias = tuple[subprocess.Popen[str], dict[str, Any]]
"""Another user's process with a code on its screen, and what it says."""
BRIEF = ("Hello", "--max-tokens", "4", "--retrieval", "off")


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[Shown]:
    words = ("pair", "--json", "--name", "desk", "--port", "0", "--grant", "verify,files")
    process = subprocess.Popen(
        [sys.executable, "-m", "edgellm", *words], cwd=ROOT, env=os.environ | {"EDGELLM_HOME": str(tmp_path / "desk")},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("address", [True, False])
def test_two_users_pair_with_and_without_an_address(edge: Edge, shown: Shown, tmp_path: Path, address: bool) -> None:
    process, said = shown
    assert said["grants"] == ["files", "verify"]
    assert said["addresses"][0].startswith("127.0.0.1:")
    words = (said["addresses"][0], said["code"]) if address else (said["code"].replace("-", " ").upper(),)
    edge("pair", *words, "--name", "phone", "--grant", "none").told(
        "paired with desk", "rights of desk here: nothing", "desk then reads the prompts and replies of this device",
        "this device then knows which models desk has",
    )  # fmt: skip
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    there, here = json.loads(out), Peers().all()[0]
    assert (there["name"], there["may_here"], there["may_there"]) == ("phone", ["files", "verify"], [])
    assert (here.name, sorted(here.rights), sorted(here.granted)) == ("desk", [], ["files", "verify"])
    assert there["short"] == Trust.load().identity.id.short
    assert here.id == Trust.load(tmp_path / "desk" / "data" / "trust").identity.id


def test_a_wrong_code_ends_both_sides_with_an_error(edge: Edge, shown: Shown) -> None:
    process, said = shown
    wrong = "7-lamp-otter" if said["code"] != "7-lamp-otter" else "7-lamp-owl"
    assert edge("pair", said["addresses"][0], wrong).told("The code is wrong", code=1).err.count("\n") == 1
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "The code is wrong" in err
    assert "Traceback" not in err
    assert Peers().all() == []


def test_a_code_that_nobody_shows_is_said(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SEARCH_SECONDS", 1.0)
    done = edge("pair", "7-lamp-otter").told("edgellm pair HOST:PORT 7-lamp-otter", code=1)
    assert "1 s at most" in done.err


def test_who_has_paired_nobody_is_told_to(edge: Edge) -> None:
    for words in (
        ("chat", "--verifier", "10.1.2.3:50151", *BRIEF),
        ("serve", "--role", "verifier", "--no-http", "--host", "0.0.0.0"),
        ("serve", "--role", "verifier", "--no-http", "--host", "192.168.1.2"),
    ):
        assert edge(*words).told("air the devices first", code=1).err.count("\n") == 1


def test_a_list_is_shown_changed_and_left_if_damaged(edge: Edge, phone: Trust, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.rpc.discovery.peer_probe.MAX_BROWSE_SECONDS", 0.0)
    words = ("phone", phone.identity.id.short, "files, verify", "just now", "No address of phone is known")
    edge("peers").told(*words)
    row = edge("peers", "--json", "--no-ask").answer[0]
    assert (row["name"], row["short"], row["there"]) == ("phone", phone.identity.id.short, False)
    assert (row["may_here"], row["may_there"], row["round_trip_ms"]) == (["files", "verify"], [], None)
    assert edge("peers", "revoke", "phone", "verify", "--json").answer["may_here"] == ["files"]
    granted = edge("peers", "grant", phone.identity.id.short, "all", "--json").answer["may_here"]
    assert granted == ["compute", "files", "verify"]
    edge("peers", "rename", "phone", "tablet").told("is now called tablet here")
    kept = Peers().path.read_bytes()
    Peers().path.write_text("nonsense")
    for more in ((), ("rm", "tablet")):
        edge("peers", *more).told("is damaged", code=1)
    assert Peers().path.read_text() == "nonsense"
    Peers().path.write_bytes(kept)
    edge("peers", "rm", "tablet").told("is unpaired")
    assert Peers().all() == []


def test_a_phone_is_listed_renamed_and_removed_and_has_no_rights(edge: Edge, phone: Trust) -> None:
    one, _ = Peers().add_phone("iPhone")
    edge("peers", "--no-ask").told("iPhone", one.id.short, "page")
    rows = {row["name"]: row for row in edge("peers", "--json", "--no-ask").answer}
    assert (rows["iPhone"]["kind"], rows["iPhone"]["may_here"], rows["phone"]["kind"]) == ("phone", ["page"], "device")
    for words in (("grant", "iPhone", "verify"), ("wake", "iPhone"), ("wake", "iPhone", "off")):
        edge("peers", *words).told("iPhone is a phone", code=2)
    edge("chat", "--peer", "iPhone", *BRIEF).told("No paired device is called 'iPhone'", code=1)
    edge("peers", "rename", "iPhone", "Phone").told("Another device is called", code=2)
    assert edge("peers", "rename", "iPhone", "Anna's", "--json").answer["may_here"] == ["page"]
    edge("peers", "rm", one.id.short).told("Anna's", "is unpaired")
    assert Peers().with_phones() == Peers().all() != []


# --- services over mutual TLS -------------------------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server of another user, who has paired with this one."""
    home = tmp_path / "desk"
    befriend(Trust.load(), Trust.load(home / "data" / "trust"))
    with monkeypatch.context() as there:
        there.setenv("EDGELLM_HOME", str(home))
        one = Served("--paired-only")
    yield one
    one.close()


def test_a_paired_device_is_asked_by_mutual_tls_and_no_stranger(edge: Edge, served: Served) -> None:
    # it was never met there, so it is asked in plain text, as on any machine of one's own
    edge("chat", "--verifier", served.address, *BRIEF).told("No answer from", code=1)
    edge("chat", "--peer", served.address, *BRIEF).told(f"at {served.address} verifies")
    served.wait_for("Session 1 from")
    edge("chat", "--verifier", served.address, *BRIEF).told()  # by now it is known there
    served.wait_for("Session 2 from")
    edge("chat", "--verifier", "auto", *BRIEF).told(f"at {served.address} verifies")
    assert edge("peers", "--json").answer[0]["offers"][0]["model"]
    done = edge("chat", "--peer", "attic", *BRIEF)
    assert (done.code, "No paired device is called 'attic'" in done.err) == (1, True)
    Trust.load().peers.remove(Trust.load().peers.find("other").id)
    edge("chat", "--verifier", "auto", *BRIEF).told("run `edgellm pair`", code=1)
    edge("chat", "--peer", served.address, *BRIEF).told("run `edgellm pair`", f"--verifier {served.address}", code=1)


def test_with_paired_only_http_asks_for_the_key_on_loopback_too(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "desk" / "data" / "http" / "api-key"
    served.wait_for(f"HTTP clients need the API key in {re.escape(str(file))}")
    url = served.wait_for(r"OpenAI's API: (http://127\.0\.0\.1:\d+)/v1")
    with pytest.raises(HTTPError, match="401") as refused:
        urlopen(f"{url}/v1/models", timeout=60)
    refused.value.close()
    with urlopen(Request(f"{url}/status", headers={"Authorization": f"Bearer {file.read_text().strip()}"})) as answer:
        (device,) = json.loads(answer.read())["devices"]
    assert device["short"] == Trust.load().identity.id.short


def test_doctor_prints_what_it_finds_and_what_to_do(edge: Edge) -> None:
    edge("doctor").told("No problems found.", "127.0.0.1) is used", "→ Pair a device: edgellm pair")
    broken = edge("doctor", "--json", "--draft", "nothing.gguf", "--peer", "127.0.0.1:1").told(code=1)
    assert {one["topic"] for one in broken.answer if one["state"] == "problem"} == {"vocabulary", "peers"}
    assert all(one["next_step"] for one in broken.answer if one["state"] == "problem")
