"""What the callback shows of a running graph."""

import numpy as np
import pytest

from edgellm.engine import Capture, Context, ContextSpec, Floats, Model, graph_hooks, native
from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.graph_hooks import SCORES, Recorder, attention_rows
from edgellm.errors import EngineFailed, InvalidOption
from tests.watching import calls_of

IDS = np.arange(100, 140, dtype=np.int32)


def recorder(context: Context) -> Recorder:
    assert context.captured is not None
    return context.captured


@pytest.mark.parametrize("name", ["draft_model", "exact_model"])
def test_one_attention_row_per_layer_and_token(request: pytest.FixtureRequest, name: str) -> None:
    model: Model = request.getfixturevalue(name)
    layers = tuple(range(model.n_layer))
    with Context(model, ContextSpec(n_ctx=64, threads=1), capture=Capture(attention=layers)) as context:
        context.decode(IDS)
        seen = recorder(context)
        for layer in layers:
            rows = seen.attention(layer)
            heads = model.header.number("attention.head_count")
            assert rows.shape[:2] == (heads, len(IDS))
            np.testing.assert_allclose(rows.sum(axis=2), 1.0, atol=1e-5)
            assert not np.triu(rows[:, :, : len(IDS)], k=1).any()  # nobody looks ahead
        context.decode(IDS[:1])
        for layer in layers:
            row = seen.attention(layer)
            assert row.shape[1] == 1
            assert row[:, :, : len(IDS) + 1].sum() == pytest.approx(row.shape[0], abs=1e-4)


