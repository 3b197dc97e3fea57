"""Files that are written here: a tokenizer alone, and weights in another type."""

from pathlib import Path

import pytest

from edgellm.engine import Message, Model, ModelFile, check_gguf
from edgellm.engine.gguf import writer as module
from edgellm.engine.gguf.writer import requantise, tokenizer_file
from edgellm.engine.model import TEXT_ONLY
from edgellm.errors import ModelUnsupported
from testkit.gguf.architectures import write as random_model
from testkit.retokenized import permuted, sentencepiece, write

TEXT = "so, Grüße an 你好 🦙\n\n  twice  <|end|> "


@pytest.fixture(params=["bundled", "SentencePiece", "gemma3"])
def model(request: pytest.FixtureRequest, f32_pair: tuple[Path, Path], tmp_path: Path) -> Path:
    if request.param == "bundled":
        return f32_pair[0]
    path = tmp_path / "model.gguf"
    if request.param == "gemma3":
        random_model("gemma3", path)
    else:
        write(f32_pair[0], path, lambda tokens: sentencepiece(permuted(tokens)))
    return path


def test_it_tokenises_and_renders_like_the_model(model: Path, tmp_path: Path) -> None:
    alone = tmp_path / "tokenizer.gguf"
    alone.write_bytes(tokenizer_file(ModelFile.open(model)))
    assert check_gguf(alone).tensors == ()
    assert alone.stat().st_size < model.stat().st_size / 4
    with Model.load(model, TEXT_ONLY) as whole, Model.load(alone, TEXT_ONLY) as made:
        assert made.vocabulary == whole.vocabulary
        assert (made.end_of_turn, made.name) == (whole.end_of_turn, whole.name)
        alone.write_bytes(tokenizer_file(ModelFile.open(model), "desk-8b"))
        assert ModelFile.open(alone).name == "desk-8b"
        for special in (False, True):
            assert made.tokenize(TEXT, special=special).tolist() == whole.tokenize(TEXT, special=special).tolist()
        if whole.chat_template_source:
            talk = [Message("user", TEXT), Message("assistant", "Yes."), Message("user", "Why?")]
            assert made.chat_prompt(talk).tolist() == whole.chat_prompt(talk).tolist()


def test_what_is_too_long_or_no_tokenizer_is_refused(
    f32_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none.gguf").write_bytes(b"GGUF" + (3).to_bytes(4, "little") + bytes(16))
    with pytest.raises(ModelUnsupported, match="contains no tokenizer"):
        tokenizer_file(ModelFile.open(tmp_path / "none.gguf"))
    monkeypatch.setattr(module, "MAX_TOKENIZER", 10_000)
    with pytest.raises(ModelUnsupported, match="10000 are possible"):
        tokenizer_file(ModelFile.open(f32_pair[0]))


# --- other types of weights -------------------------------------------------------------------------------------------


def test_matrices_have_the_type_and_the_file_its_name(verifier_path: Path, tmp_path: Path) -> None:
    requantise(verifier_path, target := tmp_path / "other.gguf", "Q4_0", name="Other 1B")
    file, source = ModelFile.open(target), ModelFile.open(verifier_path)
    assert file.name == "Other 1B"
    assert file.header.quantisation == "Q4_0"
    assert file.header.file_size < source.header.file_size
    assert len(file.header.tensors) == len(source.header.tensors)
    with Model.load(target) as model, Model.load(verifier_path) as own:
        assert model.vocabulary.fingerprint == own.vocabulary.fingerprint


def test_what_llama_cpp_cannot_write_is_an_error(tmp_path: Path) -> None:
    (source := tmp_path / "words.gguf").write_bytes(b"no model")
    with pytest.raises(ModelUnsupported, match=r"words\.gguf in Q8_0"):
        requantise(source, tmp_path / "other.gguf", "Q8_0", name="Other")
