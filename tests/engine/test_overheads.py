"""What llama.cpp takes beside its buffers follows from a header."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from edgellm.engine import ModelFile
from edgellm.engine.gguf.overheads import PREDICTED_ROWS, converted_bytes, model_bytes, output_rows
from edgellm.engine.gguf.reader import GgufHeader
from testkit.gguf.random_model import SHAPES, write

SHAPE = replace(SHAPES["tiny-draft"], n_layer=1, n_embd=256, n_ff=768)


def header(path: Path, kind: str, n_vocab: int = 1_000, n_expert: int = 0) -> GgufHeader:
    write(path, replace(SHAPE, n_vocab=n_vocab, n_expert=n_expert), kind)
    return ModelFile.open(path).header


@pytest.mark.parametrize(("kind", "size"), [("F32", 0.0), ("F16", 2.0), ("Q8_0", 34 / 32), ("Q4_0", 34 / 32)])
def test_rows_of_the_widest_product_are_converted(tmp_path: Path, kind: str, size: float) -> None:
    assert converted_bytes(header(tmp_path / "model.gguf", kind), 512) == 512 * 768 * size
    routed = converted_bytes(header(tmp_path / "routed.gguf", kind, n_expert=4), 512)
    assert routed == 2 * 512 * 768 * size  # a row goes to two experts, each of which has one of its own


def test_a_vocabulary_takes_memory_for_each_token_and_merge(tmp_path: Path) -> None:
    few, many = (header(tmp_path / f"{n}.gguf", "Q8_0", n) for n in (1_000, 50_000))
    assert 250 < (model_bytes(many) - model_bytes(few)) / 49_000 < 350
    none = replace(few, metadata={"general.architecture": "llama"})
    assert 0 < model_bytes(none) < model_bytes(few)


def test_rows_of_logits_are_those_of_predictions_or_of_all_sequences() -> None:
    assert output_rows(1, 512) == PREDICTED_ROWS
    assert output_rows(1, 8) == 8
    assert PREDICTED_ROWS < output_rows(8, 512) < 512
    assert output_rows(200, 512) == 512
