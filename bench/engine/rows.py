"""Measure the time of one decode of n rows, alone and padded to another number of rows.

    python -m bench.engine.rows [--models edgellm-verifier 0.5b] [--type Q4_0] [--repeats 15] [--threads N]

llama.cpp computes rows of quantised weights several at a time, and the rest one by one: more rows can take less time.
The cost curve is measured as for replies (`CurveMeasurement`), and says to how many rows a decode is padded. Then every
number of rows is decoded in random order, padded or not, each twice in a row, and the second time counts.

Rows of the table: rows of the decode, its median in milliseconds, the number of rows that it is padded to, and the
median then.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness import hardware
from bench.harness.report import write
from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.hardware import Hardware
from edgellm.llm.cost_curves import CurveMeasurement
from edgellm.storage import resolve
from testkit.gguf import random_model

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 20, 24, 32)
BEHIND = 128
HALF = "0.5b"


def measured(path: Path, repeats: int, threads: int | None, own: Hardware) -> list[dict[str, Any]]:
    """Return for each number of rows the milliseconds, the number that it is padded to, and the milliseconds then."""
    ids = np.random.default_rng(0).integers(300, 2000, BEHIND).astype(np.int32)
    taken: dict[tuple[int, bool], list[float]] = {(n, filled): [] for n in ROWS for filled in (False, True)}
    with (
        Model.load(path, hardware=own) as model,
        Context(model, ContextSpec(n_ctx=2 * BEHIND, threads=threads)) as context,
    ):
        widths = CurveMeasurement().run(context).widths()
        context.clear()
        context.decode(ids)
        for turn in range(repeats):
            order = list(taken)
            random.Random(turn).shuffle(order)
            for n, filled in order:
                context.fill(widths if filled else ())
                for _ in range(2):
                    context.rollback(BEHIND)
                    began = perf_counter()
                    context.decode(ids[:n], outputs=n)
                    seconds = perf_counter() - began
                taken[n, filled].append(seconds)
    return [
        {
            "rows": n,
            "alone_ms": 1e3 * median(taken[n, False]),
            "filled_to": widths[n],
            "filled_ms": 1e3 * median(taken[n, True]),
        }
        for n in ROWS
    ]


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table for each model, with a column for each number of rows."""
    lines = []
    for name, found in results["models"].items():
        lines += [f"{name}:", "", f"| rows | {' | '.join(str(row['rows']) for row in found)} |"]
        lines.append("|---|" + "---|" * len(found))
        lines.append(f"| ms | {' | '.join(_short(row['alone_ms']) for row in found)} |")
        lines.append(f"| padded to | {' | '.join(str(row['filled_to']) for row in found)} |")
        lines += [f"| ms | {' | '.join(_short(row['filled_ms']) for row in found)} |", ""]
    return "\n".join(lines)


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.{0 if milliseconds >= 9.5 else 2}f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["edgellm-verifier", HALF])
    parser.add_argument("--type", default="Q4_0", help="of the 0.5B shape's weights")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    hardware.add_arguments(parser, hardware.LOADED)
    parser.add_argument("--name", default="rows", help="of the result file")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            path = Path(folder) / "half.gguf" if name == HALF else resolve(name)
            if name == HALF:
                random_model.write(path, random_model.SHAPES["qwen2.5-0.5b"], arguments.type)
            label = f"Qwen2.5-0.5B shape, {arguments.type}" if name == HALF else name
            found[label] = measured(path, arguments.repeats, arguments.threads, hardware.of(arguments))
    sys.stdout.write(table({"models": found}))
    write(arguments.name, "bench.engine.rows", {"models": found})


if __name__ == "__main__":
    main()
