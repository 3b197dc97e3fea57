"""The models of this machine behind one server, by name: each writes what it writes alone."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from huggingface_hub import constants

from edgellm.engine import ModelFile, memory_fit
from edgellm.engine.hardware import Hardware
from edgellm.http import catalogs
from edgellm.http.catalogs import ModelDefaults, ModelOpener, NamedModels, PairOpener
from edgellm.http.model_host import ServedModel
from edgellm.http.server import HttpServer
from edgellm.llm import LLM
from edgellm.llm.model_loading import EngineConfig, place_pair
from edgellm.spec.params import ReplyOptions
from edgellm.storage.model_files import list_models
from testkit.gguf.random_model import SHAPES, write
from tests.http.conftest import Answer, Ask, asker, configured, conversation, serving, written
from tests.http.test_streaming import Scripted, waiting

OTHER = "some/tiny:F32"
VERIFIER = "edgellm-verifier"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A hub cache with a model of another vocabulary, and a file beside it."""
    folder = tmp_path_factory.mktemp("hub")
    snapshot = folder / "models--some--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    write(snapshot / "tiny-F32.gguf", replace(SHAPES["tiny-draft"], n_ctx=512), "F32", 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(folder))
        yield folder


EVENTS: list[str] = []


def defaults_of(events: list[str], n_ctx: int = 512, replies: int = 1) -> ModelDefaults:
    hardware = Hardware(n_ctx=n_ctx, threads=1)
    return ModelDefaults(hardware, hardware, ReplyOptions(), events.append, replies)


@pytest.fixture(scope="module")
def many(cache: Path) -> Iterator[HttpServer]:
    """A server with the bundled pair by default, as `edgellm serve` opens it."""
    defaults = defaults_of(EVENTS, 1_024)  # more than the other model was trained for
    with configured(on_event=EVENTS.append, aliases={"claude-haiku": "some/tiny", "mine": "nosuch"}) as server:
        opener = PairOpener("edgellm-verifier", "edgellm-draft", "edgellm-verifier", defaults)
        served = opener.open(Counter(), bool)
        server.open(served, opener=opener, catalog=NamedModels(defaults, tuple))
        assert EVENTS[-1] == "The alias mine stands for a model that is not here now. There is no model 'nosuch'."
        yield server


@pytest.fixture
def ask_many(many: HttpServer) -> Iterator[Ask]:
    EVENTS.clear()
    ask = asker(many)
    yield ask
    while any(model["users"] for model in ask("GET", "/status").json["models"]):
        pass  # the thread of a reply ends after the client has all of it
    for model in ask("GET", "/status").json["models"]:
        ask("POST", "/models/unload", {"model": model["name"]})


def chat(ask: Ask, model: str | None, **more: object) -> Answer:
    named = {} if model is None else {"model": model}
    return ask("POST", "/v1/chat/completions", conversation(max_tokens=12, **named, **more))


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.json
    return str(answer.json["choices"][0]["message"]["content"])


