"""How long a pass over drafted tokens takes up to the head, and with the heads of what is looked at.

    python -m bench.heads [--shapes qwen2.5-0.5b ...] [--type Q4_0] [--repeats 15] [--threads N]

llama.cpp computes the head, the product with the whole vocabulary, for every drafted token. A context that decodes late
stops before it, and computes the heads of the rows that are looked at. Every way is decoded in random order behind the
same text, each twice in a row, and the second time counts. Medians. Weights are random, of a real model's shape.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench import random_gguf
from bench.report import write
from edgellm.engine import Context, Model, head_pays, known
from edgellm.llm.ngram_runtime import measure_heads

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
BEHIND = 128
AT_ONCE, BODY, ONE, ALL = "at once", "up to the head", "and one head", "and all heads"


def measured(path: Path, repeats: int, threads: int | None) -> dict[str, Any]:
    """For each number of rows, milliseconds of every way."""
    ids = np.random.default_rng(0).integers(300, 2000, BEHIND).astype(np.int32)
    with (
        Model.load(path) as model,
        Context(model, n_ctx=2 * BEHIND, threads=threads) as bare,
        Context(model, n_ctx=2 * BEHIND, threads=threads, late=True) as late,
    ):
        if late.late is None:
            raise SystemExit("this llama.cpp computes no head alone")
        late.late.take(measure_heads(late.late.head))
        for context in (bare, late):
            context.decode(ids)
        ways: dict[str, Callable[[int], object]] = {
            AT_ONCE: lambda n: bare.decode(ids[:n], outputs=n),
            BODY: lambda n: late.decode_late(ids[:n], outputs=n),
            ONE: lambda n: known(late.decode_late(ids[:n], outputs=n, reached=[0.0] * (n - 1)), 1),
            ALL: lambda n: known(late.decode_late(ids[:n], outputs=n, reached=[1.0] * (n - 1)), n),
        }
        taken: dict[tuple[int, str], list[float]] = {(n, way): [] for n in ROWS for way in ways}
        for turn in range(repeats):
            order = list(taken)
            random.Random(turn).shuffle(order)
            for n, way in order:
                for _ in range(2):
                    bare.rollback(BEHIND)
                    late.rollback(BEHIND)
                    began = perf_counter()
                    ways[way](n)
                    seconds = perf_counter() - began
                taken[n, way].append(seconds)
        rows = [{"rows": n, **{way: 1e3 * median(taken[n, way]) for way in ways}} for n in ROWS]
        return {"rows": rows, "pays": head_pays(model)}


def table(models: dict[str, Any]) -> str:
    """Markdown: a column for each number of rows, a row for each way. One row is decoded at once by all."""
    lines = []
    for name, found in models.items():
        rows = found["rows"]
        more = rows[0][BODY] / rows[0][AT_ONCE] - 1.0
        lines += [f"{name}, ms:", "", f"| rows | {' | '.join(str(row['rows']) for row in rows)} |"]
        lines.append("|---|" + "---|" * len(rows))
        lines += [f"| {way} | {' | '.join(f'{row[way]:.0f}' for row in rows)} |" for way in (AT_ONCE, BODY, ONE, ALL)]
        lines += ["", f"A single row takes {more:+.1%} where a context can be late.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = sorted(random_gguf.SHAPES)
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=["qwen2.5-0.5b", "qwen2.5-1.5b"])
    parser.add_argument("--type", default="Q4_0", help="of the weights")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="heads", help="of the result file")
    arguments = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in arguments.shapes:
            path = Path(folder) / "model.gguf"
            random_gguf.write(path, random_gguf.SHAPES[shape], arguments.type)
            found[f"{shape} shape, {arguments.type}"] = measured(path, arguments.repeats, arguments.threads)
    sys.stdout.write(table(found))
    write(arguments.name, "bench.heads", {"models": found})


if __name__ == "__main__":
    main()
