"""Measure how long 64 devices wait for a verdict, against the rate of requests (Synera, Fig. 15).

Devices draft chunks at random moments (Poisson, open loop) and send the share of them that their budget allows. Each
request is five rows at 256 cached tokens; with `--kept` it also has the chunks before it that were not sent. A
device has one open request. There is no network.

First, requests that are all sent at once are computed by three methods in turn: by the worker; by llama.cpp alone, with
the very batches of the worker and the same attention; and by the worker with one request a batch.

Columns: the budget; chunks that all devices draft each second, and those that are sent; latency from a request's
scheduled time, at the median and the 95th percentile; and the share that was answered before the trace ended. A rate is
carried if that is 95 % or more. `--rates` are shares of the requests that the verifier answers each second when all are
sent at once.
"""

import ctypes
import random
from collections.abc import Callable, Sequence
from contextlib import closing
from time import perf_counter
from typing import Annotated, Any

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import alternate, spread
from edgellm.engine import Model, llama_api
from edgellm.engine.hardware import Hardware
from edgellm.engine.model import LoadSpec
from edgellm.engine.native import lib
from edgellm.storage.model_files import resolve
from edgellm.verifier.scheduler import SchedulerLimits
from testkit.simulated_devices import CACHED, Arrival, Fleet, Script, scripts

MODEL = "edgellm-verifier"
BUDGETS = (0.3, 0.6, 0.9)
RATES = (0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0)
MOST = 1.3  # beyond this share of the capacity a queue only grows
CARRIED = 0.95


def trace(rate: float, budget: float, seconds: float, devices: int, seed: int) -> list[Arrival]:
    """Return the chunks sent, of those drafted `rate` times a second."""
    rng = random.Random(seed)
    at, sent = 0.0, []
    while (at := at + rng.expovariate(rate)) < seconds:
        device = rng.randrange(devices)
        if rng.random() < budget:
            sent.append(Arrival(at, device, 0))
    return sent


class Bare:
    """llama.cpp without our code: the batches are made before the clock starts."""

    def __init__(self, model: Model, work: list[Script], threads: int, rows: int, flash: bool) -> None:
        rows = max(rows, len(work), CACHED)
        kind = "f32" if model.header.is_f32 else "f16"
        spec = llama_api.NativeSpec(
            (CACHED + 64) * len(work), len(work), rows, threads, unified=False, cache_type=kind, flash=flash
        )
        self._context = llama_api.open_context(model.owned, spec)
        self._memory = lib.llama_get_memory(self._context.pointer)
        self._made: list[tuple[Any, list[tuple[int, int]]]] = []
        for device, script in enumerate(work):
            ids = script.before
            self._run(self._batch([(device, 0, ids, 0)]))
        self._text = [np.concatenate((script.before, script.text)) for script in work]

    def load(self, batches: list[list[tuple[int, int, int]]]) -> None:
        """Prepare the same batches: (sequence, tokens, rows with logits)."""
        for batch, _ in self._made:
            lib.llama_batch_free(batch)
        self._made = []
        for entries in batches:
            starts = [(seq, CACHED + max(outputs - 1, 0) - tokens) for seq, tokens, outputs in entries]
            rows = [
                (seq, start, self._text[seq][start : start + tokens], outputs)
                for (seq, start), (_, tokens, outputs) in zip(starts, entries, strict=True)
            ]
            self._made.append((self._batch(rows), starts))

    def seconds(self) -> float:
        """Return the seconds of all batches."""
        began = perf_counter()
        for batch, starts in self._made:
            for seq, start in starts:
                lib.llama_memory_seq_rm(self._memory, seq, start, -1)
            self._run(batch)
        return perf_counter() - began

    def _run(self, batch: Any) -> None:
        if lib.llama_decode(self._context.pointer, batch):
            raise RuntimeError("llama_decode failed")
        lib.llama_synchronize(self._context.pointer)

    def _batch(self, rows: list[tuple[int, int, Any, int]]) -> Any:
        total = sum(len(ids) for _, _, ids, _ in rows)
        batch, at = lib.llama_batch_init(total, 0, 1), 0
        for seq, start, ids, outputs in rows:
            for i, token in enumerate(ids.tolist()):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, start + i, 1
                batch.seq_id[at][0] = ctypes.c_int32(seq)
                batch.logits[at] = len(ids) - i <= outputs
                at += 1
        batch.n_tokens = total
        return batch


