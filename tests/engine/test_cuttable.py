"""Parts of models of every architecture that can be cut: in a chain they compute the logits of the whole model."""

import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from edgellm.engine import (
    Block,
    Capture,
    Context,
    ContextSpec,
    Floats,
    Ids,
    Model,
    ModelFile,
    check_gguf,
    cut,
    cut_bytes,
)
from edgellm.engine.gguf import cuttable, writer
from edgellm.engine.gguf.cuttable import RULES, CutRule, check_cuttable, cut_points, exit_cuts, largest_part
from edgellm.engine.gguf.header import TENSOR_TYPES
from edgellm.engine.gguf.reader import tokenizer_entries
from edgellm.engine.gguf.writer import requantise, token_count
from edgellm.errors import EdgeError, InvalidOption, ModelCorrupt, ModelUnsupported
from testkit import ROOT
from testkit.gguf.architectures import ARCHITECTURES, SHAPES_TO_CUT, WINDOW
from testkit.gguf.changed import with_entries
from testkit.gguf.random_model import Shape, write
from testkit.gguf.reader import read_gguf
from tests.conftest import Architectures
from tests.engine import headers
from tests.engine.logits import ROUNDED, difference, some_ids

SPANS = ((50, 50), (1, 1), (1, 1), (7, 3), (1, 1))
"""Ids and rows of logits of each decode: a prompt longer than the window, single tokens, a verification."""
CHANGED = 40  # positions that are kept before other ids follow


class ShardChain:
    """Blocks of the layers that begin at `starts`, with the face of a context. Shards are cut into `folder` once."""

    def __init__(
        self, whole: Path, folder: Path, starts: Sequence[int], spec: ContextSpec = ContextSpec(n_ctx=128, threads=1)
    ) -> None:
        self._closing, self._blocks, self._length = ExitStack(), list[Block](), 0
        n_layer = check_cuttable(check_gguf(whole))
        for first, end in pairwise([*starts, n_layer]):
            path = folder / f"{first}-{end - 1}.gguf"
            if not path.exists():
                cut(whole, path, first, end - 1, head=end == n_layer)
            model = self._closing.enter_context(Model.load(path, faults=()))
            assert model.n_layer == end - first
            self._blocks.append(Block(model, spec, head=end == n_layer))
            self._closing.callback(self._blocks[-1].close)

    def decode(self, ids: Ids, outputs: int = 1) -> Floats:
        rows: Ids | Floats = ids
        for block in self._blocks:
            rows = block.forward(rows, start=self._length, outputs=outputs)
        self._length += len(ids)
        return rows  # type: ignore[return-value]

    def rollback(self, length: int) -> None:
        self._length = length

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self._closing.close()


class WholeModel:
    """What a model computes uncut, to compare all ways to cut it with."""

    def __init__(self, path: Path) -> None:
        self.path, self.header = path, check_gguf(path)
        with Model.load(path, faults=()) as model, Context(model, ContextSpec(n_ctx=128, threads=1)) as context:
            self.ids = np.random.default_rng(0).integers(0, model.n_vocab, 100).astype(np.int32)
            self.logits = list(self._decoded(context))

    def largest_difference(self, folder: Path, starts: Sequence[int]) -> float:
        """Return the largest difference of a logit to that of the parts beginning at `starts`, as a share of the
        largest logit."""
        with ShardChain(self.path, folder, starts) as chain:
            found = zip(self._decoded(chain), self.logits, strict=True)
            return max(difference(logits, whole) for logits, whole in found)

    def _decoded(self, chain: Context | ShardChain) -> Iterator[Floats]:
        at = 0
        for n, outputs in SPANS:
            yield chain.decode(self.ids[at : at + n], outputs=outputs).copy()
            at += n
        chain.rollback(CHANGED)
        for n in (1, 5, 1):
            yield chain.decode(self.ids[::-1][:n].copy()).copy()


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


def test_where_both_must_be_embedding_or_head_is_blank_and_small(architectures: Architectures, tmp_path: Path) -> None:
    requantise(architectures("gpt-oss"), path := tmp_path / "whole.gguf", "Q8_0", name="whole")
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
    key = "glm4moe.nextn_predict_layers"
    path = with_entries(architectures("glm4moe of 5 layers"), tmp_path / "whole.gguf", {key: writer.entry(key, 1)})
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


def test_exits_are_cuts_into_two_sound_parts(architectures: Architectures, monkeypatch: pytest.MonkeyPatch) -> None:
    header = check_gguf(architectures("smollm3 of 8 layers"))
    assert (cut_points(header), exit_cuts(header)) == ((0, 4), (3,))
    monkeypatch.setattr(cuttable, "RULES", {"smollm3": CutRule(counts=(2,))})
    assert exit_cuts(header) == (0, 2, 3, 4, 6)  # neither part has two layers
    assert largest_part(header) == 1


# --- shards -----------------------------------------------------------------------------------------------------------


