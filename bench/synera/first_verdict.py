"""Measure the time to the first verdict on a prompt, for a device that is alone with its verifier (Synera, 4.5).

    python -m bench.synera.first_verdict [--models edgellm-verifier 0.5b] [--lengths 64 128 256 512] [--repeats 9]

The verifier prefills a prompt in pieces of 32 tokens while other devices are connected, as in the paper, and otherwise
in pieces of 128. Once it has a cost curve, it chooses both sizes (`edgellm/verifier/prefill_pieces.py`). The four take
turns.

Columns: tokens of the prompt, milliseconds from the request to the verdict in pieces of 32 and of 128 (alone), and the
share of the former, within a turn, of pieces of 128, and of chosen pieces alone and beside another session. All are
medians.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness import hardware
from bench.harness.report import write
from bench.harness.statistics import alternate, spread
from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.hardware import Hardware
from edgellm.llm.cost_curves import CurveMeasurement
from edgellm.spec.draft_length import KNOTS, CostCurve
from edgellm.spec.types import GREEDY, Chunk, Verdict
from edgellm.spec.verifier import VerifyRequest
from edgellm.storage import resolve
from edgellm.verifier.in_process import VerifierWorker
from edgellm.verifier.judgement import Answer
from edgellm.verifier.scheduler import SchedulerLimits
from testkit.gguf import random_model

POSITIONS = 1024
HALF = "0.5b"


class Verifier:
    """A worker with these limits, or with pieces chosen by `curve`, for one device, `beside` an idle session or not."""

    def __init__(
        self, model: Model, limits: SchedulerLimits, threads: int | None, curve: CostCurve | None = None,
        beside: bool = False,
    ) -> None:  # fmt: skip
        context = Context(model, ContextSpec(n_ctx=POSITIONS, n_seq=2, threads=threads, unified=False))
        self._worker = VerifierWorker(context, 2, model.is_eog, limits)
        self.pieces = "" if curve is None else self._worker.use_curve(curve.rows, curve.seconds)
        self._worker.start()
        self._sessions = 0
        if beside:
            self._ask(10)

    def first(self, length: int) -> float:
        """Return the milliseconds for a new prompt of `length` tokens."""
        began = perf_counter()
        self._ask(length)
        took = 1e3 * (perf_counter() - began)
        self._worker.end_session(self._sessions)
        return took

    def _ask(self, length: int) -> None:
        self._sessions += 1
        ids = np.random.default_rng(self._sessions).integers(300, 2000, length).astype(np.int32)
        answers: SimpleQueue[Answer] = SimpleQueue()
        self._worker.submit(VerifyRequest(self._sessions, GREEDY, 0, ids, Chunk()), answers.put)
        answer = answers.get()
        assert isinstance(answer, Verdict), answer

    def close(self) -> None:
        self._worker.close()


def measured(path: Path, lengths: list[int], repeats: int, threads: int | None, own: Hardware) -> list[dict[str, Any]]:
    """Return a row for each length."""
    limits = SchedulerLimits()
    with Model.load(path, hardware=own) as model:
        with Context(model, ContextSpec(n_ctx=KNOTS[-1] + 64, threads=threads)) as context:
            curve = CurveMeasurement().run(context)
        with (
            closing(Verifier(model, SchedulerLimits(solo_chunk=limits.chunk), threads)) as pieces,
            closing(Verifier(model, limits, threads)) as alone,
            closing(Verifier(model, limits, threads, curve)) as chosen,
            closing(Verifier(model, limits, threads, curve, beside=True)) as beside,
        ):
            rows = []
            for length in lengths:
                runs = [partial(verifier.first, length) for verifier in (pieces, alone, chosen, beside)]
                for run in runs:
                    run()
                small, large, *by_curve = alternate(repeats, *runs)
                of, of_chosen, of_beside = (
                    spread([a / b for a, b in zip(taken, small, strict=True)]) for taken in (large, *by_curve)
                )
                rows.append(
                    {"tokens": length, "pieces": spread(small), "alone": spread(large), "of": of, "chosen": of_chosen,
                     "beside": of_beside, "choice": chosen.pieces}
                )  # fmt: skip
            return rows


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each model and length of the prompt, and the choice of pieces where it was measured."""
    hows = [
        how for how in ("chosen", "beside") if all(how in row for rows in results["models"].values() for row in rows)
    ]
    lines = [
        f"{'':20}{'tokens':>8}{'by 32, ms':>11}{'alone, ms':>11}{'of that':>9}" + "".join(f"{how:>9}" for how in hows)
    ]
    for name, rows in results["models"].items():
        lines += [
            f"{name:20}{row['tokens']:8}{row['pieces']['median']:11.1f}{row['alone']['median']:11.1f}"
            + "".join(f"{row[how]['median']:9.2f}" for how in ("of", *hows))
            for row in rows
        ]
    lines += [f"{name}: {rows[0]['choice']}." for name, rows in results["models"].items() if hows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["edgellm-verifier", HALF])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    hardware.add_arguments(parser, hardware.LOADED)
    parser.add_argument("--name", default="first_verdict", help="of the result file")
    arguments = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            path = Path(folder) / "half.gguf" if name == HALF else resolve(name)
            if name == HALF:
                random_model.write(path, random_model.SHAPES["qwen2.5-0.5b"], "Q4_0")
            own = hardware.of(arguments)
            figures[name] = measured(path, arguments.lengths, arguments.repeats, arguments.threads, own)
    sys.stdout.write(table({"models": figures}))
    write(arguments.name, "bench.synera.first_verdict", {"models": figures})


if __name__ == "__main__":
    main()
