"""Measure a pass over drafted tokens up to the LM head, and with the head of the rows that are looked at.

llama.cpp computes the LM head, the product with the whole vocabulary, for every drafted token. A context that decodes
late stops before it, and computes the head for the rows that are looked at. The variants are decoded in random order
after the same text, each twice in a row, and the second time counts. Weights are random, of a real model's shape.

Rows, in milliseconds (medians): everything `at once`, as in llama.cpp; `up to the head`; with one row of the head; and
with all of them, one after another. Columns are numbers of rows.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.engine import Context, ContextSpec, Model, head_pays, known
from edgellm.llm.cost_curves import measure_heads
from testkit.gguf import random_model

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
BEHIND = 128
TYPE = "Q4_0"
AT_ONCE, BODY, ONE, ALL = "at once", "up to the head", "and one head", "and all heads"


def measured(path: Path, repeats: int, threads: int | None) -> dict[str, Any]:
    """Return for each number of rows the milliseconds of every variant."""
    ids = np.random.default_rng(0).integers(300, 2000, BEHIND).astype(np.int32)
    with (
        Model.load(path) as model,
        Context(model, ContextSpec(n_ctx=2 * BEHIND, threads=threads)) as bare,
        Context(model, ContextSpec(n_ctx=2 * BEHIND, threads=threads, lazy=True)) as late,
    ):
        if late.lazy_head is None:
            raise SystemExit("this llama.cpp computes no head alone")
        late.lazy_head.take(measure_heads(late.lazy_head.head))
        for context in (bare, late):
            context.decode(ids)
        variants: dict[str, Callable[[int], object]] = {
            AT_ONCE: lambda n: bare.decode(ids[:n], outputs=n),
            BODY: lambda n: late.decode_lazy(ids[:n], outputs=n),
            ONE: lambda n: known(late.decode_lazy(ids[:n], outputs=n, reached=[0.0] * (n - 1)), 1),
            ALL: lambda n: known(late.decode_lazy(ids[:n], outputs=n, reached=[1.0] * (n - 1)), n),
        }
        times: dict[tuple[int, str], list[float]] = {(n, variant): [] for n in ROWS for variant in variants}
        for turn in range(repeats):
            order = list(times)
            random.Random(turn).shuffle(order)
            for n, variant in order:
                for _ in range(2):
                    bare.rollback(BEHIND)
                    late.rollback(BEHIND)
                    began = perf_counter()
                    variants[variant](n)
                    seconds = perf_counter() - began
                times[n, variant].append(seconds)
        rows = [{"rows": n, **{variant: 1e3 * median(times[n, variant]) for variant in variants}} for n in ROWS]
        return {"rows": rows, "pays": head_pays(model)}


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table for each model: a column for each number of rows, a row for each variant."""
    lines = []
    for name, found in results["models"].items():
        rows = found["rows"]
        more = rows[0][BODY] / rows[0][AT_ONCE] - 1.0
        lines += [f"{name}, ms:", "", f"| rows | {' | '.join(str(row['rows']) for row in rows)} |"]
        lines.append("|---|" + "---|" * len(rows))
        lines += [f"| {key} | {' | '.join(f'{row[key]:.0f}' for row in rows)} |" for key in (AT_ONCE, BODY, ONE, ALL)]
        lines += ["", f"A single row takes {more:+.1%} where a context can be late.", ""]
    return "\n".join(lines)


def measure(
    shapes: Sequence[str] = ("qwen2.5-0.5b", "qwen2.5-1.5b"), repeats: int = 15, threads: int | None = None
) -> Figures:
    """Return the times of models of these shapes."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for shape in track(shapes, "shapes"):
            path = Path(folder) / "model.gguf"
            random_model.write(path, random_model.SHAPES[shape], TYPE)
            found[f"{shape} shape, {TYPE}"] = measured(path, repeats, threads)
    return {"models": found}
