"""Parts of models of every architecture that can be cut: in a chain they compute the logits of the whole model."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import gguf
import pytest

from edgellm.engine import check_gguf, cut
from edgellm.engine.gguf import cuttable, writer
from edgellm.engine.gguf.cuttable import RULES, CutRule, check_cuttable, cut_points, exit_cuts, largest_part
from edgellm.engine.gguf.reader import TENSOR_TYPES, raw_entries
from edgellm.errors import InvalidOption, ModelUnsupported
from testkit import ROOT
from testkit.gguf.architectures import ARCHITECTURES, SHAPES_TO_CUT, WINDOW
from testkit.gguf.changed import with_entries
from testkit.gguf.reader import read_gguf
from tests.conftest import Architectures
from tests.engine.logits import ROUNDED
from tests.engine.shard_chain import CHANGED, SPANS, WholeModel

SAME = 1e-5  # of the largest logit
LOOKED_UP = 1e-3  # llama.cpp looks GELU up in a table of 16-bit numbers, where a row may fall on either side of a step
OTHERS = {"gemma4", "exaone4", "smollm3", "afmoe"}  # refused, or of too few layers to be cut: another shape is tried
SHAPES = ARCHITECTURES | SHAPES_TO_CUT
CUT = [name for name, one in SHAPES.items() if (one.name or name) in RULES and name not in OTHERS]


@pytest.fixture(params=CUT)
def whole(request: pytest.FixtureRequest, architectures: Architectures) -> WholeModel:
    return WholeModel(architectures(request.param))


def test_a_chain_computes_the_logits_of_the_whole_model(whole: WholeModel, tmp_path: Path) -> None:
    points = cut_points(whole.header)
    middle = points[len(points) // 2]
    every = points if len(points) <= 10 else (0, 1, 5, 6, 11, 12, 30, 61)
    rounded = len(points) == 62 or whole.header.architecture == "gemma"  # norms of queries, or rows, are multiplied
    near = LOOKED_UP if rounded else SAME
    for starts in {every, (0, middle)}:
        assert whole.largest_difference(tmp_path, starts) < near


def test_every_rule_is_tried() -> None:
    assert {SHAPES[name].name or name for name in CUT} == RULES.keys()
    assert SPANS[0][0] > CHANGED > WINDOW


def test_the_guide_lists_them() -> None:
    page = (ROOT / "docs" / "guide" / "mesh.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- architectures that can be cut.*?-->(.*?)<!-- end -->", page, re.DOTALL)
    assert found is not None
    assert re.split(r"[,\s]+", found[1].strip()) == sorted(RULES)


def changed(source: Path, path: Path, **values: int) -> Path:
    """Return a copy of a model, with other numbers in its metadata."""
    arch = check_gguf(source).architecture
    return with_entries(source, path, {f"{arch}.{k}": writer.entry(f"{arch}.{k}", v) for k, v in values.items()})


def quantised(source: Path, path: Path) -> Path:
    """Return a copy of a model whose embedding and head have 8 bits."""
    header = check_gguf(source)
    data = {t.name: t.data for t in read_gguf(source).tensors}
    kind = gguf.GGMLQuantizationType.Q8_0
    with source.open("rb") as file:
        tensors = []
        for t in header.tensors:
            new = writer.NewTensor.copy(file, t)
            if t.name in ("token_embd.weight", "output.weight"):
                raw = gguf.quantize(data[t.name], kind).tobytes()
                new = writer.NewTensor(t.name, t.shape, int(kind), len(raw), partial(iter, [raw]))
            tensors.append(new)
        writer.write(path, writer.portions(header, raw_entries([file], header).values(), tensors))
    return path


def test_where_both_are_needed_the_embedding_or_the_head_is_blank_and_small(
    architectures: Architectures, tmp_path: Path
) -> None:
    path = quantised(architectures("gpt-oss"), tmp_path / "whole.gguf")
    assert WholeModel(path).largest_difference(tmp_path, (0, 1, 2)) < ROUNDED
    found = {
        (part, t.name): (TENSOR_TYPES[t.kind][0], t.shape[1])
        for part in ("0-0", "1-1", "2-3")
        for t in check_gguf(tmp_path / f"{part}.gguf").tensors
        if t.name in ("token_embd.weight", "output.weight")
    }
    every = WholeModel(path).logits[0].shape[1]
    assert found == {
        ("0-0", "token_embd.weight"): ("Q8_0", every), ("0-0", "output.weight"): ("Q2_0", every),
        ("1-1", "token_embd.weight"): ("Q8_0", 32), ("1-1", "output.weight"): ("Q8_0", 32),
        ("2-3", "token_embd.weight"): ("Q2_0", every), ("2-3", "output.weight"): ("Q8_0", every),
    }  # fmt: skip


def test_layers_that_predict_further_tokens_are_left_out(architectures: Architectures, tmp_path: Path) -> None:
    path = changed(architectures("glm4moe of 5 layers"), tmp_path / "whole.gguf", nextn_predict_layers=1)
    whole = WholeModel(path)
    assert check_cuttable(whole.header) == 4
    assert whole.largest_difference(tmp_path, (0, 1, 3)) < SAME
    assert not any(t.name.startswith("blk.1.") for t in check_gguf(tmp_path / "3-3.gguf").tensors)


@pytest.mark.parametrize(
    ("name", "first", "last"), [("cohere2", 3, 3), ("smollm3 of 8 layers", 1, 7), ("smollm3 of 8 layers", 0, 2)]
)
def test_what_llama_cpp_would_take_for_another_model_is_not_cut(
    name: str, first: int, last: int, architectures: Architectures, tmp_path: Path
) -> None:
    with pytest.raises(InvalidOption):
        cut(architectures(name), tmp_path / "part.gguf", first, last, head=False)


def test_a_part_whose_layers_all_attend_to_everything_says_that_one_more_has_a_window(
    architectures: Architectures, tmp_path: Path
) -> None:
    cut(architectures("gpt-oss"), tmp_path / "part.gguf", 1, 1, head=False)
    found = check_gguf(tmp_path / "part.gguf").metadata
    assert (found["gpt-oss.block_count"], found["gpt-oss.nextn_predict_layers"]) == (2, 1)
    assert found["gpt-oss.attention.sliding_window_pattern"] == (False, True)
    assert check_cuttable(check_gguf(tmp_path / "part.gguf")) == 1


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gemma4", "each layer has embeddings of its own"),
        ("exaone4", "computes one of 64 layers otherwise"),
        ("qwen35", "recurrent state cannot be rolled back"),
        ("glm4", "ends the process where rows take the place"),
        ("gpt2", "positions or a norm are added"),
        ("plamo2", "recurrent"),
        ("deepseek32", "does not know what its layers depend on"),
    ],
)
def test_the_reason_is_named(name: str, says: str, architectures: Architectures) -> None:
    with pytest.raises(ModelUnsupported, match=f"layers of this {name} model cannot be cut: .*{says}.* Run it whole"):
        check_cuttable(check_gguf(architectures(name)))


def test_exits_are_cuts_that_leave_two_sound_parts(
    architectures: Architectures, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = check_gguf(architectures("smollm3 of 8 layers"))
    assert (cut_points(header), exit_cuts(header)) == ((0, 4), (3,))
    monkeypatch.setattr(cuttable, "RULES", {"smollm3": CutRule(counts=(2,))})
    assert exit_cuts(header) == (0, 2, 3, 4, 6)  # neither part has two layers
    assert largest_part(header) == 1
