"""Vectors are those of llama.cpp's own calls, of an encoder and of a decoder, and models that give none are refused."""

from collections.abc import Iterator
from pathlib import Path

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest

from edgellm.engine import Floats, Model
from edgellm.engine.embedding.embedder import Embedder
from edgellm.errors import ModelUnsupported, PromptTooLong
from testkit.gguf.architectures import write, write_bert

TEXTS = ("The mug is on the shelf.", "a", "Zürich ☃ 漢字", "word " * 9)


@pytest.fixture(scope="module", params=["bert", "mean", "last"])
def embedder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Embedder]:
    folder = tmp_path_factory.mktemp("embedding")
    path = folder / "embedder.gguf"
    if request.param == "bert":
        write_bert(path)
    else:
        write("qwen3", path, sizes={"pooling_type": {"mean": 1, "last": 3}[request.param]})
    with Model.load(path) as model, Embedder(model) as opened:
        yield opened


def reference(path: Path, text: str) -> Floats:
    """Return the vector that llama.cpp's own calls give, with its own special tokens, of length 1."""
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    params = lib.llama_context_default_params()
    params.embeddings, params.n_ctx, params.n_batch, params.n_ubatch = True, 64, 64, 64
    context = lib.llama_init_from_model(model, params)
    ids = (lib.llama_token * 64)()
    data = text.encode()
    count = lib.llama_tokenize(lib.llama_model_get_vocab(model), data, len(data), ids, 64, True, False)
    assert lib.llama_decode(context, lib.llama_batch_get_one(ids, count)) == 0
    found = lib.llama_get_embeddings_seq(context, 0)
    vector = np.ctypeslib.as_array(found, (lib.llama_model_n_embd_out(model),)).copy()
    lib.llama_free(context)
    lib.llama_model_free(model)
    return vector / np.linalg.norm(vector)


def test_vectors_are_those_of_llama_cpp(embedder: Embedder) -> None:
    for text in TEXTS:
        vector = embedder.embed(embedder.ids(text))
        assert vector.shape == (embedder.width,)
        np.testing.assert_allclose(vector, reference(embedder.model.path, text), atol=2e-3)
        np.testing.assert_allclose(np.linalg.norm(vector), 1.0, rtol=1e-5)


def test_texts_that_are_too_long_are_refused_or_cut(embedder: Embedder) -> None:
    long = "word " * embedder.positions
    with pytest.raises(PromptTooLong):
        embedder.ids(long)
    ids = embedder.ids(long, cut=True)
    assert len(ids) == embedder.positions
    assert embedder.ids("a")[-1] in (ids[-1], embedder.model.tokenize("a")[-1])  # the token behind a text stays
    assert embedder.embed(ids).shape == (embedder.width,)
    for wrong in (ids[:0], np.append(ids, ids[:1])):
        with pytest.raises(PromptTooLong):
            embedder.embed(wrong)


def test_a_trial_embeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EDGELLM_PROBE", raising=False)
    write("qwen3", tmp_path / "ranks.gguf", sizes={"pooling_type": 4})
    with pytest.raises(ModelUnsupported, match="ranks texts"):
        Model.load(tmp_path / "ranks.gguf")
    write_bert(tmp_path / "bert.gguf")
    Model.load(tmp_path / "bert.gguf").close()


@pytest.mark.parametrize(("pooling", "said"), [(0, "does not say how to pool"), (4, "ranks texts")])
def test_models_that_give_no_embeddings_are_refused(tmp_path: Path, pooling: int, said: str) -> None:
    path = tmp_path / "model.gguf"
    write("qwen3", path, sizes={"pooling_type": pooling})
    with Model.load(path, faults=()) as model, pytest.raises(ModelUnsupported, match=said):
        Embedder(model)
