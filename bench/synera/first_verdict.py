"""Measure the time to the first verdict on a prompt, for a device that is alone with its verifier (Synera, 4.5).

    python -m bench.synera.first_verdict [--models edgellm-verifier 0.5b] [--lengths 64 128 256 512] [--repeats 9]

The verifier prefills a prompt in pieces of 32 tokens while other devices are connected, as in the paper, and otherwise
in larger pieces. The two take turns.

Columns: tokens of the prompt, milliseconds from the request to the verdict in pieces of 32 and alone, and the ratio
within a turn. All are medians.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.report import write
from bench.harness.statistics import alternate, spread
from edgellm.engine import Context, Model
from edgellm.spec.types import GREEDY, Chunk, Verdict
from edgellm.storage import resolve
from edgellm.verifier.in_process import VerifierWorker
from edgellm.verifier.requests import Answer, VerifyRequest
from edgellm.verifier.scheduler import SchedulerLimits
from testkit import random_gguf

POSITIONS = 1024
HALF = "0.5b"


class Verifier:
    """A worker with these limits, for one device."""

    def __init__(self, model: Model, limits: SchedulerLimits, threads: int | None) -> None:
        context = Context(model, n_ctx=POSITIONS, n_seq=2, threads=threads, unified=False)
        self._worker = VerifierWorker(context, 2, model.is_eog, limits)
        self._worker.start()
        self._sessions = 0

    def first(self, length: int) -> float:
        """Return the milliseconds for a new prompt of `length` tokens."""
        self._sessions += 1
        ids = np.random.default_rng(self._sessions).integers(300, 2000, length).astype(np.int32)
        answers: SimpleQueue[Answer] = SimpleQueue()
        began = perf_counter()
        self._worker.submit(VerifyRequest(self._sessions, GREEDY, 0, ids, Chunk()), answers.put)
        answer = answers.get()
        took = 1e3 * (perf_counter() - began)
        assert isinstance(answer, Verdict), answer
        self._worker.end_session(self._sessions)
        return took

    def close(self) -> None:
        self._worker.close()


def measured(path: Path, lengths: list[int], repeats: int, threads: int | None) -> list[dict[str, Any]]:
    """Return a row for each length."""
    limits = SchedulerLimits()
    with (
        Model.load(path) as model,
        closing(Verifier(model, limits, threads)) as whole,
        closing(Verifier(model, SchedulerLimits(solo_chunk=limits.chunk), threads)) as pieces,
    ):
        rows = []
        for length in lengths:
            whole.first(length), pieces.first(length)
            large, small = alternate(repeats, lambda n=length: whole.first(n), lambda n=length: pieces.first(n))  # type: ignore[misc]
            less = [a / b for a, b in zip(large, small, strict=True)]
            rows.append({"tokens": length, "pieces": spread(small), "alone": spread(large), "of": spread(less)})
        return rows


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each model and length of the prompt."""
    lines = [f"{'':20}{'tokens':>8}{'by 32, ms':>11}{'alone, ms':>11}{'of that':>9}"]
    for name, rows in results["models"].items():
        lines += [
            f"{name:20}{row['tokens']:8}{row['pieces']['median']:11.1f}{row['alone']['median']:11.1f}"
            f"{row['of']['median']:9.2f}"
            for row in rows
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["edgellm-verifier", HALF])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="first_verdict", help="of the result file")
    arguments = parser.parse_args()
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            path = Path(folder) / "half.gguf" if name == HALF else resolve(name)
            if name == HALF:
                random_gguf.write(path, random_gguf.SHAPES["qwen2.5-0.5b"], "Q4_0")
            figures[name] = measured(path, arguments.lengths, arguments.repeats, arguments.threads)
    sys.stdout.write(table({"models": figures}))
    write(arguments.name, "bench.synera.first_verdict", {"models": figures})


if __name__ == "__main__":
    main()
