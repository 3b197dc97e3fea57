"""Models that are split over several files: read as the one file that they were."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, LazyLogits, Model, ModelFile, check_gguf, costs_of, cut
from edgellm.engine.gguf.reader import TensorInfo
from edgellm.engine.gguf.synthetic_layers import blocks_of
from edgellm.engine.trial.probe import Probe
from edgellm.errors import ModelCorrupt, ModelNotFound, ModelUnsupported
from testkit.gguf.split_file import entry, split
from tests.engine.headers import LLAMA, file
from tests.engine.logits import some_ids

IDS = some_ids(40)


@pytest.fixture(scope="module")
def first(verifier_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first of three parts of the bundled verifier."""
    return split(verifier_path, tmp_path_factory.mktemp("parts"), 3)


def described(tensor: TensorInfo) -> tuple[object, ...]:
    return tensor.name, tensor.shape, tensor.kind, tensor.nbytes


def bytes_of(file: ModelFile, tensor: TensorInfo) -> bytes:
    with file.paths[tensor.part].open("rb") as source:
        source.seek(tensor.offset)
        return source.read(tensor.nbytes)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.integers(2, 9), empty_first=st.booleans())
def test_all_parts_are_one_model(draft_path: Path, tmp_path: Path, parts: int, empty_first: bool) -> None:
    whole, file = (
        ModelFile.open(draft_path),
        ModelFile.open(split(draft_path, tmp_path, parts, empty_first=empty_first)),
    )
    assert len(file.paths) == parts
    assert list(map(described, file.header.tensors)) == list(map(described, whole.header.tensors))
    for one, other in zip(file.header.tensors, whole.header.tensors, strict=True):
        assert bytes_of(file, one) == bytes_of(whole, other)
    assert file.header.file_size == sum(path.stat().st_size for path in file.paths)
    assert (file.name, file.path) == (whole.name, file.paths[0])
    assert costs_of(file.header) == costs_of(whole.header)


def test_it_decodes_as_the_whole_file_does(first: Path, verifier_path: Path) -> None:
    with Model.load(first) as one, Model.load(verifier_path) as other:
        assert (one.n_params, one.is_f32, one.n_layer) == (other.n_params, other.is_f32, other.n_layer)
        assert one.size_bytes == ModelFile.open(first).header.file_size
        assert one.vocabulary == other.vocabulary
        with (
            Context(one, ContextSpec(n_ctx=64, threads=1)) as split_up,
            Context(other, ContextSpec(n_ctx=64, threads=1)) as whole,
        ):
            np.testing.assert_array_equal(split_up.decode(IDS, outputs=3), whole.decode(IDS, outputs=3))


def test_its_heads_are_computed_late_and_are_the_same(first: Path, verifier_path: Path) -> None:
    found = []
    for path in (first, verifier_path):
        with Model.load(path) as model, Context(model, ContextSpec(n_ctx=64, threads=1, lazy=True)) as context:
            context.decode_lazy(IDS[:2], outputs=2)  # finds out whether the others can be late
            rows = context.decode_lazy(IDS[2:10], outputs=8)
            assert isinstance(rows, LazyLogits)
            found.append(rows.upto(8).copy())
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize(("start", "last"), [(0, 4), (3, 11), (11, 11)])
def test_cut_layers_are_the_same_bytes(first: Path, verifier_path: Path, tmp_path: Path, start: int, last: int) -> None:
    for head in (False, True):
        names = [tmp_path / f"{name}-{head}.gguf" for name in ("split", "whole")]
        for source, name in zip((first, verifier_path), names, strict=True):
            cut(source, name, start, last, head=head)
        assert names[0].read_bytes() == names[1].read_bytes()


def test_what_is_measured_is_the_same(first: Path, verifier_path: Path) -> None:
    assert blocks_of(ModelFile.open(first)) == blocks_of(ModelFile.open(verifier_path))


def test_the_trial_of_a_split_model_covers_all_parts(first: Path, tmp_path: Path) -> None:
    file = ModelFile.open(first)
    before = Probe(file.paths, file.parts).key()
    copies = [tmp_path / path.name for path in file.paths]
    for path, copy in zip(file.paths, copies, strict=True):
        copy.write_bytes(path.read_bytes())
    copies[2].write_bytes(copies[2].read_bytes().replace(entry("split.no", 2), entry("split.no", 7)))
    assert Probe(copies, [check_gguf(copy) for copy in copies]).key() != before


# --- parts that are missing, wrong or mixed up ----------------------------------------------------------------------


@pytest.fixture
def parts(draft_path: Path, tmp_path: Path) -> tuple[Path, ...]:
    return ModelFile.open(split(draft_path, tmp_path, 3)).paths


def test_a_later_part_is_not_the_one_to_name(parts: tuple[Path, ...]) -> None:
    with pytest.raises(ModelUnsupported, match=r"one of 3 parts.*ends in -00001-of-00003\.gguf"):
        ModelFile.open(parts[1])


def test_more_parts_than_any_model_has_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-70000.gguf"
    keys = [(b"split.no", 2, bytes(2)), (b"split.count", 4, (70_000).to_bytes(4, "little"))]
    path.write_bytes(file([*LLAMA, *keys]))
    with pytest.raises(ModelCorrupt, match="one of 70000 parts; 65536 are possible"):
        ModelFile.open(path)


def missing(parts: Sequence[Path], _other: Path) -> None:
    parts[2].unlink()


def cut_short(parts: Sequence[Path], _other: Path) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:-64])


def in_another_order(parts: Sequence[Path], _other: Path) -> None:
    second, third = parts[1].read_bytes(), parts[2].read_bytes()
    parts[1].write_bytes(third)
    parts[2].write_bytes(second)


def of_two_models(parts: Sequence[Path], other: Path) -> None:
    parts[2].write_bytes(ModelFile.open(other).paths[2].read_bytes())


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (missing, r"no model file at .*-00003-of-00003\.gguf"),
        (cut_short, r"-00002-of-00003\.gguf has "),
        (in_another_order, r"00002-of-00003\.gguf is not part 2 of 3"),
        (of_two_models, r"announces \d+ tensors in its 3 parts"),
    ],
)
def test_parts_that_are_spoilt_are_refused(
    parts: tuple[Path, ...], first: Path, spoil: Callable[[Sequence[Path], Path], None], says: str
) -> None:
    spoil(parts, first)
    with pytest.raises((ModelNotFound, ModelCorrupt), match=says):
        ModelFile.open(parts[0])


def test_a_tensor_that_is_there_twice_is_refused(draft_path: Path, tmp_path: Path) -> None:
    paths = ModelFile.open(split(draft_path, tmp_path, 4)).paths
    copy = paths[1].read_bytes()  # with as many tensors as the part that it replaces
    paths[2].write_bytes(copy.replace(entry("split.no", 1), entry("split.no", 2)))
    with pytest.raises(ModelCorrupt, match="in several of its 4 parts"):
        ModelFile.open(paths[0])


def test_a_model_may_be_put_together_from_files_of_any_name(parts: tuple[Path, ...], tmp_path: Path) -> None:
    blobs = [path.rename(tmp_path / f"blob{number}") for number, path in enumerate(parts)]
    assert len(ModelFile.of(blobs).paths) == 3
    with pytest.raises(ModelCorrupt, match="a model of 3 files, not of 2"):
        ModelFile.of(blobs[:2])
    with pytest.raises(ModelUnsupported, match="one of 3 parts"):
        ModelFile.open(blobs[0])
