"""The cache: whatever was decoded, rolled back or branched before, logits are those of a fresh context."""

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Model, SeqRows, native
from edgellm.errors import ContextFull, InvalidOption
from tests.engine.conftest import MakeModel
from tests.engine.logits import CLOSE, difference, one_by_one, some_ids
from tests.watching import calls_of


def test_what_exceeds_a_batch_is_split(exact_model: Model) -> None:
    ids = some_ids(50)
    reference = one_by_one(exact_model, ids)
    with Context(exact_model, ContextSpec(n_ctx=64, n_batch=16, threads=1)) as small:
        for outputs in (0, 1, 7, 16, 40, 50):
            small.clear()
            logits = small.decode(ids, outputs=outputs)
            assert len(logits) == outputs
            assert outputs == 0 or difference(logits, reference[50 - outputs :]) < CLOSE
            assert small.cached().tolist() == ids.tolist()


@pytest.mark.parametrize("length", [-1, 6])
def test_rollback_to_what_is_not_there(context: Context, length: int) -> None:
    context.decode(some_ids(5))
    with pytest.raises(InvalidOption, match=f"roll back to {length}"):
        context.rollback(length)
    assert context.length() == 5


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.parametrize("n_batch", [8, 64])
def test_many_sequences_in_one_batch(exact_model: Model, unified: bool, n_batch: int) -> None:
    texts = [some_ids(20, seed=seed) for seed in range(4)]
    cuts, outputs = [3, 10, 0, 19], [2, 0, 4, 1]
    with Context(exact_model, ContextSpec(n_ctx=32, n_seq=4, n_batch=n_batch, threads=1, unified=unified)) as context:
        for seq, (ids, cut) in enumerate(zip(texts, cuts, strict=True)):
            if cut:
                context.decode(ids[:cut], seq=seq)
        order = [2, 0, 3, 1]
        views = context.decode_rows([SeqRows(s, texts[s][cuts[s] :], outputs[s]) for s in order])
        for seq, view in zip(order, views, strict=True):
            assert context.cached(seq).tolist() == texts[seq].tolist()
            assert view.shape == (outputs[seq], exact_model.n_vocab)
            if outputs[seq]:
                assert difference(view, one_by_one(exact_model, texts[seq])[20 - outputs[seq] :]) < CLOSE


def test_rows_of_one_sequence_come_once(context: Context) -> None:
    with pytest.raises(InvalidOption, match="twice"):
        context.decode_rows([SeqRows(0, some_ids(2)), SeqRows(0, some_ids(2))])
    assert context.decode_rows([]) == []


def test_too_many_rows_of_logits(exact_model: Model) -> None:
    with Context(exact_model, ContextSpec(n_ctx=32, n_seq=2, n_batch=8)) as context:
        with pytest.raises(InvalidOption, match="10 rows of logits"):
            context.decode_rows([SeqRows(0, some_ids(6), 5), SeqRows(1, some_ids(6), 5)])
        for outputs in (-1, 13):
            with pytest.raises(InvalidOption, match="rows of logits"):
                context.decode(some_ids(12), outputs=outputs)
        assert context.length(0) == context.length(1) == 0


def test_embeddings_stand_for_tokens(make_model: MakeModel) -> None:
    model = make_model()
    table = next(t for t in model.header.tensors if t.name == "token_embd.weight")
    data = np.fromfile(model.path, dtype=np.float32, count=table.n_elements, offset=table.offset).reshape(
        -1, model.n_embd
    )
    ids = some_ids(30, model.n_vocab)
    with Context(model, ContextSpec(n_ctx=64, n_batch=8, threads=1)) as context:
        logits = context.decode_embeddings(data[ids], outputs=5).copy()
        assert context.cached().tolist() == [-1] * 30
        assert context.sync(ids) == 0
        assert difference(logits, one_by_one(model, ids)[25:]) < CLOSE
        with pytest.raises(InvalidOption, match="Embedding rows"):
            context.decode_embeddings(data[ids][:, :-1])
        with pytest.raises(ContextFull):
            context.decode_embeddings(data[np.zeros(65, dtype=int)])


