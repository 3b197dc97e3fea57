"""Reproducible contexts: logits do not depend on how ids were batched, to the bit."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Ids, Model, SeqRows
from edgellm.engine.context import padding_of
from edgellm.engine.kv.row_padding import PADDINGS, Padding, agree
from edgellm.errors import ModelUnsupported
from edgellm.system import bundled_dirs
from tests.engine.test_cuttable import ShardChain

SPEC = ContextSpec(100, n_batch=64, threads=1, reproducible=True)


@pytest.fixture(scope="module")
def quantised() -> Iterator[Model]:
    """A model with weights that llama.cpp lays out for products of four rows, on processors that have them."""
    with Model.load(bundled_dirs()[1] / "smollm2" / "draft.gguf") as model:
        yield model


@pytest.fixture(scope="module")
def ids(quantised: Model) -> Ids:
    return np.random.default_rng(3).integers(0, quantised.n_vocab, 100).astype(np.int32)


@pytest.mark.parametrize("padding", PADDINGS, ids=str)
def test_the_cheapest_padding_is_found_by_which_all_passes_agree(padding: Padding) -> None:
    """A decoder that computes a row by its place in a product of `multiple` rows, or by whether it is alone."""

    def decodes(padded: Padding, rows: Ids, position: int, outputs: int) -> np.ndarray:
        n = padded.rows(len(rows))
        places = np.arange(len(rows) - outputs, len(rows))
        alone = n < padding.least or (places >= n - n % padding.multiple)
        return np.stack((position + places, alone * np.ones(outputs)), axis=1).astype(np.float32)

    fits = [one for one in PADDINGS if agree(lambda *asked, one=one: decodes(one, *asked), 10)]
    assert fits[0] == padding


def test_what_was_found_is_kept(quantised: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path))
    with Context(quantised, SPEC) as context:
        found = context.native_spec.padding
        assert padding_of(quantised, context.native_spec, lambda _: False) == found
        next(tmp_path.glob("cache/probed/rows-*")).write_text("{", encoding="utf-8")
        with pytest.raises(ModelUnsupported, match="Leave out --reproducible"):
            padding_of(quantised, context.native_spec, lambda _: False)


def test_logits_do_not_depend_on_pieces_outputs_or_room(quantised: Model, ids: Ids) -> None:
    with Context(quantised, SPEC) as context:
        expected = None
        for pieces in ((100,), (64, 36), (1, 2, 3, 5, 89), (50, 7, 43), (99, 1)):
            context.clear()
            at = 0
            for piece in pieces:
                rows = context.decode(ids[at : at + piece], outputs=min(piece, 1 + at % 5)).copy()
                at += piece
            assert context.length() == 100
            assert expected is None or np.array_equal(rows[-1], expected)
            expected = rows[-1]


def test_logits_do_not_depend_on_other_sequences(quantised: Model, ids: Ids) -> None:
    spec = ContextSpec(48, n_seq=3, n_batch=64, threads=1, unified=False, reproducible=True)
    with Context(quantised, spec) as context:
        for seq in range(3):
            context.decode(ids[seq : 20 + seq], seq=seq)
        together = [rows.copy() for rows in context.decode_rows([SeqRows(seq, ids[40:43], 3) for seq in range(3)])]
        for seq in range(3):
            context.rollback(20, seq)
            assert np.array_equal(context.decode(ids[40:43], seq=seq, outputs=3), together[seq])
            context.rollback(20, seq)
            single = [context.decode(ids[at : at + 1], seq=seq)[0].copy() for at in range(40, 43)]
            assert np.array_equal(single, together[seq])


def test_layers_on_several_devices_compute_rows_alike(quantised: Model, ids: Ids, tmp_path: Path) -> None:
    """A block's rows do not depend on those beside them, and all blocks together give the whole model's logits."""
    starts, found = (0, quantised.n_layer // 2), []
    with (
        Context(quantised, SPEC) as context,
        ShardChain(quantised.path, tmp_path, starts, replace(SPEC, n_seq=2)) as chain,
    ):
        whole = context.decode(ids, outputs=3).copy()
        for pieces in ((64, 36), (50, 47, 1, 1, 1)):
            chain.rollback(0)
            for piece, end in zip(pieces, accumulate(pieces), strict=True):
                rows = chain.decode(ids[end - piece : end], outputs=min(piece, 3))
            found.append(rows[-1].copy())
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(whole[-1], found[1])
