"""Logits that are computed when they are looked at: the same ones, and no more than are looked at."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm import engine
from edgellm.engine import HEADS, Context, ContextSpec, Floats, LazyLogits, LMHead, Model, SeqRows, known, top2, top_k
from edgellm.engine.lm_head import ROWS, block_ends, head_of, why_lazy
from edgellm.errors import ContextFull, EngineFailed
from testkit.gguf.random_model import Shape
from tests.engine.conftest import QWEN, TINY, MakeModel
from tests.watching import calls_of

IDS = np.arange(300, 420, dtype=np.int32)


@pytest.fixture
def pair(exact_model: Model) -> Iterator[tuple[Context, Context]]:
    """A context that decodes late, and one that does not."""
    with (
        Context(exact_model, ContextSpec(n_ctx=256, n_seq=3, threads=1, lazy=True)) as one,
        Context(exact_model, ContextSpec(n_ctx=256, n_seq=3, threads=1)) as other,
    ):
        settle(one)
        assert one.lazy_head is not None
        assert other.lazy_head is None
        yield one, other


def settle(context: Context) -> None:
    """The first pass finds out whether the others can be late."""
    context.decode_lazy(IDS[:2], outputs=2)
    assert context.model.head_is_plain
    context.rollback(0)


@pytest.mark.parametrize("outputs", [2, 3, 7, 8, 9, ROWS])
def test_they_are_the_same(pair: tuple[Context, Context], outputs: int) -> None:
    late, plain = pair
    rows = late.decode_lazy(IDS[:ROWS], outputs=outputs)
    assert isinstance(rows, LazyLogits)
    assert len(rows) == outputs
    wanted = plain.decode(IDS[:ROWS], outputs=outputs)
    assert np.allclose(known(rows, outputs), wanted, atol=1e-4)
    assert np.allclose(late.decode(IDS[:1]), plain.decode(IDS[:1]), atol=1e-4)  # the cache is the same, too
    assert late.cached().tolist() == plain.cached().tolist()


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("shape", [replace(TINY, tied=False), replace(QWEN, n_vocab=401)])
def test_so_they_are_for_other_weights_and_shapes(make_model: MakeModel, shape: Shape, kind: str) -> None:
    model = make_model(shape, kind)
    with Context(model, ContextSpec(n_ctx=64, lazy=True)) as late, Context(model, ContextSpec(n_ctx=64)) as plain:
        settle(late)
        for n in (3, 9):
            rows = late.decode_lazy(IDS[:n], outputs=n)
            assert isinstance(rows, LazyLogits)
            assert np.allclose(known(rows, n), plain.decode(IDS[:n], outputs=n), rtol=1e-2, atol=1e-2)


def test_a_head_that_is_more_than_a_product_is_found_out(make_model: MakeModel) -> None:
    model = make_model(TINY)
    with Context(model, ContextSpec(n_ctx=64, lazy=True)) as late, Context(model, ContextSpec(n_ctx=64)) as plain:
        assert late.lazy_head is not None
        head = late.lazy_head.head
        compute = head.compute

        def scaled(first: int, end: int) -> None:
            compute(first, end)
            head.logits[first:end] *= 1.01

        head.compute = scaled  # type: ignore[method-assign]
        for n in (5, 3):
            rows = late.decode_lazy(IDS[:n], outputs=n)
            assert isinstance(rows, np.ndarray)
            assert np.allclose(rows, plain.decode(IDS[:n], outputs=n), atol=1e-4)
            assert model.head_is_plain is False
            assert late.lazy_head is None
    assert "more than one matrix product" in why_lazy(model)[1]


def test_only_what_is_looked_at_is_computed(pair: tuple[Context, Context], monkeypatch: pytest.MonkeyPatch) -> None:
    late, plain = pair
    computed = calls_of(monkeypatch, LMHead, "compute")
    rows = late.decode_lazy(IDS[:8], outputs=8, reached=[0.0] * 7)
    assert isinstance(rows, LazyLogits)
    assert not computed
    wanted = plain.decode(IDS[:8], outputs=8)
    assert np.allclose(rows[2], wanted[2], atol=1e-4)
    assert [rows for _, *rows in computed] == [[0, 1], [1, 2], [2, 3]]
    assert rows.known == 3
    assert [len(block) for block in engine.in_blocks(rows)] == [3, 1, 1, 1, 1, 1]
    assert np.allclose(np.stack(list(rows)), wanted, atol=1e-4)
    late.decode_lazy(IDS[:8], outputs=8, reached=[1.0] * 7)[0]
    assert [rows for _, *rows in computed[8:]] == [[0, 8]]  # all of them take less time together


def test_where_it_cannot_be_late_it_is_at_once(exact_model: Model) -> None:
    with Context(exact_model, ContextSpec(n_ctx=128, n_batch=16, threads=1, lazy=True)) as context:
        for n, outputs in ((1, 1), (5, 1), (5, 0), (17, 2)):
            assert isinstance(context.decode_lazy(IDS[:n], outputs=outputs), np.ndarray)
    with Context(exact_model, ContextSpec(n_ctx=128, threads=1, lazy=True)) as context:
        assert isinstance(context.decode_lazy(IDS[: ROWS + 1], outputs=ROWS + 1), np.ndarray)
        with pytest.raises(ContextFull):
            context.decode_lazy(IDS, outputs=2)
        assert context.length() == ROWS + 1
    with Context(exact_model, ContextSpec(n_ctx=32, lazy=True), capture=engine.Capture(outputs=(0,))) as context:
        assert context.lazy_head is None
        assert isinstance(context.decode_lazy(IDS[:5], outputs=5), np.ndarray)


def test_it_finds_its_place_in_every_graph(pair: tuple[Context, Context]) -> None:
    late, plain = pair

    def same(seq: int, n: int) -> None:
        rows = late.decode_lazy(IDS[:n], seq=seq, outputs=n)
        assert isinstance(rows, LazyLogits)
        assert np.allclose(known(rows, n), plain.decode(IDS[:n], seq=seq, outputs=n), atol=1e-4)

    for n in (2, 5):
        same(0, n)
        for context in pair:
            context.branch(0, 1)
            context.decode_rows([SeqRows(0, IDS[:3], 1), SeqRows(1, IDS[4:6], 1)])
        same(1, n)


def test_a_reused_address_does_no_harm(pair: tuple[Context, Context], monkeypatch: pytest.MonkeyPatch) -> None:
    late, plain = pair
    assert late.lazy_head is not None
    assert isinstance(late.decode_lazy(IDS[:4], outputs=4), LazyLogits)
    wanted = plain.decode(IDS[:4], outputs=4).copy()
    nodes = late.lazy_head.nodes
    looked = calls_of(monkeypatch, nodes, "_show")
    late.rollback(0)
    late.decode_lazy(IDS[:4], outputs=4)
    assert looked  # the head's input
    nodes.update({node: False for (node,) in looked})  # as if another tensor had been there
    late.rollback(0)
    assert np.allclose(known(late.decode_lazy(IDS[:4], outputs=4), 4), wanted, atol=1e-4)
    late.rollback(0)
    rows = late.decode_lazy(IDS[:4], outputs=4)
    assert isinstance(rows, LazyLogits)  # it has learned anew
    assert np.allclose(known(rows, 4), wanted, atol=1e-4)


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_while_it_looks_is_not_lost(
    pair: tuple[Context, Context], late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, plain = pair
    context.decode(IDS[:3])
    assert context.lazy_head is not None

    def interrupted(_tensor: int) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        nodes = context.lazy_head.nodes
        nodes.forget()
        patched.setattr(nodes, "_wants", interrupted)
        with pytest.raises(KeyboardInterrupt):
            (context.decode_lazy if late else context.decode)(IDS[3:6], outputs=2)
    assert context.length() == 3
    plain.decode(IDS[:3])
    assert np.allclose(known(context.decode_lazy(IDS[3:6], outputs=2), 2), plain.decode(IDS[3:6], outputs=2), atol=1e-4)


def test_filled_up_they_are_the_same(pair: tuple[Context, Context]) -> None:
    late, plain = pair
    late.fill([0, 1, 4, 4, 4, 8, 8, 8, 8], [1.0] * len(HEADS))
    assert late.lazy_head is not None
    assert late.lazy_head.seconds == [1.0] * len(HEADS)
    for n in (3, 5):
        rows = late.decode_lazy(IDS[:n], outputs=n)
        assert len(rows) == n
        assert np.allclose(known(rows, n), plain.decode(IDS[:n], outputs=n), atol=1e-4)
        assert late.length() == plain.length()


def test_who_has_another_head_or_a_small_one_has_none(make_model: MakeModel, verifier_model: Model) -> None:
    assert head_of(make_model(TINY)) is not None
    assert head_of(make_model(replace(TINY, tied=False))) is not None
    other = make_model(replace(TINY, tied=False))
    other.record_head_is_plain(False)
    assert head_of(other) is None
    assert LMHead.open(other, 1) is None
    gone = make_model(TINY)
    gone.path.unlink()
    assert LMHead.open(gone, 1) is None
    pays, reason = why_lazy(verifier_model)  # it is too small for that
    assert not pays
    assert reason == "heads are computed for all rows: 8% of 7 MB is little"


def test_it_pays_where_the_vocabulary_is_large(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edgellm.engine.native.is_small", lambda _parameters: False)
    assert engine.head_pays(make_model(replace(TINY, n_vocab=4000)))
    assert "looked at: they are 74% of the model" in why_lazy(make_model(replace(TINY, n_vocab=4000)))[1]


@given(
    st.lists(st.floats(0.0, 1.0), max_size=9), st.lists(st.floats(0.0, 3.0), min_size=len(HEADS), max_size=len(HEADS))
)
def test_blocks_take_the_least_time_that_can_be_expected(chances: list[float], more: list[float]) -> None:
    reached = list(itertools.accumulate([1.0, *chances], lambda one, other: one * other))
    seconds = list(itertools.accumulate(more))
    price = np.interp(range(ROWS + 1), (0, *HEADS), (0.0, *seconds)).tolist()

    def expected(ends: list[int]) -> float:
        return sum(reached[a] * price[b - a] for a, b in itertools.pairwise([0, *ends]))

    found, n = block_ends(reached, seconds), len(reached)
    assert found == sorted(set(found))
    assert found[-1] == n
    widths = [b - a for a, b in itertools.pairwise([0, *found])]
    assert all(width in HEADS for width in widths[:-1])
    ways = [[]] if n == 1 else [list(c) for k in range(n) for c in itertools.combinations(range(1, n), k)]
    allowed = [[*way, n] for way in ways if all(b - a in HEADS or b == n for a, b in itertools.pairwise([0, *way, n]))]
    assert expected(found) <= min(map(expected, allowed)) + 1e-9


def test_it_holds_no_file_open_once_it_is_closed(make_model: MakeModel) -> None:
    model = make_model(TINY)
    context = Context(model, ContextSpec(n_ctx=32, lazy=True))
    settle(context)
    context.decode_lazy(IDS[:3], outputs=3)[0]
    context.close()
    assert context.lazy_head is None
    mapped = Path("/proc/self/maps")
    if mapped.exists():
        model.close()
        assert str(model.path) not in mapped.read_text()


def softmax(row: Floats) -> np.ndarray:
    wide = np.exp(row.astype(np.float64) - row.max())
    return wide / wide.sum()


def rows(least: int = 1, most: int = 40) -> st.SearchStrategy[Floats]:
    number = st.floats(-60, 60, width=32) | st.sampled_from([0.0, 1.0, float("-inf")])
    return (
        st.lists(number, min_size=least, max_size=most)
        .filter(lambda values: max(values) > float("-inf"))
        .map(lambda values: np.array(values, dtype=np.float32))
    )


@given(rows(least=2))
def test_top2_is_the_definition(row: Floats) -> None:
    order = np.argsort(-row, kind="stable")
    probs = softmax(row)
    facts = top2(row)
    assert facts.id == order[0]
    assert facts.p1 == pytest.approx(probs[order[0]], rel=1e-4)
    assert facts.p2 == pytest.approx(probs[order[1]], rel=1e-4, abs=1e-30)


@given(rows(), st.integers(0, 50))
def test_top_k_is_the_definition(row: Floats, k: int) -> None:
    order = np.argsort(-row, kind="stable")[:k]
    ids = top_k(row, k)
    assert ids.tolist() == order.tolist()
    assert ids.dtype == np.int32


@pytest.mark.parametrize("n", [1_023, 1_024, 1_025, 5_000, 40_000])
@pytest.mark.parametrize("k", [1, 3, 40, 1_000, 2_000])
def test_top_k_of_large_vocabularies(n: int, k: int) -> None:
    rng = np.random.default_rng(n + k)
    row = (rng.standard_normal(n) * 3).round(1).astype(np.float32)  # rounded: many equals
    order = np.argsort(-row, kind="stable")[:k]
    assert top_k(row, k).tolist() == order.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_are_an_error(bad: float) -> None:
    row = np.full(8, bad, dtype=np.float32)
    with pytest.raises(EngineFailed, match="largest logit"):
        top2(row)
    with pytest.raises(EngineFailed, match="largest logit"):
        top_k(row, 3)
