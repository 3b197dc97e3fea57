"""Ranges of layers as models of their own: in a chain they are the whole model."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Model, ModelFile, check_gguf, cut, cut_bytes
from edgellm.engine.gguf import writer
from edgellm.engine.gguf.cuttable import check_cuttable
from edgellm.engine.gguf.reader import raw_entries
from edgellm.engine.gguf.writer import token_count
from edgellm.engine.vocabulary import tokenizer_hash
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported
from testkit.gguf.random_model import Shape, write
from testkit.gguf.reader import read_gguf
from tests.engine import headers
from tests.engine.logits import difference, some_ids
from tests.engine.shard_chain import WholeModel

SAME = 1e-5  # of the largest logit

SHAPES = {
    "llama": Shape("llama", 400, 4, 64, 2, 1, 96, 512),
    "qwen2": Shape("qwen2", 400, 4, 64, 2, 1, 96, 512, bias=True),
    "qwen3": Shape("qwen3", 400, 4, 64, 2, 1, 96, 512),
    "llama with experts": Shape("llama", 400, 4, 64, 2, 1, 96, 512, n_expert=4),
    "qwen3moe": Shape("qwen3moe", 400, 4, 64, 2, 1, 96, 512, n_expert=4),
    "untied": Shape("qwen2", 400, 4, 64, 2, 1, 96, 512, bias=True, tied=False),
}


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", SHAPES)
def test_architectures_of_the_same_kind_tied_or_not(name: str, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    write(path, SHAPES[name], kind)
    assert WholeModel(path).largest_difference(tmp_path, (0, 1, 3)) < SAME
    first, middle, last = (check_gguf(tmp_path / f"{part}.gguf") for part in ("0-0", "1-2", "3-3"))
    assert tokenizer_hash(ModelFile.open(path)) == tokenizer_hash(ModelFile.open(tmp_path / "0-0.gguf"))
    assert token_count(first) == 400
    assert token_count(last) == 0
    # one matrix of the vocabulary's size at the most: the head where there is one, else a sliver
    assert middle.metadata[f"{middle.architecture}.vocab_size"] == 32
    assert sum(t.shape[1:] == (400,) for t in last.tensors) == 1
    with Model.load(tmp_path / "3-3.gguf") as model, pytest.raises(ModelUnsupported, match="no tokenizer"):
        model.tokenize("x")


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_behind_any_layer(tied: bool, tmp_path: Path, f32_pair: tuple[Path, Path]) -> None:
    path = f32_pair[0]
    if tied:
        path = tmp_path / "tied.gguf"
        write(path, SHAPES["llama"], "F32")
    cut(path, tmp_path / "exit.gguf", 0, 2, head=True)
    ids = some_ids(9, 390)
    with (
        Model.load(path) as model,
        Model.load(tmp_path / "exit.gguf") as shard,
        Context(model, ContextSpec(n_ctx=16, threads=1), capture=Capture(outputs=(2,))) as whole,
        Context(shard, ContextSpec(n_ctx=16, threads=1)) as short,
    ):
        whole.decode(ids)
        assert whole.captured is not None
        rows = whole.captured.output(2)
        tensors = {t.name: t.data for t in read_gguf(path).tensors}
        epsilon = float(str(model.header.metadata["llama.attention.layer_norm_rms_epsilon"]))
        normed = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + epsilon) * tensors["output_norm.weight"]
        head = tensors["token_embd.weight" if tied else "output.weight"]
        assert difference(short.decode(ids, outputs=len(ids)), normed @ head.T) < SAME


def test_all_layers_with_the_head_are_the_same_file(draft_path: Path, tmp_path: Path) -> None:
    cut(draft_path, tmp_path / "all.gguf", 0, check_cuttable(check_gguf(draft_path)) - 1, head=True)
    assert (tmp_path / "all.gguf").read_bytes() == draft_path.read_bytes()


def test_tensors_are_the_same_bytes_and_the_rest_of_the_metadata_stays(draft_path: Path, tmp_path: Path) -> None:
    shard = tmp_path / "shard.gguf"
    cut(draft_path, shard, 2, 4, head=True)
    before, after = check_gguf(draft_path), check_gguf(shard)
    data = {path: path.read_bytes() for path in (draft_path, shard)}
    source = {t.name: t for t in before.tensors}
    assert sum(t.name.startswith("blk.") for t in after.tensors) == 3 * 9
    for t in after.tensors:
        name = t.name
        if name.startswith("blk."):
            _, layer, rest = name.split(".", 2)
            name = f"blk.{int(layer) + 2}.{rest}"
        was = source["output.weight" if name == "token_embd.weight" else name]
        assert (t.kind, t.shape) == (was.kind, was.shape)
        assert data[shard][t.offset : t.offset + t.nbytes] == data[draft_path][was.offset : was.offset + was.nbytes]
    assert after.metadata["llama.block_count"] == 3
    assert after.metadata["tokenizer.ggml.model"] == "no_vocab"
    kept = {k: v for k, v in before.metadata.items() if not k.startswith("tokenizer.") and k != "llama.block_count"}
    assert {k: after.metadata.get(k) for k in kept} == kept
    assert set(after.metadata) - set(kept) == {"llama.block_count", "tokenizer.ggml.model"}


def test_a_shard_can_be_cut_again(draft_path: Path, tmp_path: Path) -> None:
    cut(draft_path, tmp_path / "once.gguf", 2, 4, head=False)
    cut(draft_path, tmp_path / "some.gguf", 0, 6, head=True)
    cut(tmp_path / "some.gguf", tmp_path / "twice.gguf", 2, 4, head=False)
    assert (tmp_path / "twice.gguf").read_bytes() == (tmp_path / "once.gguf").read_bytes()


def with_arrays(plain: Path, path: Path, values: dict[str, tuple[int, ...]]) -> None:
    """Copies a model, with one value per layer in place of single ones."""
    header = check_gguf(plain)
    with plain.open("rb") as source:
        entries = raw_entries([source], header)
        for name, numbers in values.items():
            array = struct.pack(f"<IQ{len(numbers)}I", 4, len(numbers), *numbers)
            entries[name] = headers.text(name.encode()) + struct.pack("<I", 9) + array
        tensors = [writer.NewTensor.copy(source, t) for t in header.tensors]
        writer.write(path, writer.portions(header, entries.values(), tensors))


def test_values_per_layer_are_sliced(tmp_path: Path) -> None:
    plain, arrays, shard, other = (tmp_path / f"{name}.gguf" for name in ("plain", "arrays", "shard", "other"))
    write(plain, SHAPES["llama"], "F32")
    names = [f"llama.{name}" for name in ("attention.head_count", "attention.head_count_kv", "feed_forward_length")]
    with_arrays(plain, arrays, dict.fromkeys(names, (10, 11, 12, 13)))
    for first, last in ((0, 1), (1, 3), (2, 2)):
        cut(arrays, shard, first, last, head=True)
        for name in names:
            assert check_gguf(shard).metadata[name] == tuple(range(10 + first, 11 + last))
    with_arrays(plain, arrays, dict(zip(names, ((2,) * 4, (1,) * 4, (96,) * 4), strict=True)))
    cut(arrays, shard, 1, 3, head=True)
    cut(plain, other, 1, 3, head=True)
    rows = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    with (
        Model.load(shard) as one,
        Model.load(other) as two,
        Context(one, ContextSpec(n_ctx=8, threads=1)) as a,
        Context(two, ContextSpec(n_ctx=8, threads=1)) as b,
    ):
        np.testing.assert_array_equal(a.decode_embeddings(rows), b.decode_embeddings(rows))


# --- what is refused ------------------------------------------------------------------------------------------------


def arch(name: bytes, *more: headers.Entry) -> bytes:
    return headers.file((headers.string(b"general.architecture", name), headers.u32(name + b".block_count", 4), *more))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (arch(b"mamba"), "recurrent state cannot be rolled back"),
        (arch(b"unheard-of"), "does not know what its layers depend on"),
        (arch(b"deepseek2"), "no deepseek2.expert_gating_func"),
        (arch(b"llama", headers.numbers(b"llama.new_thing", (1, 2, 3, 4))), "the array llama.new_thing"),
        (arch(b"llama", (b"split.count", 2, struct.pack("<H", 3))), "is one of 3 parts"),
    ],
)
def test_what_may_not_be_cut_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelUnsupported, match=says):
        cut(path, tmp_path / "shard.gguf", 0, 1, head=True)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (headers.numbers(b"llama.attention.head_count", (2, 2, 2)), "attention.head_count for each of its 4 layers"),
        (headers.u32(b"llama.nextn_predict_layers", 4), "how many layers"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(more: headers.Entry, says: str, tmp_path: Path) -> None:
    path = tmp_path / "whole.gguf"
    path.write_bytes(arch(b"llama", more))
    with pytest.raises(ModelCorrupt, match=says):
        cut(path, tmp_path / "shard.gguf", 0, 1, head=True)


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
