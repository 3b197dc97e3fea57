"""A real worker process dies or hangs in the middle of replies. The long run is `python -m bench run kill_worker`."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.mesh.kill_worker import run


@pytest.mark.nightly
def test_replies_are_complete_and_the_same_when_workers_die_or_hang(f32_pair: tuple[Path, Path]) -> None:
    outcomes = list(run(*f32_pair, replies=5, seed=2))  # four kills and one hang
    assert [outcome.problems for outcome in outcomes] == [()] * 5
    assert sum(outcome.recovered > 0 for outcome in outcomes) >= 2
