"""Verification by one engine for several sessions at once: verified tokens a second."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np

from bench.engine.serve_throughput import GAMMA, TOKENS, Script, Worker
from bench.gpu.machine import Machine
from bench.harness.statistics import spread
from edgellm.engine import Context, ContextSpec, Model
from edgellm.verifier.scheduler import SchedulerLimits

_TEXTS = 4  # different ones: writing them takes time, too
_PROMPT = 64


def texts(model: Model, machine: Machine) -> list[Script]:
    """Return prompts of random tokens, and the model's own greedy text behind each."""
    made = []
    with Context(model, ContextSpec(n_ctx=_PROMPT + TOKENS + GAMMA + 8, threads=machine.threads)) as context:
        for seed in range(_TEXTS):
            prompt = np.random.default_rng(seed).integers(300, 100_000, _PROMPT).astype(np.int32)
            context.clear()
            feed, text = prompt, []
            for _ in range(TOKENS + GAMMA):
                text.append(int(context.decode(feed)[0].argmax()))
                feed = np.array(text[-1:], dtype=np.int32)
            made.append(Script(prompt, np.array(text, dtype=np.int32), seed))
    return made


def measured(machine: Machine) -> dict[str, Any]:
    """Return the tokens a second of every shape and number of sessions."""
    rows = []
    for shape in machine.amount.shapes[:2]:
        with Model.load(machine.random_model(shape), hardware=machine.hardware()) as model:
            scripts = texts(model, machine)
            for sessions in machine.amount.sessions:
                work = [scripts[at % len(scripts)] for at in range(sessions)]
                make = partial(Worker, model, work, machine.threads, SchedulerLimits())
                with closing(make()) as worker:
                    worker.rate()
                    rates = [worker.rate() for _ in range(machine.amount.repeats)]
                rows.append({"shape": shape, "sessions": sessions, "tokens_per_second": spread(rates)})
    return {"rows": rows}


def table(found: dict[str, Any]) -> str:
    """Return a line for each row, with the gain over one session."""
    lines = [f"{'shape':<16}{'sessions':>9}{'tokens/s':>10}{'of one session':>16}"]
    alone = {row["shape"]: row["tokens_per_second"]["median"] for row in found["rows"] if row["sessions"] == 1}
    for row in found["rows"]:
        rate = row["tokens_per_second"]["median"]
        lines.append(f"{row['shape']:<16}{row['sessions']:>9}{rate:>10.0f}{rate / alone[row['shape']]:>16.2f}")
    return "\n".join(lines) + "\n"
