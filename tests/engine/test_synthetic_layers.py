"""Layers of random weights: whatever the quantisation, they load, compute, and stay numbers."""

from dataclasses import replace
from functools import partial
from itertools import repeat
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Model, ModelFile, check_gguf, cut
from edgellm.engine.gguf import synthetic_layers as timing
from edgellm.engine.gguf import writer
from edgellm.engine.gguf.header import TENSOR_TYPES
from edgellm.engine.gguf.reader import raw_entries
from edgellm.engine.gguf.synthetic_layers import Blocks, blocks_of, time_passes, write_random
from edgellm.engine.hardware import Hardware
from edgellm.errors import EdgeError, InvalidOption, ModelCorrupt, ModelUnsupported
from testkit.gguf.random_model import Shape, write
from testkit.gguf.split_file import split
from tests.conftest import Architectures

WIDE = Shape("llama", 300, 3, 256, 2, 1, 512, 64)
NOT_FOR_WEIGHTS = {"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"}
KINDS = {name: kind for kind, (name, *_) in TENSOR_TYPES.items() if name not in NOT_FOR_WEIGHTS}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("wide") / "wide.gguf"
    write(path, WIDE, "F32")
    return path


def quantised(wide: Path, kind: int, path: Path) -> Path:
    """The model with its matrices in another type, of zeros."""
    file = ModelFile.open(wide)
    tensors: list[writer.NewTensor] = []
    for t in file.header.tensors:
        bare = t.name.startswith("blk.") and len(t.shape) > 1
        new = replace(t, kind=kind) if bare else t
        tensors.append((new, partial(repeat, bytes(new.nbytes), 1)))
    writer.write(path, writer.portions(file.header, raw_entries(file).values(), tensors))
    return path


@pytest.mark.parametrize("name", KINDS)
def test_layers_of_every_quantisation_compute_numbers(wide: Path, name: str, tmp_path: Path) -> None:
    blocks = blocks_of(ModelFile.open(quantised(wide, KINDS[name], tmp_path / "model.gguf")))
    assert (blocks.layers, blocks.width) == (2, 256)
    assert len(blocks.header) < 10_000
    path = tmp_path / "blocks.gguf"
    write_random(blocks, path)
    assert path.stat().st_size == len(blocks.header) + blocks.data
    rows = np.random.default_rng(0).standard_normal((5, 256), dtype=np.float32)
    with (
        Model.load(path) as model,
        Context(model, ContextSpec(n_ctx=16, threads=1), capture=Capture(stop_after=1)) as context,
    ):
        context.decode_embeddings(rows)
        assert context.captured is not None
        out = context.captured.output()
        assert np.isfinite(out).all()
        assert 0.0 < np.abs(out - rows).max() < 1e6


def test_passes_are_timed_for_more_and_more_tokens(wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROWS", (1, 4, 16))
    blocks = blocks_of(ModelFile.open(wide))
    write_random(blocks, tmp_path / "blocks.gguf")
    doing: list[str] = []
    rows, seconds = time_passes([tmp_path / "blocks.gguf"], blocks, Hardware(threads=1), doing.append)
    assert rows == (1, 4, 16)
    assert all(taken > 0 for taken in seconds)
    assert "computing 16 tokens" in doing
    monkeypatch.setattr(timing, "_ROUND_MOST", 0.0)  # as on a device that takes ages
    assert time_passes([tmp_path / "blocks.gguf"], blocks, Hardware(threads=1))[0] == (1,)


def test_shapes_are_told_apart_and_models_of_one_shape_are_not(wide: Path, tmp_path: Path, verifier_path: Path) -> None:
    write(tmp_path / "wide.gguf", WIDE, "F32", seed=7)
    assert blocks_of(ModelFile.open(tmp_path / "wide.gguf")).key == blocks_of(ModelFile.open(wide)).key
    assert blocks_of(ModelFile.open(verifier_path)).key != blocks_of(ModelFile.open(wide)).key


def test_a_model_of_one_layer_has_nothing_to_share_out(tmp_path: Path) -> None:
    write(tmp_path / "one.gguf", replace(WIDE, n_layer=1), "F32")
    with pytest.raises(ModelUnsupported, match="cannot be cut into two parts"):
        blocks_of(ModelFile.open(tmp_path / "one.gguf"))


@pytest.mark.parametrize(("name", "first"), [("afmoe of 8 layers", 4), ("gemma3", 1), ("glm4moe", 1)])
def test_layers_are_timed_that_can_be_cut_out_and_are_not_the_first_ones(
    name: str, first: int, architectures: Architectures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgellm.engine.gguf.synthetic_layers.ENOUGH", 200_000)
    blocks = blocks_of(ModelFile.open(architectures(name)))
    write_random(blocks, tmp_path / "random.gguf")
    cut(architectures(name), tmp_path / "real.gguf", first, first + blocks.layers - 1, head=False)
    assert check_gguf(tmp_path / "random.gguf").tensors == check_gguf(tmp_path / "real.gguf").tensors
    with Model.load(tmp_path / "random.gguf") as model:
        assert model.n_layer == blocks.layers


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"header": b""}, InvalidOption),
        ({"header": b"GGUF" + bytes(100)}, EdgeError),
        ({"header": bytes(2**20 + 1)}, InvalidOption),
        ({"data": 0}, InvalidOption),
        ({"data": 2**60}, InvalidOption),
        ({"data": 1000}, ModelCorrupt),
        ({"layers": 3}, InvalidOption),
    ],
)
def test_what_cannot_be_meant_is_refused_and_leaves_nothing(
    wide: Path, tmp_path: Path, change: dict[str, object], error: type[EdgeError]
) -> None:
    with pytest.raises(error):
        write_random(replace(blocks_of(ModelFile.open(wide)), **change), tmp_path / "blocks.gguf")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_part_of_a_split_model_is_refused_and_leaves_nothing(wide: Path, tmp_path: Path) -> None:
    part = split(wide, tmp_path, 2)
    header, data = check_gguf(part), part.read_bytes()
    blocks = Blocks(data[: header.data_offset], len(data) - header.data_offset, WIDE.n_layer, WIDE.n_embd)
    with pytest.raises(ModelUnsupported, match="one of 2 parts"):
        write_random(blocks, tmp_path / "blocks.gguf")
    assert not (tmp_path / "blocks.gguf").exists()


def test_a_tiny_layer_is_taken_often_enough(verifier_path: Path) -> None:
    blocks = blocks_of(ModelFile.open(verifier_path))
    assert isinstance(blocks, Blocks)
    assert blocks.layers == 11  # all but the first
    assert 0 <= blocks.data - blocks.layer * blocks.layers < 20_000  # the sliver of an embedding
