"""Pieces of a prefill: as large as their speed wants, as short as a waiting verdict wants, never below the paper's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import Context, ContextSpec, Model
from edgellm.spec.types import GREEDY, Chunk
from edgellm.spec.verifier import VerifyRequest
from edgellm.verifier.in_process import VerifierWorker
from edgellm.verifier.judgement import Answer
from edgellm.verifier.prefill_pieces import DELAY, SOLO_DELAY, SPEED, PrefillPieces
from edgellm.verifier.scheduler import BatchKind, SchedulerLimits

LIMITS = SchedulerLimits()
ROWS = (1, 2, 4, 8, 16, 32, 48, 64)


def curve(base: float, slope: float) -> list[float]:
    return [base + slope * rows for rows in ROWS]


def a_pass(rows: int, kind: BatchKind = BatchKind.PREFILL) -> Any:
    return SimpleNamespace(kind=kind, slices=(SimpleNamespace(tokens=rows),))


def test_without_a_measurement_the_limits_hold() -> None:
    pieces = PrefillPieces(LIMITS)
    pieces.on_batch(a_pass(32), 1e-3)
    assert pieces.current.limits == LIMITS
    pieces.use_curve((1, 2, 4), (1.0, 1.0, 1.0))  # a slow device, of which no large pass was measured
    assert pieces.current.limits == LIMITS


@given(st.floats(1e-5, 1.0), st.floats(1e-6, 0.1))
def test_a_piece_reaches_its_share_of_the_speed_or_its_delay_or_is_the_papers(base: float, slope: float) -> None:
    def speed(rows: int) -> float:
        return rows / (base + slope * rows)

    pieces = PrefillPieces(LIMITS)
    pieces.use_curve(ROWS, curve(base, slope))
    found = pieces.current.limits
    for size, least, delay in (
        (found.chunk, LIMITS.chunk, DELAY), (found.solo_chunk, LIMITS.solo_chunk, SOLO_DELAY)
    ):  # fmt: skip
        assert least <= size <= LIMITS.rows
        assert size == least or base + slope * size <= 1.001 * delay
        longer = base + slope * (size + 1)
        assert speed(size + 1) >= 0.999 * SPEED * speed(LIMITS.rows) or longer >= 0.999 * delay or size == LIMITS.rows
    assert f"advance by {found.chunk} tokens at a time, by {found.solo_chunk} for" in pieces.current.reason


def test_a_card_computes_larger_pieces_than_a_processor() -> None:
    pieces = PrefillPieces(LIMITS)
    pieces.use_curve(ROWS, curve(0.010, 0.00005))
    assert pieces.current.limits.chunk == 366  # 0.9 * 512 * 200 / (200 + 51.2)
    pieces.use_curve(ROWS, curve(0.060, 0.004))
    assert (pieces.current.limits.chunk, pieces.current.limits.solo_chunk) == (32, 128)


def test_the_passes_themselves_correct_the_curve(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="edgellm")
    pieces = PrefillPieces(LIMITS)
    pieces.use_curve(ROWS, curve(0.010, 0.00005))
    for _ in range(100):  # the device has become a slow one
        pieces.on_batch(a_pass(5, BatchKind.VERIFY), 0.060 + 0.004 * 5)
        pieces.on_batch(a_pass(366), 0.060 + 0.004 * 366)
    assert pieces.current.limits.chunk == 32
    assert 1 < len(caplog.messages) < 10, "what has changed noticeably is logged"
    assert "Prefills advance by 32 tokens" in caplog.messages[-1]
    before = pieces.current
    pieces.on_batch(a_pass(64, BatchKind.VERIFY), 9.0)  # its heads are no part of a prefill
    assert pieces.current == before


@pytest.mark.parametrize("fast", [True, False])
def test_a_worker_prefills_in_the_pieces_that_its_curve_chooses(
    exact: Model, fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions, so that the pieces are those beside another session."""
    counts: dict[int, int] = {}
    ids = np.arange(400, 730, dtype=np.int32)
    worker = VerifierWorker(
        Context(exact, ContextSpec(n_ctx=512, n_seq=2, n_batch=512, threads=1, unified=False)), 2, exact.is_eog
    )
    engine = worker._engine
    monkeypatch.setattr(PrefillPieces, "on_batch", lambda *_: None)  # which knows better
    worker.use_curve(ROWS, curve(0.010, 0.00005) if fast else curve(0.060, 0.004))
    try:
        for session, prompt in ((1, ids[:5]), (2, ids)):
            answers: list[Answer] = []
            engine.add(VerifyRequest(session, GREEDY, 0, prompt, Chunk()), answers.append)
            before = engine.prefills
            while not answers:
                engine.step()
            counts[session] = engine.prefills - before
    finally:
        worker.close()
    assert counts == {1: 0, 2: 0 if fast else 10}
