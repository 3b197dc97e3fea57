"""Models of paired devices behind the server of this one: named like those here, and opened when they are named."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from edgellm.engine import Model, memory_fit
from edgellm.engine.hardware import Hardware
from edgellm.errors import EdgeError, ModelNotFound, TrustUnusable, VerifierUnreachable
from edgellm.http import catalogs
from edgellm.http.catalogs import ModelDefaults, ModelOpener, NamedModels, PairedOpener, probe, verifying
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.rpc.address import Address
from edgellm.rpc.discovery.peer_probe import ProbeResult
from edgellm.rpc.protos.trust_pb2 import Offer
from edgellm.rpc.trust.trust import Trust
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.params import ReplyOptions
from edgellm.storage.model_files import name_of
from testkit import retokenized
from tests.http.conftest import HOME, QUESTION, Ask, asker, configured, conversation, written
from tests.http.test_page import context, page, talk
from tests.rpc.strangers import befriend, device
from tests.waiting import until

__all__ = ["context", "page"]

KEY = "k" * 43
EVENTS: list[str] = []
SILENT = VerifierUnreachable("No answer.", "Wait.")


@contextmanager
def paired(folder: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifierServer]:
    """A paired device that verifies with a model that is not here, and lets this one use it."""
    monkeypatch.setenv("EDGELLM_HOME", str(folder / "here"))
    here, there = Trust.load(), device(folder / "there")
    befriend(there, here, name="desk")
    place = Address("127.0.0.1", 0)
    with (
        Model.load(path) as model,
        VerifierServer(model, place, sessions=2, context=512, threads=1, trust=there) as server,
    ):
        here.peers.record_seen(there.identity.id, server.address)
        EVENTS.clear()
        yield server


HERE = Hardware(n_ctx=512, threads=1)
DEFAULTS = ModelDefaults(HERE, HERE, ReplyOptions(), EVENTS.append)


@pytest.fixture
def desk(tmp_path: Path, f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[VerifierServer]:
    with paired(tmp_path, f32_pair[1], monkeypatch) as server:
        yield server


@pytest.fixture
def models(desk: VerifierServer) -> NamedModels:
    """The models that requests may name, once the desk has answered."""
    found = NamedModels(DEFAULTS)
    found.find(name_of(desk.model.path))
    return found


@pytest.fixture
def server(models: NamedModels, own: LLM) -> Iterator[HttpServer]:
    with configured(key=KEY) as opened:
        opened.open(ServedModel(own, "edgellm-verifier"), catalog=models)
        yield opened


@pytest.fixture
def ask(server: HttpServer) -> Ask:
    asked = asker(server)
    return lambda *words: asked(*words, *[None] * (3 - len(words)), {"Authorization": f"Bearer {KEY}"})


def test_a_model_on_a_paired_device_is_named_like_those_here(ask: Ask, own: LLM, desk: VerifierServer) -> None:
    name = name_of(desk.model.path)
    listed = {model["id"]: model["device"] for model in ask("GET", "/v1/models").json["data"]}
    assert listed == {"edgellm-draft": None, "edgellm-verifier": None, "smollm2:draft": None, name: "desk"}
    answer = ask("POST", "/v1/chat/completions", conversation(model=name, max_tokens=12))
    assert answer.status == 200, answer.json
    assert answer.json["choices"][0]["message"]["content"] == written(own, max_tokens=12)
    assert [f"{name} is open on desk with the draft model edgellm-draft here."] == EVENTS
    own_state = next(one for one in ask("GET", "/status").json["models"] if one["name"] == name)
    assert (own_state["link"]["address"], own_state["link"]["up"]) == (str(desk.address), True)
    assert ask("POST", "/models/unload", {"model": name}).status == 200


def test_who_has_no_key_is_not_told_of_devices(models: NamedModels, own: LLM) -> None:
    with HttpServer(HOME) as opened:
        opened.open(ServedModel(own, "edgellm-verifier"), catalog=models)
        answer = asker(opened)("GET", "/v1/models")
    assert all(model["device"] is None for model in answer.json["data"])
    assert b"desk" not in answer.body


def test_the_nearest_device_has_what_fits_not_here(desk: VerifierServer, monkeypatch: pytest.MonkeyPatch) -> None:
    ((peer, info),) = probe()
    assert not isinstance(info, EdgeError)
    offers = tuple(Offer(model="edgellm-verifier", size=one.size, vocabulary=one.vocabulary) for one in info.offers)
    near, far, closed, asleep = (
        (peer, SILENT if told is None else replace(told, offers=offers))
        for told in (info, replace(info, seconds=9.0, peer=replace(peer, name="attic")),
                     replace(info, rights=frozenset()), None)
    )  # fmt: skip
    for found, names in (([near, far], ["desk"]), ([far, near], ["desk"]), ([closed], []), ([asleep], [])):
        assert [one.peer.name for one in verifying(found).values()] == names
    known = NamedModels(DEFAULTS, lambda: [near])
    assert type(known.find("edgellm-verifier")) is ModelOpener
    monkeypatch.setattr(memory_fit, "free_memory", lambda: -(10**9))
    assert type(known.find("edgellm-verifier")) is PairedOpener
    assert type(NamedModels(DEFAULTS, tuple).find("edgellm-verifier")) is ModelOpener


def test_what_a_device_serves_is_known_while_it_sleeps(desk: VerifierServer, monkeypatch: pytest.MonkeyPatch) -> None:
    (found,), now, name = probe(), [0.0], name_of(desk.model.path)
    monkeypatch.setattr(catalogs, "monotonic", lambda: now[0])
    answers: list[list[ProbeResult]] = [[], [(found[0], SILENT)], [found]]
    models = NamedModels(DEFAULTS, lambda: answers.pop())
    for now[0], known in ((0.0, True), (100.0, True), (200.0, False)):  # it answers; sleeps; is not paired any more
        until(lambda known=known: (name in {info.id for info in models.infos()}) is known)  # type: ignore[misc]
        with pytest.raises(ModelNotFound):
            models.find("another")  # for which the devices are asked


def test_a_new_server_knows_the_model_of_a_sleeping_device(models: NamedModels, desk: VerifierServer) -> None:
    name, (found,) = name_of(desk.model.path), probe()
    models.find(name).open(Counter(), bool).pair.close()
    desk.stop()
    opener = NamedModels(DEFAULTS, lambda: [(found[0], SILENT)]).find(name)
    opener.check_fits(Counter())
    with pytest.raises(VerifierUnreachable, match="desk cannot be reached"):
        opener.open(Counter(), bool)


def test_a_model_for_which_nothing_here_can_draft_writes_alone(
    f32_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: LLM
) -> None:
    """As one with a tokenizer that no model here has."""
    retokenized.write(f32_pair[1], tmp_path / "other.gguf", retokenized.permuted)
    with paired(tmp_path, tmp_path / "other.gguf", monkeypatch) as server:
        opener = NamedModels(DEFAULTS).find(name_of(server.model.path))
        opener.check_fits(Counter())
        opened = opener.open(Counter(), bool)
        try:
            assert opened.pair.draft_name is None
            assert written(opened.pair, max_tokens=12) == written(own, max_tokens=12)
        finally:
            opened.pair.close()
    said = "is open on desk and writes alone: no model here has its tokenizer and at most half of its size."
    assert [event.endswith(said) for event in EVENTS] == [True]


def test_unknown_names_do_not_make_the_server_ask_devices_again_and_again(models: NamedModels) -> None:
    asked = 0

    def count() -> Sequence[ProbeResult]:
        nonlocal asked
        asked += 1
        raise TrustUnusable("The list cannot be read.", "Check it.")

    found = NamedModels(DEFAULTS, count)
    for _ in range(20):
        with pytest.raises(ModelNotFound, match="nothing"):
            found.find("nothing")
    assert asked == 1


def test_the_page_offers_the_models_of_paired_devices(page: Page, server: HttpServer, desk: VerifierServer) -> None:
    name = name_of(desk.model.path)
    page.goto(f"{server.url}/#key={KEY}")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator(f'#model option[value="{name}"]')).to_have_text(f"{name} on desk")
    page.select_option("#model", name)
    talk(page, QUESTION)
    expect(page.locator(".device.up")).to_have_count(2)
    expect(page.locator("#model-about")).to_have_text(re.compile("drafts, .* verifies"))
