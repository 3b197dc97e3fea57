"""The limits of a context: what does not fit or is refused changes nothing, and memory goes when it should."""

import gc
import weakref
from typing import Any

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Floats, Model, SeqRows, Stop
from edgellm.engine.llama_api import NativeContext
from edgellm.engine.native import lib
from edgellm.errors import ContextFull, EngineFailed, InvalidOption, Stopped
from tests.decodes import watch_decodes
from tests.engine.conftest import MakeModel
from tests.engine.logits import CLOSE, difference, one_by_one, some_ids


def test_a_full_context_changes_nothing(context: Context) -> None:
    ids = some_ids(250)
    context.decode(ids)
    with pytest.raises(ContextFull, match=r"250 of 256 positions are taken; 7 more"):
        context.decode(ids[:7])
    with pytest.raises(ContextFull):
        context.decode_rows([SeqRows(1, ids[:5]), SeqRows(0, ids[:7])])
    assert (context.length(0), context.length(1)) == (250, 0)
    context.decode(ids[:6])  # the last position is usable
    assert context.length() == 256


@pytest.mark.parametrize("bad", [-1, 100_000, 2**31 - 1])
def test_a_refused_batch_changes_nothing(exact_model: Model, bad: int) -> None:
    ids = some_ids(40)
    wrong = np.concatenate([ids[10:], np.array([bad], dtype=np.int32)])
    with Context(exact_model, ContextSpec(n_ctx=64, n_seq=2, n_batch=16, threads=1)) as context:
        context.decode(ids[:10])
        with pytest.raises(EngineFailed, match="cannot decode"):  # found in the second native batch
            context.decode(wrong)
        with pytest.raises(EngineFailed, match="cannot decode"):
            context.decode_rows([SeqRows(1, ids), SeqRows(0, wrong)])
        assert (context.length(0), context.length(1)) == (10, 0)
        logits = context.decode(ids[10:], outputs=10)
        assert difference(logits, one_by_one(exact_model, ids)[30:]) < CLOSE


