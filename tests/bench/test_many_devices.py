"""The scheduling benchmarks run, and count what they say they count.

The long runs are `python -m bench.synera.many_devices` and `python -m bench.synera.scheduler`.
"""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

import pytest

from bench.synera.many_devices import Bare, point, trace
from bench.synera.scheduler import run
from edgellm.engine import Model
from edgellm.verifier.scheduler import SchedulerLimits
from testkit.simulated_devices import CACHED, GAMMA, Arrival, Fleet, Script, scripts

DEVICES = 3


@pytest.fixture(scope="module")
def work(verifier_model: Model) -> list[Script]:
    return scripts(verifier_model, DEVICES, 1, seed=0)


def test_a_trace_has_the_rate_and_the_share_that_were_asked_for() -> None:
    sent = trace(rate=500.0, budget=0.3, seconds=20.0, devices=8, seed=1, kept=True)
    assert len(sent) == pytest.approx(3000, rel=0.1)
    assert all(one.at < other.at for one, other in pairwise(sent))
    assert sum(arrival.kept for arrival in sent) / len(sent) == pytest.approx(0.7 / 0.3, rel=0.25)
    assert trace(500.0, 0.3, 20.0, 8, 1, kept=True) == sent
    assert not any(arrival.kept for arrival in trace(500.0, 0.3, 1.0, 8, 1, kept=False))


def test_every_arrival_is_answered_and_the_batches_are_as_they_should_be(
    verifier_model: Model, work: list[Script]
) -> None:
    with closing(Fleet(verifier_model, work, 1, SchedulerLimits(), 0)) as fleet:
        burst = [Arrival(0.0, device, kept) for kept in (0, 2) for device in range(DEVICES)]
        played = fleet.play(burst)
        assert len(played.latencies) == len(burst)
        assert played.tokens >= len(burst)
        assert 0 < played.deliver < played.busy <= played.seconds
        shapes = {entry[1:] for batch in fleet.context.batches for entry in batch}
        assert shapes == {(1 + GAMMA, 1 + GAMMA), (1 + 3 * GAMMA, 1 + GAMMA)}
        bare = Bare(verifier_model, work, 1, 512, flash=False)
        bare.load(fleet.context.batches)
        assert bare.seconds() > 0
        assert bare.seconds() > 0  # again, from the same cache
        found = point(fleet.play, [Arrival(0.01 * i, i % DEVICES) for i in range(5)], seconds=60.0)
        assert found is not None
        assert (found["sent"], found["answered_in_time"]) == (5, 1.0)
        assert found["p50_ms"] <= found["p95_ms"]
        shares = run(fleet, DEVICES, 2, 1.0, 0)
        assert shares["requests_per_batch"] >= 1
        assert 0 < shares["next_batch"] < 1


def test_a_script_is_the_verifiers_own_text(work: list[Script]) -> None:
    assert all((len(script.before), len(script.text)) == (CACHED, GAMMA) for script in work)
