"""Loading, and the text side of a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, Message, Model, native
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import EngineFailed, InvalidOption, ModelUnsupported
from tests.engine.conftest import MakeModel
from tests.engine.headers import file, string


def test_a_model_without_a_name_has_its_files(tmp_path: Path, make_model: MakeModel) -> None:
    assert make_model().name == "random model-0"
    data = make_model().path.read_bytes().replace(b"general.name", b"general.nome")
    (tmp_path / "other.gguf").write_bytes(data)
    with Model.load(tmp_path / "other.gguf") as model:
        assert model.name == "other"


@settings(max_examples=200)
@given(st.text())
def test_text_comes_back_byte_by_byte(draft_model: Model, text: str) -> None:
    ids = draft_model.tokenize(text)
    assert draft_model.detokenize(ids) == text.encode()
    assert b"".join(draft_model.piece(token) for token in ids.tolist()) == text.encode()


@settings(max_examples=50)
@given(st.text())
def test_plain_text_never_holds_control_tokens(draft_model: Model, text: str) -> None:
    names = [draft_model.vocabulary.pieces[i].decode() for i in hidden(draft_model)]
    ids = draft_model.tokenize(text.join(names))
    assert not set(ids.tolist()) & set(hidden(draft_model))
    assert draft_model.detokenize(ids) == text.join(names).encode()


def hidden(model: Model) -> list[int]:
    return [i for i in range(model.n_vocab) if model.piece(i) == b""]


def test_control_tokens_are_parsed_on_demand(draft_model: Model) -> None:
    for token in hidden(draft_model):
        name = draft_model.vocabulary.pieces[token].decode()
        assert draft_model.tokenize(f"a{name}b", special=True).tolist().count(token) == 1
        assert draft_model.detokenize([token]) == b""


def test_a_lone_surrogate_does_not_stop_it(draft_model: Model) -> None:
    assert draft_model.detokenize(draft_model.tokenize("a\ud800b")) == b"a?b"
    assert draft_model.tokenize("").shape == (0,)


@pytest.mark.parametrize("token", [-1, 10**6])
def test_there_is_no_such_token(draft_model: Model, token: int) -> None:
    with pytest.raises(InvalidOption, match=f"{token} is not a token"):
        draft_model.piece(token)


def test_progress_is_told_and_may_stop_the_loading(draft_path: Path) -> None:
    shares: list[float] = []
    Model.load(draft_path, progress=shares.append).close()
    assert shares == sorted(shares)
    assert shares[-1] == 1.0

    def stop(_: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model.load(draft_path, progress=stop)


def test_llama_cpps_reason_is_told_and_nothing_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "odd.gguf"
    path.write_bytes(file([string(b"general.architecture", b"klingon")]))
    with pytest.raises(ModelUnsupported, match="unknown model architecture: 'klingon'"):
        Model.load(path)
    path.write_bytes(file())
    with pytest.raises(ModelUnsupported, match="key not found"):
        Model.load(path)
    assert capfd.readouterr() == ("", "")


def test_an_encoder_is_refused(draft_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native.lib, "llama_model_has_encoder", lambda _: True)
    with pytest.raises(ModelUnsupported, match="encoder"):
        Model.load(draft_path)


def test_a_closed_model_says_so(make_model: MakeModel) -> None:
    with make_model() as model:
        model.piece(1)
    for call in (
        lambda: model.tokenize("a"),
        lambda: model.piece(2),
        lambda: model.is_eog(1),
        lambda: model.vocabulary,
        lambda: model.owned,
    ):
        with pytest.raises(EngineFailed, match="is closed"):
            call()


def test_a_model_that_is_loaded_for_its_text_alone(verifier_path: Path, verifier_model: Model) -> None:
    text = "The red mug is on the shelf."
    with Model.load(verifier_path, TEXT_ONLY) as model:
        assert model.tokenize(text).tolist() == verifier_model.tokenize(text).tolist()
        assert model.vocabulary == verifier_model.vocabulary
        messages = [Message("user", text)]
        assert model.chat_prompt(messages).tolist() == verifier_model.chat_prompt(messages).tolist()
        with pytest.raises(InvalidOption, match=r"Only the vocabulary of .* is loaded"):
            Context(model, ContextSpec(n_ctx=16))