@pytest.mark.processor
def test_flash_attention_is_left_out_where_it_is_slower(draft_model: Model, exact_model: Model) -> None:
    with (
        Context(draft_model, ContextSpec(n_ctx=8)) as small,
        Context(exact_model, ContextSpec(n_ctx=8, flash=True)) as exact,
    ):
        assert not small.native_spec.flash
        assert not exact.native_spec.flash  # whose logits would depend on the batch
    with Context(draft_model, ContextSpec(n_ctx=8, flash=True)) as asked:
        assert asked.native_spec.flash
    pays = native.flash_pays
    assert (pays(500_000_000, 512), pays(500_000_000, 32), pays(5_000_000, 512)) == (True, False, False)


WIDTHS = [0, 1, 4, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 9])
@pytest.mark.parametrize("outputs", [0, 1, 2])
def test_it_changes_nothing_that_is_seen(
    exact_model: Model, n: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, spec = np.arange(300, 330, dtype=np.int32), ContextSpec(n_ctx=64)
    with Context(exact_model, spec) as one, Context(exact_model, spec) as other:
        one.fill(WIDTHS)
        batches = calls_of(monkeypatch, one, "_run")
        for at in (0, n, 2 * n):
            given = min(outputs, n)
            filled, plain = (c.decode(ids[at : at + n], outputs=given).copy() for c in (one, other))
            assert filled.shape == plain.shape
            assert np.allclose(filled, plain, atol=1e-4)
        assert one.cached().tolist() == other.cached().tolist()
        assert [rows for rows, _batch in batches] == [WIDTHS[n] if n < len(WIDTHS) else n] * 3
        assert one.decode(ids[:9]).argmax() == other.decode(ids[:9]).argmax()  # nothing is left of the copies


def test_where_there_is_no_room_it_is_not_filled(exact_model: Model) -> None:
    ids = np.arange(300, 310, dtype=np.int32)
    with Context(exact_model, ContextSpec(n_ctx=10)) as context:
        context.fill(WIDTHS)
        context.decode(ids[:5])
        context.decode(ids[5:])  # three more would be beyond the end
        assert context.length() == 10
        with pytest.raises(ContextFull):
            context.decode(ids[:1])
    with Context(exact_model, ContextSpec(n_ctx=8, n_seq=2, spare=0)) as context:
        context.fill(WIDTHS)
        context.decode(ids[:3])
        context.decode(ids[:3], seq=1)  # there are cells for these, and none for a copy
        assert [context.length(seq) for seq in (0, 1)] == [3, 3]
        assert context.decode(ids[3:5]).shape[0] == 1


def test_a_context_that_shows_its_insides_is_not_filled(exact_model: Model) -> None:
    with Context(exact_model, ContextSpec(n_ctx=16), capture=Capture(attention=(1,))) as context:
        context.fill(WIDTHS)
        context.decode(np.arange(300, 303, dtype=np.int32))
        assert context.captured is not None
        assert context.captured.attention(1).shape[1] == 3


TEXT = np.arange(10, 90, dtype=np.int32)


@pytest.mark.parametrize("unified", [True, False])
def test_copies_that_wait_for_the_next_decode_do_not_disturb_each_other(exact_model: Model, unified: bool) -> None:
    with Context(exact_model, ContextSpec(n_ctx=128, n_seq=4, threads=1, unified=unified)) as context:
        wanted = context.decode(TEXT, seq=3)[0].copy()
        context.clear(3)
        context.decode(TEXT[:60], seq=0)
        context.copy_prefix(0, 1, 60)
        context.copy_prefix(1, 2, 40)
        context.rollback(20, 0)
        ids = [TEXT[20:], TEXT[60:], TEXT[40:]]
        rows = context.decode_rows([SeqRows(seq, rest, 1) for seq, rest in enumerate(ids)])
        for row in rows:
            assert np.allclose(row[0], wanted, atol=1e-4)