def test_batches_are_short_for_scores_of_a_long_context(draft_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    heads, rows = 14, SCORES // (4 * 14 * 98_304)
    header = GgufHeader(0, {"general.architecture": "x", "x.attention.head_count": heads}, (), 0, {}, 0, 0, 0)
    assert (attention_rows(header, 98_304), attention_rows(header, 10**9)) == (rows, 1)
    assert 4 * heads * rows * 98_304 <= SCORES

    def batch(capture: Capture | None) -> int:
        return ContextSpec(n_ctx=128).resolved(draft_model, capture).rows

    assert batch(Capture(attention=(1,))) == 128
    monkeypatch.setattr(graph_hooks, "SCORES", 1)
    assert (batch(Capture(attention=(1,))), batch(None)) == (1, 128)


def test_only_what_was_asked_for_is_there(draft_model: Model) -> None:
    with Context(draft_model, ContextSpec(n_ctx=64, threads=1), capture=Capture(attention=(1,))) as context:
        seen = recorder(context)
        with pytest.raises(EngineFailed, match="kq_soft_max-1"):
            seen.attention(1)  # nothing decoded yet
        context.decode(IDS)
        seen.attention(1)
        for call in (lambda: seen.attention(0), lambda: seen.output()):
            with pytest.raises(EngineFailed, match="did not capture"):
                call()


@pytest.mark.parametrize(
    "capture",
    [Capture(attention=(99,)), Capture(stop_after=-1), Capture(attention=(3,), stop_after=2), Capture(stop_after=99)],
)
def test_layers_must_exist(draft_model: Model, capture: Capture) -> None:
    with pytest.raises(InvalidOption, match="cannot be captured"):
        Context(draft_model, ContextSpec(n_ctx=64), capture=capture)


def test_what_goes_wrong_in_the_callback_is_raised(draft_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with Context(draft_model, ContextSpec(n_ctx=64, threads=1), capture=Capture(stop_after=1)) as context:
        context.decode(IDS[:5])

        def broken(*_: object) -> Floats:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(Recorder, "_read", broken)
            with pytest.raises(MemoryError):
                context.decode(IDS[5:])
        assert context.length() == 5
        context.decode(IDS[5:])
        assert recorder(context).output().shape[0] == len(IDS) - 5


@pytest.mark.parametrize("n_batch", [512, 16])
@pytest.mark.parametrize("unified", [True, False])
def test_attention_to_some_keys_alone_or_to_none(draft_model: Model, unified: bool, n_batch: int) -> None:
    capture = Capture(attention=(1, 6), stop_after=6)
    with Context(
        draft_model, ContextSpec(n_ctx=300, n_seq=2, threads=1, n_batch=n_batch, unified=unified), capture=capture
    ) as context:
        seen = recorder(context)
        context.decode(IDS)
        whole = [seen.attention(layer).copy() for layer in (1, 6)]
        for rows in whole:  # Several batches are joined in their order.
            assert rows.shape[1] == len(IDS)
            assert not np.triu(rows[:, :, : len(IDS)], k=1).any()
        for keys in (slice(3, 7), slice(0, 1), slice(-9, None), slice(290, 900), slice(5, 5)):
            seen.attend(keys)
            context.clear()
            context.decode(IDS)
            for layer, rows in zip((1, 6), whole, strict=True):
                expected = rows[:, :, keys]
                part = seen.attention(layer)
                np.testing.assert_array_equal(part, expected[:, :, : part.shape[2]])
                assert not expected[:, :, part.shape[2] :].any()
        seen.attend(None)
        context.clear()
        context.decode(IDS)
        assert seen.output().shape == (len(IDS), draft_model.n_embd)
        with pytest.raises(EngineFailed, match="kq_soft_max-1"):
            seen.attention(1)
        seen.attend(slice(None))
        context.decode(IDS[:1])
        assert seen.attention(6).shape[1] == 1


def test_the_stop_can_be_lifted_and_set_again(exact_model: Model) -> None:
    last = exact_model.n_layer - 1
    for stop in (0, 2, last):
        capture = Capture(stop_after=stop)
        with (
            Context(exact_model, ContextSpec(n_ctx=64, threads=1), capture=capture) as context,
            Context(exact_model, ContextSpec(n_ctx=64, threads=1)) as plain,
        ):
            assert context.decode(IDS[:9]).shape[0] == 0
            rows = recorder(context).output().copy()
            context.clear()
            recorder(context).stop(False)
            np.testing.assert_allclose(
                context.decode(IDS[:9], outputs=2), plain.decode(IDS[:9], outputs=2), rtol=0, atol=1e-4
            )
            np.testing.assert_allclose(recorder(context).output(), rows, rtol=0, atol=1e-5)
            recorder(context).stop(True)
            assert context.decode(IDS[:9]).shape[0] == 0


def test_cells_that_sequences_share_are_told_apart(draft_model: Model) -> None:
    with Context(draft_model, ContextSpec(n_ctx=64, n_seq=2, threads=1), capture=Capture(attention=(1,))) as context:
        seen = recorder(context)
        seen.attend(slice(0, 0))
        for seq, n in ((0, 5), (1, 3), (0, 2), (1, 1)):
            context.decode(IDS[:n], seq=seq)
            assert seen.attention(1).size == 0
        assert np.flatnonzero(seen.visible()).tolist() == [5, 6, 7, 10]
        context.rollback(6)
        context.decode(IDS[:1])
        assert np.flatnonzero(seen.visible()).tolist() == [0, 1, 2, 3, 4, 8, 9]
    with Context(draft_model, ContextSpec(n_ctx=64, threads=1), capture=Capture(attention=(1,))) as context:
        assert not recorder(context).shared
        context.decode(IDS)
        assert recorder(context).visible().size == 0


def test_a_graph_remembered_wrongly_is_learned_anew(draft_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with Context(draft_model, ContextSpec(n_ctx=64, threads=1), capture=Capture(attention=(6,))) as context:
        seen, one = recorder(context), np.array([100])
        context.decode(one)
        others = seen.nodes
        shown = calls_of(monkeypatch, native.ggml, "ggml_get_name")
        context.decode(one)
        others.update({tensor: False for (tensor,) in shown})  # as if another node had been at its address
        context.decode(one)
        with pytest.raises(EngineFailed, match="kq_soft_max-6"):
            seen.attention(6)
        context.decode(one)
        assert seen.attention(6).shape[1] == 1