def test_an_interrupt_changes_nothing(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = some_ids(20)
    context.decode(ids[:10])
    decode = NativeContext.decode

    def interrupted(*args: Any) -> None:
        decode(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(NativeContext, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            context.decode(ids[10:])
    assert context.length() == 10
    context.decode(ids[10:])  # positions must continue where the cache ends


def test_a_stop_is_heard_in_a_graph_and_changes_nothing(exact_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, stop = some_ids(40), Stop()
    layers = tuple(range(exact_model.n_layer))
    with Context(exact_model, ContextSpec(n_ctx=64, threads=1), capture=Capture(attention=layers)) as context:
        recorder = context.captured
        assert recorder is not None
        read, shown = recorder._read, []

        def stopping(address: int, name: bytes) -> Floats:
            shown.append(name)
            if name == b"kq_soft_max-2":
                stop.set()
            return read(address, name)

        context.decode(ids[:10])
        context.set_cancel(stop)
        monkeypatch.setattr(recorder, "_read", stopping)
        with pytest.raises(Stopped):
            context.decode(ids[10:])
        assert shown == [b"kq_soft_max-0", b"kq_soft_max-1", b"kq_soft_max-2"]
        assert context.length() == 10
        with pytest.raises(Stopped):
            context.decode(ids[10:])  # it stays set
        context.set_cancel(None)
        logits = context.decode(ids[10:], outputs=10)
        assert difference(logits, one_by_one(exact_model, ids)[30:]) < CLOSE


def test_progress_is_reported_before_and_after_each_batch(exact_model: Model) -> None:
    ids, reports = some_ids(40), list[tuple[int, int, int]]()
    with Context(exact_model, ContextSpec(n_ctx=64, n_batch=16, threads=1)) as context:
        context.set_cancel(None, lambda *told: reports.append(told))
        context.decode(ids)
        assert reports == [(0, done, 40) for done in (0, 16, 32, 40)]
        reports.clear()
        context.decode(ids[:16])
        assert not reports, "one batch is no wait"
        context.rollback(4)
        context.decode(ids[:20], outputs=3)
        assert reports == [(4, done, 22) for done in (4, 20, 22)], "what is behind the first output is drafted"
        reports.clear()
        context.set_cancel(None)
        context.clear()
        context.decode(ids)
        assert not reports


def test_a_context_may_be_closed_while_it_decodes(exact_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(exact_model, ContextSpec(n_ctx=64, n_batch=32, threads=1))
    _, meanwhile = watch_decodes(monkeypatch)
    meanwhile.append(context.close)  # as another thread may
    with pytest.raises(EngineFailed, match="closed"):
        context.decode(some_ids(40))
    with pytest.raises(EngineFailed, match="closed"):
        context.decode(some_ids(1))


def test_logits_are_read_only_and_outlive_the_context(exact_model: Model) -> None:
    context = Context(exact_model, ContextSpec(n_ctx=16, threads=1))
    view = context.decode(some_ids(3))
    with pytest.raises(ValueError, match="read-only"):
        view[0, 0] = 1.0
    before = view.copy()
    context.close()
    gc.collect()
    assert (view == before).all()


def test_a_closed_model_lives_on_in_its_contexts(make_model: MakeModel) -> None:
    model = make_model()
    native = weakref.ref(model.owned)
    context = Context(model, ContextSpec(n_ctx=16, threads=1))
    model.close()
    assert context.decode(some_ids(3, 400)).shape == (1, 400)
    context.close()
    gc.collect()
    assert native() is None
    with pytest.raises(EngineFailed, match="is closed"):
        Context(model, ContextSpec(n_ctx=16))


def test_a_closed_context_says_so(exact_model: Model) -> None:
    context = Context(exact_model, ContextSpec(n_ctx=16))
    context.close()
    context.close()
    for call in (
        lambda: context.decode(some_ids(1)),
        lambda: context.rollback(0),
        lambda: context.clear(),
        lambda: context.branch(0, 0),
        lambda: context.sync(some_ids(1)),
    ):
        with pytest.raises(EngineFailed, match="closed"):
            call()


@pytest.mark.parametrize("option", [{"n_ctx": 0}, {"n_seq": 0}, {"n_seq": 10_000}, {"n_batch": 0}, {"threads": 0}])
def test_sizes_must_make_sense(exact_model: Model, option: dict[str, int]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(option))):
        Context(exact_model, ContextSpec(**{"n_ctx": 16, **option}))  # type: ignore[arg-type]


def test_a_context_that_cannot_be_reserved(exact_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lib, "llama_init_from_model", lambda *_: None)
    with pytest.raises(EngineFailed, match="cannot open a context of 32 positions"):
        Context(exact_model, ContextSpec(n_ctx=16, n_seq=2))


def test_a_batch_too_small_for_its_sequences_is_refused_and_does_not_end_the_process(exact_model: Model) -> None:
    with pytest.raises(InvalidOption, match="2 rows has no room for a row of each of 3 sequences"):
        Context(exact_model, ContextSpec(n_ctx=64, n_seq=3, n_batch=2, threads=1))


def test_branches_share_a_cache_with_a_few_spare_cells(exact_model: Model) -> None:
    ids = np.arange(5, 245, dtype=np.int32)
    few = np.arange(5, 10, dtype=np.int32)
    with (
        Context(exact_model, ContextSpec(n_ctx=240, n_seq=3, spare=16, threads=1)) as tight,
        Context(exact_model, ContextSpec(n_ctx=240, threads=1)) as plain,
    ):
        tight.decode(ids[:235])
        for seq in (1, 2):
            tight.branch(0, seq)
        rows = tight.decode_rows([SeqRows(seq, few, 1) for seq in (1, 2)])
        expected = plain.decode(np.concatenate((ids[:235], few)))
        for row in rows:
            np.testing.assert_allclose(row, expected, atol=1e-4)
        tight.decode(ids[235:])
        tight.clear(1)
        with pytest.raises(ContextFull, match="no cells left"):
            tight.decode(np.full(200, 7, dtype=np.int32), seq=1)
        assert tight.length(1) == 0
        for seq in (1, 2):
            tight.clear(seq)
        tight.rollback(3)
        assert len(tight.decode(ids[3:])) == 1
