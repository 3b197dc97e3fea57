"""`edgellm serve` and `edgellm chat` over mutual TLS, and `edgellm doctor`, as a user has them on one machine."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

from edgellm.rpc.address import Address
from edgellm.rpc.discovery.peer_probe import probe_address
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from tests.cli.conftest import Done
from tests.cli.test_serve_command import Served
from tests.rpc.strangers import befriend

Edge = Callable[..., Done]
BRIEF = ("Hello", "--max-tokens", "4", "--retrieval", "off")


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves this machine."""
    monkeypatch.setenv("EDGELLM_INTERFACE", "127.0.0.1")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A verifier of another user, who has paired with this one."""
    here, there = Trust.load(), Trust.load(tmp_path / "desk" / "data" / "trust")
    befriend(here, there)
    home = os.environ["EDGELLM_HOME"]
    os.environ["EDGELLM_HOME"] = str(tmp_path / "desk")
    try:
        one = Served("--paired-only")
    finally:
        os.environ["EDGELLM_HOME"] = home
    yield one
    one.close()


def test_a_paired_device_is_asked_by_mutual_tls(edge: Edge, served: Served) -> None:
    plain = edge("chat", "--verifier", served.address, *BRIEF)
    assert plain.code == 1  # it was never met there, so it is asked in plain text, as on any machine of one's own
    assert "No answer from" in plain.err
    done = edge("chat", "--peer", served.address, *BRIEF)
    assert done.code == 0, done.err
    assert f"at {served.address} verifies" in done.err
    served.wait_for("Session 1 from")
    assert edge("chat", "--verifier", served.address, *BRIEF).code == 0  # by now it is known there
    served.wait_for("Session 2 from")
    auto = edge("chat", "--verifier", "auto", *BRIEF)
    assert f"at {served.address} verifies" in auto.err
    assert edge("peers", "--json").answer[0]["offers"][0]["role"] == "verifier"
    done = edge("chat", "--peer", "attic", *BRIEF)
    assert (done.code, "No paired device is called 'attic'" in done.err) == (1, True)


def test_who_is_not_paired_is_told_what_to_do(edge: Edge, served: Served) -> None:
    Trust.load().peers.remove(Trust.load().peers.find("other").id)
    for words in (("--verifier", "auto"), ("--peer", served.address)):
        done = edge("chat", *words, *BRIEF)
        assert done.code == 1
        assert "run `edgellm pair`" in done.err


def test_doctor_prints_what_it_finds_and_what_to_do(edge: Edge) -> None:
    done = edge("doctor")
    assert done.code == 0, done.out
    assert "No problems found." in done.err
    assert "127.0.0.1) is used" in done.out
    assert "→ Pair a device: edgellm pair" in done.out
    broken = edge("doctor", "--json", "--draft", "nothing.gguf", "--peer", "127.0.0.1:1")
    assert broken.code == 1
    assert {one["topic"] for one in broken.answer if one["state"] == "problem"} == {"vocabulary", "peers"}
    assert all(one["next_step"] for one in broken.answer if one["state"] == "problem")


def test_layers_are_computed_by_a_paired_device_that_is_named(
    edge: Edge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = Trust.load(), Trust.load(tmp_path / "desk" / "data" / "trust")
    befriend(here, there)
    with monkeypatch.context() as patch:
        patch.setenv("EDGELLM_HOME", str(tmp_path / "desk"))
        served = Served("--role", "worker", "-m", "edgellm-verifier", "--paired-only")
    split = ("--split", "here:1-6,other:7-12")
    words = ("mesh", "run", "edgellm-verifier", "Where is my mug?", *split, "--max-tokens", "4")
    try:
        probe_address(here, Address.parse(served.address))  # from now on it is known where it is
        there.peers.revoke(here.identity.id, [Right.COMPUTE])
        probe_address(here, Address.parse(served.address))
        refused = edge(*words)
        assert (refused.code, refused.out) == (1, "")
        assert "does not allow this device to have layers computed" in refused.err
        there.peers.grant(here.identity.id, [Right.COMPUTE])
        done = edge(*words)
        assert done.code == 0, done.err
        assert any(line.startswith("other") and " 7-12 " in line for line in done.err.splitlines())
        served.wait_for("Loading layers 7-12")
        assert "A device was lost" not in done.err
    finally:
        served.close()


def test_with_paired_only_http_asks_for_the_key_on_loopback_too(served: Served, tmp_path: Path) -> None:
    file = tmp_path / "desk" / "data" / "http" / "api-key"
    served.wait_for(f"HTTP clients need the API key in {re.escape(str(file))}")
    url = served.wait_for(r"OpenAI's API: (http://127\.0\.0\.1:\d+)/v1")
    for path in ("/status", "/metrics", "/v1/models", "/openapi.json", "/v1/models/x"):
        with pytest.raises(HTTPError) as refused:
            urlopen(url + path, timeout=60)
        with refused.value:
            assert refused.value.code == 401
    with urlopen(Request(f"{url}/status", headers={"Authorization": f"Bearer {file.read_text().strip()}"})) as answer:
        (device,) = json.loads(answer.read())["devices"]
    assert device["short"] == Trust.load().identity.id.short