def test_models_are_listed_and_loaded_when_they_are_named(ask_many: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    loading: list[list[str]] = []
    genuine = ModelOpener.open

    def opened(opener: ModelOpener, beside: Counter[str], is_closing: Callable[[], bool]) -> ServedModel:
        loading.append(ask_many("GET", "/status").json["loading"])
        return genuine(opener, beside, is_closing)

    monkeypatch.setattr(ModelOpener, "open", opened)
    listed = ask_many("GET", "/v1/models").json["data"]
    assert {model["id"] for model in listed} >= {"edgellm-draft", "edgellm-verifier", OTHER}
    reply = ask_many("POST", "/v1/completions", {"model": OTHER, "prompt": "a b", "max_tokens": 4})
    assert (reply.status, reply.json["model"], loading) == (200, OTHER, [[OTHER]])
    shown = ask_many("GET", f"/v1/models/{OTHER}").json
    assert (shown["id"], shown["loaded"], shown["context_length"]) == (OTHER, True, 512)
    reason = "no model here has its tokenizer and at most half of its size"
    assert [f"{OTHER} is open without a draft model: {reason}."] == EVENTS
    loaded = ask_many("GET", "/status").json["models"]
    assert {model["name"] for model in loaded} >= {OTHER}
    assert all(sum(model["memory"].values()) > 10**6 for model in loaded)


@pytest.mark.parametrize("name", ["edgellm-draft", "edgellm-verifier"])
def test_a_named_model_writes_what_it_writes_alone(ask_many: Ask, name: str) -> None:
    with LLM.open(None, name, threads=1, n_ctx=1_024) as alone:
        text = written(alone, max_tokens=12)
    assert text_of(chat(ask_many, name)) == text


def opened_as(name: str, events: list[str]) -> ServedModel:
    return NamedModels(defaults_of(events)).find(name).open(Counter(), bool)


def test_a_verifier_gets_the_draft_model_that_fits_it(cache: Path) -> None:
    opened: list[str] = []
    served = opened_as("edgellm-verifier", opened)
    with served.pair as pair:
        assert pair.draft_name == "edgellm-draft"
        list(reply := pair.reply("Where is my mug?", max_tokens=8, retrieval="off", gate="always", gamma=4))
        assert reply.summary.drafted > 0
    reason = "it has its tokenizer and 21% of its size"
    assert opened == [f"edgellm-verifier is open with the draft model edgellm-draft: {reason}."]


def needed(path: Path, n_ctx: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes that a verifier takes. From now on llama.cpp reckons also where there is plenty of memory."""
    monkeypatch.setattr(memory_fit, "_PLENTY", 0.0)
    taken = Counter[str]()
    memory_fit.place_model(ModelFile.open(path), Hardware(n_ctx=n_ctx, threads=1), taken, verifies=True)
    return taken["CPU"]


def test_too_large_a_draft_model_is_left_out(cache: Path, verifier_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    room = needed(verifier_path, 512, monkeypatch) + 10**6
    monkeypatch.setattr(memory_fit, "free_memory", lambda: room)
    served = opened_as("edgellm-verifier", opened)
    served.pair.close()
    assert served.pair.draft_name is None
    assert "without a draft model: draft.gguf takes" in opened[0]


def test_a_named_model_has_contexts_for_as_many_replies_as_fit(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_fit, "_PLENTY", 0.0)
    hardware, opened = Hardware(n_ctx=512, threads=1), list[str]()

    def taken(replies: int) -> int:
        config = EngineConfig(hardware=hardware, threads=1, replies=replies)
        return place_pair(None, VERIFIER, config).taken["CPU"]

    room = (taken(2) + taken(3)) // 2
    monkeypatch.setattr(memory_fit, "free_memory", lambda: room)
    monkeypatch.setattr(catalogs, "list_models", list)  # no draft model
    model = next(one for one in list_models() if one.name == VERIFIER)
    served = ModelOpener(model, defaults_of(opened, replies=4)).open(Counter(), bool)
    with served.pair:
        assert (served.replies, served.pair.replies) == (2, 2)
    assert opened[0].startswith(f"{VERIFIER}: 2 replies are written at once, not 4: verifier.gguf takes ")
    assert f"{VERIFIER} is open" in opened[1]


def test_a_named_model_writes_no_more_replies_at_once_than_fit(own: LLM) -> None:
    """Its requests wait; those for another model do not."""
    go = threading.Event()
    with serving(own, "own", replies=3) as server, ThreadPoolExecutor() as threads:
        server.models.add(ServedModel(cast(LLM, Scripted(waiting(go))), "waiting", replies=1))
        ask = asker(server)
        both = [threads.submit(chat, ask, "waiting") for _ in range(2)]
        while (found := ask("GET", "/status").json["requests"])["running"] + found["waiting"] < 2:
            pass
        assert (found["running"], found["places"]) == (1, 3)
        assert text_of(chat(ask, "own"))
        go.set()
        assert [one.result().status for one in both] == [200, 200]


@pytest.mark.parametrize(
    "name",
    ["llama3.2", "edgellm-verifer", "/etc/passwd", "../models/draft.gguf", "~/x", "some/tiny:Q4_K_M", "a/b/c", "é"],
)
def test_other_names_are_refused(ask_many: Ask, cache: Path, name: str) -> None:
    """Paths are refused, also those of models that could be named."""
    assert chat(ask_many, str(next(cache.rglob("*.gguf")))).status == 404
    answer = chat(ask_many, name)
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert repr(name) in answer.error["message"]
    if name == "edgellm-verifer":
        assert "Did you mean edgellm-verifier" in answer.error["message"]


def test_a_model_has_one_name_whatever_it_is_called(ask_many: Ask) -> None:
    """Also where a request leaves the quantisation out, or has an alias."""
    for name in ("some/tiny", "hf.co/some/tiny", "some/tiny:f32", OTHER, "claude-haiku"):
        reply = ask_many("POST", "/v1/completions", {"model": name, "prompt": "a b", "max_tokens": 1})
        assert (reply.status, reply.json["model"]) == (200, OTHER)
    assert (len(EVENTS), reply.headers["x-edgellm-model"]) == (1, OTHER)


def test_what_does_not_fit_is_refused_with_the_reason(ask_many: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    text_of(chat(ask_many, None))
    before = ask_many("GET", "/status").json["models"]
    monkeypatch.setattr(memory_fit, "free_memory", lambda: -(10**9))  # whatever is closed
    answer = ask_many("POST", "/v1/completions", {"model": OTHER, "prompt": "a b", "max_tokens": 1})
    assert (answer.status, answer.error["code"]) == (503, "memory_short")
    assert "tiny-F32.gguf takes" in answer.error["message"]
    assert [model["name"] for model in ask_many("GET", "/status").json["models"]] == [one["name"] for one in before]


def test_a_default_pair_makes_room_and_comes_back(ask_many: Ask, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = text_of(chat(ask_many, None))
    with monkeypatch.context() as patch:
        room = needed(next(cache.rglob("*.gguf")), 512, patch) + 10**6
        patch.setattr(memory_fit, "free_memory", lambda: room)
        answer = ask_many("POST", "/v1/completions", {"model": OTHER, "prompt": "a b", "max_tokens": 1})
        assert answer.status == 200, answer.json
        status = ask_many("GET", "/status").json
        assert [model["name"] for model in status["models"]] == [OTHER]
        assert status["model"] == "edgellm-verifier"
        assert ask_many("GET", "/health").status == 200
    assert text_of(chat(ask_many, None)) == text