def ratios(model: Model, work: list[Script], rounds: int, repeats: int, seed: int) -> Figures:
    """Return the verified tokens a second of the three methods, and their ratios within each turn."""
    burst = [Arrival(0.0, number % len(work), 0) for number in range(rounds * len(work))]
    limits = SchedulerLimits()
    with (
        closing(Fleet(model, work, None, limits, seed)) as together,
        closing(Fleet(model, work, None, SchedulerLimits(rows=1), seed)) as single,
    ):
        bare = Bare(model, work, together.context.native.threads, limits.rows, together.context.native_spec.flash)
        tokens: list[int] = []

        def worker() -> float:
            played = together.play(burst)
            tokens.append(played.tokens)
            return played.tokens / played.busy

        def one_by_one() -> float:
            played = single.play(burst)
            return played.tokens / played.busy

        def alone() -> float:
            return tokens[0] / bare.seconds()

        worker()  # warms up, and makes the batches for llama.cpp
        bare.load(together.context.batches)
        rates = alternate(repeats, worker, alone, one_by_one)
        batches = [len(batch) for batch in together.context.batches]
    ours, theirs, singly = rates
    return {
        "worker": spread(ours),
        "llama_cpp": spread(theirs),
        "one_by_one": spread(singly),
        "of_llama_cpp": spread([a / b for a, b in zip(ours, theirs, strict=True)]),
        "times_one_by_one": spread([a / b for a, b in zip(ours, singly, strict=True)]),
        "requests_per_batch": float(np.mean(batches)),
    }


def capacity(fleet: Fleet, devices: int, rounds: int) -> float:
    """Return the requests a second when all devices always have one waiting."""
    burst = [Arrival(0.0, device) for _ in range(rounds) for device in range(devices)]
    return len(burst) / fleet.play(burst).busy


def point(play: Callable[[list[Arrival]], Any], sent: list[Arrival], seconds: float) -> dict[str, float] | None:
    """Return latencies in ms, and the share of requests answered while others still came; None without requests."""
    if not sent:
        return None
    played = play(sent)
    p50, p95 = np.percentile(np.array(played.latencies) * 1e3, [50, 95])
    in_time = sum(at <= seconds for at in played.answered)
    return {
        "sent": len(sent), "p50_ms": float(p50), "p95_ms": float(p95), "answered_in_time": in_time / len(sent),
        "tokens_per_second": played.tokens / played.seconds,
    }  # fmt: skip


def sweep(fleet: Fleet, most: float, devices: int, rates: Sequence[float], seconds: float, seed: int) -> Figures:
    """Return the latency against the rate, for each budget; `most` is the capacity."""
    curves, carried = [], {}
    for budget, share in track([(budget, share) for budget in BUDGETS for share in rates], "rates"):
        rate = share * most
        if budget * share > MOST:
            continue
        sent = trace(rate, budget, seconds, devices, seed)
        found = point(fleet.play, sent, seconds)
        if found is None:
            continue
        curves.append({"budget": budget, "rate": rate, "sent_per_second": len(sent) / seconds, **found})
        if found["answered_in_time"] >= CARRIED:
            carried[f"{budget}"] = rate
    return {"latency": curves, "carried": carried}


HEAD = f"{'budget':>6}{'chunks/s':>10}{'sent/s':>9}{'p50 ms':>10}{'p95 ms':>10}{'in time':>9}"


def _row(row: dict[str, Any]) -> str:
    return (
        f"{row['budget']:>6}{row['rate']:>10.1f}{row['sent_per_second']:>9.1f}{row['p50_ms']:>10.1f}"
        f"{row['p95_ms']:>10.1f}{row['answered_in_time']:>9.1%}"
    )


def at_once(found: dict[str, Any]) -> str:
    """Return the throughput of all requests at once, by each of the three methods."""
    lines = [
        f"{name:<12}{found[name]['median']:>10.0f} verified tokens a second"
        for name in ("worker", "llama_cpp", "one_by_one")
    ]
    lines.append(
        f"the worker does {found['of_llama_cpp']['median']:.1%} of what llama.cpp alone does with the same"
        f" batches, and {found['times_one_by_one']['median']:.2f} times what it does one by one"
    )
    return "\n".join(lines) + "\n"


def table(found: dict[str, Any]) -> str:
    """Return the throughput of all requests at once, and a line for each budget and rate."""
    return at_once(found["at_once"]) + "\n".join([HEAD, *map(_row, found["latency"])]) + "\n"


def measure(
    hardware: Hardware,
    devices: int = 64,
    seconds: Annotated[float, "of each trace"] = 20.0,
    rates: Annotated[Sequence[float], "as shares of the capacity"] = RATES,
    rounds: Annotated[int, "requests of each device when all are sent at once"] = 10,
    repeats: int = 5,
    seed: int = 0,
) -> Figures:
    """Return the throughput of all devices at once, and the latency against their rate."""
    with Model.load(resolve(MODEL), LoadSpec(hardware)) as model:
        work = scripts(model, devices, None, seed)
        found = ratios(model, work, rounds, repeats, seed)
        with closing(Fleet(model, work, None, SchedulerLimits(), seed)) as fleet:
            most = capacity(fleet, devices, rounds)
            swept = sweep(fleet, most, devices, rates, seconds, seed)
    return {"model": MODEL, "devices": devices, "at_once": found, "capacity": most, **swept}