def test_shards_have_a_tokenizer_or_none_and_a_matrix_of_the_vocabularys_size_at_most(tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    write(path, Shape("qwen2", 400, 4, 64, 2, 1, 96, 512, bias=True, tied=False), "Q8_0")
    assert WholeModel(path).largest_difference(tmp_path, (0, 1, 3)) < SAME
    first, middle, last = (check_gguf(tmp_path / f"{part}.gguf") for part in ("0-0", "1-2", "3-3"))
    assert tokenizer_entries(ModelFile.open(path)) == tokenizer_entries(ModelFile.open(tmp_path / "0-0.gguf"))
    assert (token_count(first), token_count(last)) == (400, 0)
    # The matrix is the head where there is one, else a sliver.
    assert middle.metadata[f"{middle.architecture}.vocab_size"] == 32
    assert sum(t.shape[1:] == (400,) for t in last.tensors) == 1
    with Model.load(tmp_path / "3-3.gguf") as model, pytest.raises(ModelUnsupported, match="no tokenizer"):
        model.tokenize("x")


def test_a_head_behind_any_layer(tmp_path: Path, f32_pair: tuple[Path, Path]) -> None:
    path = f32_pair[0]
    cut(path, tmp_path / "exit.gguf", 0, 2, head=True)
    ids = some_ids(9, 390)
    with (
        Model.load(path) as model,
        Model.load(tmp_path / "exit.gguf") as shard,
        Context(model, ContextSpec(n_ctx=16, threads=1), capture=Capture(stop_after=2)) as whole,
        Context(shard, ContextSpec(n_ctx=16, threads=1)) as short,
    ):
        whole.decode(ids)
        assert whole.captured is not None
        rows = whole.captured.output()
        tensors = {t.name: t.data for t in read_gguf(path).tensors}
        epsilon = float(str(model.header.metadata["llama.attention.layer_norm_rms_epsilon"]))
        normed = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + epsilon) * tensors["output_norm.weight"]
        assert difference(short.decode(ids, outputs=len(ids)), normed @ tensors["output.weight"].T) < SAME


def test_all_layers_with_the_head_are_the_same_file(draft_path: Path, tmp_path: Path) -> None:
    cut(draft_path, tmp_path / "all.gguf", 0, check_cuttable(check_gguf(draft_path)) - 1, head=True)
    assert (tmp_path / "all.gguf").read_bytes() == draft_path.read_bytes()


def test_a_shard_can_be_cut_again(draft_path: Path, tmp_path: Path) -> None:
    cut(draft_path, tmp_path / "once.gguf", 2, 4, head=False)
    cut(draft_path, tmp_path / "some.gguf", 0, 6, head=True)
    cut(tmp_path / "some.gguf", tmp_path / "twice.gguf", 2, 4, head=False)
    assert (tmp_path / "twice.gguf").read_bytes() == (tmp_path / "once.gguf").read_bytes()


# --- what is refused ------------------------------------------------------------------------------------------------


def arch(name: bytes, *more: headers.Entry) -> bytes:
    return headers.file((headers.string(b"general.architecture", name), headers.u32(name + b".block_count", 4), *more))


HEADS = headers.numbers(b"llama.attention.head_count", (2, 2, 2))


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (arch(b"deepseek2"), ModelUnsupported, "no deepseek2.expert_gating_func"),
        (arch(b"llama", headers.numbers(b"llama.new_thing", (1, 2, 3, 4))), ModelUnsupported, "the array llama.new_th"),
        (arch(b"llama", (b"split.count", 2, struct.pack("<H", 3))), ModelUnsupported, "is one of 3 parts"),
        (arch(b"llama", HEADS), ModelCorrupt, "attention.head_count for each of its 4 layers"),
        (arch(b"llama", headers.u32(b"llama.nextn_predict_layers", 4)), ModelCorrupt, "how many layers"),
    ],
)
def test_what_may_not_be_cut_is_refused(data: bytes, error: type[EdgeError], says: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(data)
    with pytest.raises(error, match=says):
        cut(path, tmp_path / "shard.gguf", 0, 1, head=True)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (0, 2), (2, 2), (1, 0)])
def test_layers_must_exist(tiny_path: Path, tmp_path: Path, first: int, last: int) -> None:
    with pytest.raises(InvalidOption, match="layers run from 0 to 1"):
        cut(tiny_path, tmp_path / "shard.gguf", first, last, head=True)
    assert list(tmp_path.iterdir()) == []


def broken(*_: object) -> Iterator[bytes]:
    yield b"some"
    raise OSError(28, "No space left on device")


def test_a_failed_cut_leaves_nothing(tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.engine.gguf.cuttable.copied", broken)
    (tmp_path / "shard.gguf").write_bytes(b"an older one")
    with pytest.raises(OSError, match="No space"):
        cut(tiny_path, tmp_path / "shard.gguf", 0, 0, head=True)
    assert [path.name for path in tmp_path.iterdir()] == ["shard.gguf"]
    assert (tmp_path / "shard.gguf").read_bytes() == b"an older one"


def test_a_file_that_shrinks_is_noticed(tiny_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(tiny_path.read_bytes())
    opened = ModelFile.open(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelCorrupt, match="ends within tensor"):
        list(cut_bytes(opened, 0, 1, head=True))
