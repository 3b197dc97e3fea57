"""Retrieval on the real pair: the text is the same, and what was replied before is copied."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from edgellm.engine import Context, ContextSpec, Model, never
from edgellm.engine.cores import BUSY, CpuWait
from edgellm.llm import LLM, cost_curves
from edgellm.llm.cost_curves import ModelCurve, curve_path, estimated_curve, measure_curve
from edgellm.llm.drafting import Drafting
from edgellm.spec.drafting.cost_curve import KNOTS
from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.types import Ids
from edgellm.storage.fingerprint import FileHash
from edgellm.verifier.in_process import LocalVerifier
from tests.spec.real import case, ids, told

NUMBERS = (2, 5, 6, 5, 2)  # two of them twice: there the first reply can be copied
MOST = 24
MAX_SECONDS = cost_curves._MAX_SECONDS  # as it is outside tests


@pytest.mark.usefixtures("rows_are_cheap")
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 2}])
def test_a_draft_model_alone_copies_and_writes_the_same(f32_pair: tuple[Path, Path], options: dict[str, Any]) -> None:
    with LLM.open(f32_pair[0], "none", threads=1) as small:
        copied = 0
        for number in NUMBERS:
            reply = small.reply(case(number), max_tokens=MOST, **options)
            assert ids(reply) == ids(small.reply(case(number), max_tokens=MOST, retrieval="off", **options))
            copied += reply.summary.retrieved
    assert copied > 0


@pytest.mark.usefixtures("rows_are_cheap")
def test_a_conversation_of_before_is_copied(f32_pair: tuple[Path, Path], alone: LLM) -> None:
    wanted = alone.reply(case(5), max_tokens=MOST, retrieval="off")
    written = ids(wanted)
    with LLM.open("none", f32_pair[1], threads=1) as pair:
        pair.remember([(case(5)[-1].content, wanted.summary.text), ("\ud800", "not UTF-8")])
        reply = pair.reply(case(5), max_tokens=MOST)
        assert ids(reply) == written
        assert "second row" in reply.summary.drafting
        assert reply.summary.retrieved > len(written) // 2
        assert reply.summary.rounds < len(written) // 2


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"retrieval": "off"}, "as requested"),
        ({"budget": 0.2, "gate": "random"}, "not everything is verified"),
        ({"retrieval": "context,reuse"}, "retrieved from: context, reuse"),
    ],
)
def test_it_says_whether_and_from_what_it_copies(pair: LLM, options: dict[str, Any], reason: str) -> None:
    reply = pair.reply(case(5), max_tokens=8, **options)
    assert any(reason in one for one in told(reply))
    assert "context" in str(options) or not reply.summary.retrieved


@pytest.mark.parametrize(
    ("row", "rows", "longest", "far"),
    [(1e-6, KNOTS, 0.003, True), (1e-3, KNOTS, 2.3, False), (0.05, (1, 2, 4, 8, 16, 32), 5.0, False),
     (9.0, (1, 2, 4), 262, False)],
)  # fmt: skip
def test_measuring_a_slow_device_takes_little_time(
    draft_model: Model, row: float, rows: tuple[int, ...], longest: float, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock of its own, on which rows take their time, twice that behind 1,016 positions."""
    now = 0.0
    with Context(draft_model, ContextSpec(n_ctx=16 + 64 + 128 * far, threads=1)) as context:
        decode = context.decode

        def slow(ids: Ids, **options: Any) -> Any:
            nonlocal now
            now += row * len(ids) * (1.0 + max(0, len(context.cached()) - 16) / 1000.0)
            return decode(ids, **options)

        monkeypatch.setattr(context, "decode", slow)
        monkeypatch.setattr(cost_curves, "perf_counter", lambda: now)
        monkeypatch.setattr(cost_curves, "_MAX_SECONDS", MAX_SECONDS)
        curve = measure_curve(context)
    assert curve.rows == rows
    assert curve.seconds == pytest.approx([row * rows for rows in curve.rows])
    assert curve.positions == pytest.approx((row * far / 1000.0,) * 2)
    assert now <= longest


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(("shares", "waited", "kept"), [(False, 0.0, True), (True, 0.0, False), (False, 0.5, False)])
def test_what_replies_make_of_an_estimate_is_kept_unless_load_may_explain_it(
    verifier_model: Model, monkeypatch: pytest.MonkeyPatch, shares: bool, waited: float, kept: bool
) -> None:
    file_hash = FileHash(verifier_model.path)
    path = curve_path(file_hash.compute(never), 1, verifier_model.placement)
    drafting = Drafting(
        verifier_model,
        lambda: LocalVerifier(verifier_model, ContextSpec(64, threads=1, rolls_back=True)),
        ModelCurve(verifier_model, 1, file_hash),
    )
    assert drafting.begin(("context",)) is not None
    if shares:
        decodes = itertools.count(1)
        monkeypatch.setattr(LocalVerifier, "shared", property(lambda _self: next(decodes)))
        drafting.track(drafting.self_verifier())
    monkeypatch.setattr(CpuWait, "share", lambda _self: waited)
    monkeypatch.setattr(cost_curves, "BUSY", BUSY)
    cost, seconds = drafting.policy.cost, 3.0 * drafting.policy.cost.single
    for _ in range(8):
        cost.observe(0, 1, seconds)
    drafting.end()
    assert drafting.curve().seconds[0] == pytest.approx(3.0 * estimated_curve(verifier_model).seconds[0], rel=0.01)
    assert path.exists() is kept
    drafting.close()


def test_calibration_is_done_where_asked_for(f32_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(Calibration, "expect", lambda _self, expected: told.append(len(expected.ids)))
    with LLM.open("none", f32_pair[1], threads=1) as pair:
        assert len(ids(pair.reply(case(2), max_tokens=2))) == 2
        assert not told
        assert len(ids(pair.reply(case(3), max_tokens=2, retrieval="context,calibration"))) == 2
        assert told
