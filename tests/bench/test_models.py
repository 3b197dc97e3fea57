"""The benchmarks of models of every kind find what is wrong. The long run is `python -m bench run models`."""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.models import architectures, features, memory, real_pairs, tokenizers, window_memory
from edgellm.engine import Message, Model
from edgellm.spec.types import Source, Token
from testkit.gguf.architectures import write

TEXTS = ("Grüße 你好 🦙.", " two\nlines", "")


def test_the_row_of_a_hybrid_model_is_right() -> None:
    row = architectures.measured("lfm2", 60, 12)
    assert row["walk"]["wrong"] == 0
    assert row["cells"]["served"] == row["cells"]["pair"] == features.EQUAL
    assert row["cells"]["cut into layers"].startswith((features.EQUAL, "refused: "))
    assert architectures.is_right(row)
    assert "1 of 1 architectures right" in architectures.table({"rows": {"lfm2": row}})


@pytest.mark.parametrize(
    "wrong", [{"crash": "exit code -6"}, {"walk": {"wrong": 1}}, {"cells": {"pair": "differs: 3"}}]
)
def test_a_row_with_a_fault_is_not_right(wrong: dict[str, Any]) -> None:
    row = {"cells": {"pair": features.EQUAL}, "walk": {"wrong": 0}} | wrong
    assert not architectures.is_right(row)


def test_a_text_that_differs_says_where() -> None:
    reference = features.Reference(np.array([1], dtype=np.int32), [5, 6, 7], [0.5, 1e-5, 0.5])
    assert reference.compared([5, 6, 7]) == features.EQUAL
    assert reference.compared([5, 6]) == "2 tokens instead of 3"
    assert reference.compared([5, 9, 7]).startswith("rounding: token 1")
    assert reference.compared([4, 6, 7]).startswith("differs: token 0")


def test_a_token_of_another_model_is_a_stranger(draft_model: Model, verifier_model: Model) -> None:
    prompt = np.arange(300, 310, dtype=np.int32)
    said = features.Reference.of(verifier_model, prompt, 4).ids
    tokens = [Token(token, b"", Source.ACCEPTED) for token in said]
    assert features.stranger(tokens, prompt, verifier_model, draft_model) == ""
    tokens[0] = Token((said[0] + 1) % 1_000, b"", Source.ACCEPTED)
    assert features.stranger(tokens, prompt, verifier_model, draft_model).startswith(
        "token 0 is not edgellm verifier's"
    )


def test_vectors_of_a_vocabulary_are_compared_and_streamed(draft_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "ggml-vocab-bundled.gguf"
    shutil.copyfile(draft_path, path)
    assert tokenizers.measured(path)["cases"] == 0
    with Model.load(path, text_only=True, probe=False) as model:
        ids = [model.tokenize(text).tolist() for text in TEXTS]
        assert tokenizers.streamed(model, ids[0])[1] > 0  # characters of several tokens
    Path(f"{path}.inp").write_text("\n__ggml_vocab_test__\n".join(TEXTS), encoding="utf-8")
    for change in (0, 1):
        ids[1][0] += change
        lines = "\n".join(" ".join(map(str, one)) for one in ids)
        Path(f"{path}.out").write_text(lines, encoding="utf-8")
        row = tokenizers.measured(path)
        assert (row["cases"], row["right"], row["same"], row["streams"]) == (2, 2 - change, 2, row["of"])
        assert tokenizers.is_right(row) == (not change)
    assert "0 of 1 vocabularies" in tokenizers.table({"rows": [row]})


def test_a_windows_cache_is_no_larger_than_plain_llama_cpps(tmp_path: Path) -> None:
    for row in window_memory.windows(None, 2_048, tmp_path):
        assert row["ours"]["verifier"] <= window_memory.MOST * row["llama_server"]
    assert window_memory.is_off({"estimate": 5e6, "real": 9e6})


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux alone says what a process takes")
def test_the_memory_of_a_process_is_what_was_estimated() -> None:
    row = memory.in_children("qwen35", 256)
    assert memory.ratio(row) == pytest.approx(1.0, abs=0.04), row  # 0.94 without what llama.cpp does not tell of
    assert row["real"]["mapped"] == pytest.approx(row["estimate"]["weights"], rel=0.02)
    assert "1 of 1 estimates within a tenth" in memory.table({"rows": {"qwen35": row}})


def test_an_estimate_that_is_off_says_so() -> None:
    row = {"estimate": {"weights": 80, "caches": 8}, "real": {"mapped": 80, "opening": 20}}
    assert memory.is_off(row)
    assert memory.is_off({"crash": "exit code -6"})
    assert not memory.is_off({**row, "estimate": {"weights": 80, "caches": 12}})


def test_a_real_pair_has_the_vocabulary_of_its_family_in_its_size(draft_path: Path, tmp_path: Path) -> None:
    models = tmp_path / f"llama_cpp_python-{version('llama-cpp-python')}" / "vendor" / "llama.cpp" / "models"
    (models / "templates").mkdir(parents=True)
    shutil.copyfile(draft_path, models / "ggml-vocab-made.gguf")
    (models / "templates" / "made.jinja").write_text("{{ messages[0].content }}<|stop|>", encoding="utf-8")
    pair = real_pairs.RealPair("qwen3", "made", "made", 3_000, 3_100, ("<|stop|>",), "<|stop|>")
    with Model.load(draft_path, text_only=True, probe=False) as model:
        size = model.n_vocab
    for tokens in (pair.draft_tokens, pair.tokens):
        made = real_pairs.tokenizer(tmp_path, pair, tokens)
        write("qwen3", tmp_path / "made.gguf", tokenizer=made)
        with Model.load(tmp_path / "made.gguf", probe=False) as model:
            assert model.n_vocab == tokens
            assert model.is_eog(size)
            assert model.chat_prompt([Message("user", "mug")])[-1] == size


def test_a_pair_that_differs_is_not_right() -> None:
    right = {"cells": {"pair": features.EQUAL, "budget": "right, 40% verified", "served": "refused: no"}}
    assert real_pairs.is_right(right)
    wrong = {"cells": {"pair": "differs: token 3"}}
    assert not real_pairs.is_right(wrong)
    assert "1 of 2 pairs right" in real_pairs.table({"rows": {"one": right, "two": wrong}})
