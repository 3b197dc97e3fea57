"""Clients that show no key learn nothing about other devices."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path

import pytest

from edgellm.errors import VerifierLost
from edgellm.http.middleware import redact
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.rpc.trust.trust import Peer, Trust
from edgellm.spec.stream import Reply
from edgellm.spec.types import Notice
from tests.http.conftest import HOME, asker, conversation, serving
from tests.http.test_page import PLAN
from tests.rpc.strangers import befriend

KEY = "k" * 43
PATHS = ("/", "/health", "/status", "/metrics", "/v1/models", "/openapi.json", "/page/chat.js", "/nothing")


@pytest.fixture
def peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Peer:
    """A paired device of this user, last seen at two addresses."""
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "own"))
    here, there = Trust.load(), Trust.load(tmp_path / "there")
    befriend(here, there)
    peer = here.peers.rename(there.identity.id, "Grandma's attic")
    for address in ("192.168.7.21:50151", "[fd00::7]:50151"):
        here.peers.record_seen(peer.id, Address.parse(address))
    return here.peers.all()[0]


@pytest.fixture
def talkative(own: LLM, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """A pair whose replies name the device in a notice, or in an error."""
    said = f"{peer.name} ({peer.id.short}) at {peer.addresses[0]} is gone, so is [fe80::1%eth0]:7 and 10.0.0.9."

    def reply(*_words: object, **_options: object) -> Reply:
        def events() -> Generator[Notice, None, None]:
            yield Notice(said)
            raise VerifierLost(said, "Try again.")

        return Reply(lambda *_: events(), prompt_tokens=1, seed=0)

    monkeypatch.setattr(own, "reply", reply)
    return own


def secrets(peer: Peer) -> list[str]:
    return [peer.name, str(peer.id), peer.id.short, "192.168.7.21", "fd00::7", "fe80::1", "10.0.0.9"]


def test_without_a_key_no_path_names_a_device(talkative: LLM, peer: Peer) -> None:
    with serving(talkative, "edgellm-verifier") as server:
        ask = asker(server)
        answers = "".join(ask("GET", path).body.decode() for path in PATHS)
        for stream in (False, True):
            answers += ask("POST", "/v1/chat/completions", conversation(stream=stream)).body.decode()
        answers += ask("GET", "/health", headers={"Host": "evil.example"}).body.decode()
        assert "device 1" in answers
        assert not [secret for secret in secrets(peer) if secret.casefold() in answers.casefold()]
        assert ask("GET", "/status").json["devices"] == []


@pytest.mark.parametrize("key", ["key", "page_key"])
def test_with_a_key_they_are_named(talkative: LLM, peer: Peer, key: str) -> None:
    with serving(talkative, "edgellm-verifier", **{key: KEY}) as server:
        ask, headers = asker(server), {"Authorization": f"Bearer {KEY}"}
        (device,) = ask("GET", "/status", headers=headers).json["devices"]
        assert (device["name"], device["short"]) == (peer.name, peer.id.short)
        message = ask("POST", "/v1/chat/completions", conversation(), headers).error["message"]
        assert peer.name in message
        assert "10.0.0.9" in message


def test_a_status_may_become_longer_than_a_plan_may_be(own: LLM, peer: Peer) -> None:
    Trust.load().peers.rename(peer.id, "x")
    with HttpServer(HOME) as server:
        server.open(ServedModel(own, "edgellm-verifier"), PLAN.model_copy(update={"advice": "x " * 1000}))
        assert asker(server)("GET", "/status").json["plan"]["advice"] == "device 1 " * 1000


def test_words_are_replaced_whole_and_this_machine_is_no_secret(peer: Peer) -> None:
    assert redact("127.0.0.1:8080, [::1]:7 and layers 1.2.3 of v1.2.3.4.5", [peer]) == (
        "127.0.0.1:8080, [::1]:7 and layers 1.2.3 of v1.2.3.4.5"
    )
    assert redact("GRANDMA'S ATTIC, not Grandma's attics", [peer]) == "device 1, not Grandma's attics"
    assert json.loads(redact(json.dumps({"at": "http://[fd00::7]:50151/x"}), [peer])) == {"at": "http://device 1/x"}
