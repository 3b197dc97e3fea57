"""The process that holds a model: it decodes as this one does, says what goes wrong, and its end is an error."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model, SeqRows
from edgellm.engine.hardware import Hardware
from edgellm.errors import ContextFull, DeviceLost, EngineFailed, ModelCorrupt
from edgellm.rpc_engine.process import ModelProcess
from tests.conftest import Architectures
from tests.engine.logits import some_ids

SIZES = ContextSpec(n_ctx=128, n_seq=2, n_batch=64, unified=False, rolls_back=True)
IDS = some_ids(40, 2000, 3)


@pytest.fixture(scope="module")
def hybrid(architectures: Architectures) -> Path:
    return architectures("lfm2")


@pytest.fixture(scope="module")
def whole(hybrid: Path) -> Iterator[Model]:
    with Model.load(hybrid) as model:
        yield model


@pytest.fixture(scope="module")
def process(hybrid: Path, whole: Model) -> Iterator[ModelProcess]:
    made = ModelProcess(hybrid, whole.n_vocab, SIZES, Hardware(threads=1))
    made.load([])
    yield made
    made.close()


@pytest.fixture
def expected(whole: Model) -> Iterator[Context]:
    with Context(whole, replace(SIZES, threads=1)) as context:
        yield context


@pytest.fixture
def empty(process: ModelProcess) -> ModelProcess:
    for seq in range(SIZES.n_seq):
        process.clear(seq)
    return process


def test_it_decodes_rolls_back_and_syncs_as_a_context_here(empty: ModelProcess, expected: Context) -> None:
    for rows in ([SeqRows(0, IDS[:20], 3)], [SeqRows(0, IDS[20:24], 4), SeqRows(1, IDS[5:9], 4)]):
        for found, wanted in zip(empty.decode_rows(rows), expected.decode_rows(rows), strict=True):
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)
    for change in ("rollback", "sync"):
        for context in (empty, expected):
            if change == "rollback":
                context.rollback(22, 0)
            else:
                context.sync(IDS[:10], 0)
        assert np.array_equal(empty.cached(0), expected.cached(0))
        more = [SeqRows(0, IDS[len(expected.cached(0)) :][:3], 1)]
        found, wanted = empty.decode_rows(more)[0], expected.decode_rows(more)[0]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)


def test_a_prefix_is_copied_and_a_sequence_cleared(empty: ModelProcess) -> None:
    empty.decode_rows([SeqRows(0, IDS[:20], 1)])
    empty.copy_prefix(0, 1, 12)
    assert np.array_equal(empty.cached(1), IDS[:12])
    alone = empty.decode_rows([SeqRows(0, IDS[20:22], 1)])[0].argmax()
    assert empty.decode_rows([SeqRows(1, IDS[12:22], 1)])[0].argmax() == alone
    empty.clear(0)
    assert not len(empty.cached(0))


def test_errors_come_through_as_they_are_and_nothing_has_changed(empty: ModelProcess) -> None:
    empty.decode_rows([SeqRows(0, IDS, 1)])
    with pytest.raises(ContextFull):
        empty.decode_rows([SeqRows(0, np.concatenate((IDS, IDS, IDS)), 1)])
    with pytest.raises(EngineFailed):
        empty.decode_rows([SeqRows(0, np.array([2**30], np.int32), 1)])
    assert np.array_equal(empty.cached(0), IDS)


def test_what_it_needs_is_known_before_it_is_loaded(hybrid: Path, whole: Model) -> None:
    made = ModelProcess(hybrid, whole.n_vocab, SIZES, Hardware(threads=1))
    caches, compute = made.beside_weights()
    assert caches > 0
    assert compute > 0
    with pytest.raises(EngineFailed, match="No model is loaded"):
        made.sync(IDS)
    made.close()


def test_its_end_is_an_error_and_not_ours(hybrid: Path, whole: Model) -> None:
    made = ModelProcess(hybrid, whole.n_vocab, SIZES, Hardware(threads=1))
    made.load([])
    made.kill()
    with pytest.raises(DeviceLost, match="has ended"):
        made.decode_rows([SeqRows(0, IDS, 1)])
    made.close()


def test_a_file_that_cannot_be_loaded_is_refused(tmp_path: Path, verifier_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(verifier_path.read_bytes()[:-1000])
    made = ModelProcess(path, 2560, SIZES, Hardware(threads=1))
    with pytest.raises(ModelCorrupt, match=r"cut\.gguf"):
        made.load([])
    made.close()
