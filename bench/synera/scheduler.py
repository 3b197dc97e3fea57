"""Measure the cost of scheduling: the verifier's time outside the model and the rule (Synera, Fig. 18).

All sessions always have a request waiting, at 256 cached tokens. A budget is the share of chunks that a device sends; a
request also has the chunks that were kept before it. The higher the budget, the fewer tokens a request has, and the
larger the share of its scheduling (25 % at the highest in the paper). Batches are made as the verifier makes them
(`together`), and with one request each, which gives the most iterations.

Columns: requests in a batch, the time of an iteration, and the share of it that the worker spends in `next_batch` and
in all of its own work: without the engine's decode, the verification rule, and this benchmark (`bookkeeping`). All are
medians.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import closing
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import spread
from edgellm.engine import Model
from edgellm.engine.hardware import Hardware
from edgellm.engine.model import LoadSpec
from edgellm.spec.verification import judge
from edgellm.storage.model_files import resolve
from edgellm.verifier.scheduler import SchedulerLimits, next_batch
from testkit.simulated_devices import Arrival, Fleet, kept_before, scripts

MODEL = "edgellm-verifier"
BUDGETS = (0.3, 0.6, 0.9, 1.0)
BATCHING = {"together": SchedulerLimits(), "one_by_one": SchedulerLimits(rows=1)}


class Clock:
    """A function that counts the seconds spent in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        began = perf_counter()
        result = self._function(*arguments, **more)
        self.seconds += perf_counter() - began
        return result


def run(fleet: Fleet, sessions: int, rounds: int, budget: float, seed: int) -> dict[str, float]:
    """Return shares of the worker's time, and milliseconds, for one burst."""
    rng = random.Random(seed)
    burst = [Arrival(0.0, device, kept_before(budget, rng)) for _ in range(rounds) for device in range(sessions)]
    with (
        patch("edgellm.spec.verification.judge", Clock(judge)) as rule,
        patch("edgellm.verifier.scheduler.next_batch", Clock(next_batch)) as choice,
    ):
        played = fleet.play(burst)
    batches, total = len(fleet.context.batches), played.busy
    book = total - fleet.context.seconds - rule.seconds - played.deliver
    return {
        "bookkeeping": book / total, "next_batch": choice.seconds / total, "iteration_ms": 1e3 * total / batches,
        "bookkeeping_ms": 1e3 * book / batches, "requests_per_batch": len(burst) / batches,
    }  # fmt: skip


HEAD = f"{'batches':<12}{'budget':>7}{'requests':>10}{'iteration':>14}{'next_batch':>12}{'bookkeeping':>13}"


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each batching and budget."""
    return "\n".join([HEAD, *map(_row, results["costs"])]) + "\n"


def _row(row: dict[str, Any]) -> str:
    return (
        f"{row['batches']:<12}{row['budget']:>7.1f}{row['requests_per_batch']['median']:>10.1f}"
        f"{row['iteration_ms']['median']:>11.2f} ms{row['next_batch']['median']:>12.2%}"
        f"{row['bookkeeping']['median']:>13.2%}"
    )


def measure(
    hardware: Hardware,
    sessions: int = 64,
    rounds: Annotated[int, "requests of each session in a burst"] = 20,
    repeats: int = 3,
    seed: int = 0,
) -> Figures:
    """Return the costs of each way to batch, at each budget."""
    rows = []
    with Model.load(resolve(MODEL), LoadSpec(hardware)) as model:
        work = scripts(model, sessions, None, seed)
        for batching, limits in track(BATCHING.items(), "ways to batch"):
            with closing(Fleet(model, work, None, limits, seed)) as fleet:
                for budget in BUDGETS:
                    runs = [run(fleet, len(work), rounds, budget, seed + number) for number in range(repeats)]
                    row = {key: spread([one[key] for one in runs]) for key in runs[0]}
                    rows.append({"batches": batching, "budget": budget, **row})
    return {"model": MODEL, "sessions": sessions, "costs": rows}
