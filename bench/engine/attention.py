"""Measure where llama.cpp's flash attention is faster than the plain one on this processor.

    python -m bench.engine.attention [--models edgellm-draft edgellm-verifier 0.5b] [--depths 64 512] [--repeats 40]

On a processor, llama.cpp's flash attention computes a batch of fewer than 64 rows row by row, so it is slow at what a
verifier does. The rule in `edgellm/engine/native.py` (`flash_pays`) rests on these figures.

Rows: the prefill of a prompt, in batches of 512 and of 32, the verifier's own, and one decode of n rows after that
prompt. Columns: each attention after each depth, in turns; medians in milliseconds. The same decode was run twice
before, so that everything is set up for it. Without flash attention, `Context.decode` gives a single token of a small
model a copy of itself as a second row.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.report import write
from edgellm.engine import Context, ContextSpec, Model
from edgellm.storage import resolve
from testkit.gguf import random_model

ROWS = (1, 2, 4, 8, 16, 32)
N_CTX = 2_048
HALF = "0.5b"


def measured(model: Model, depth: int, threads: int | None, repeats: int) -> dict[str, dict[str, float]]:
    """Return the milliseconds of each pass, by attention."""
    prompt = (np.arange(depth) % 400 + 300).astype(np.int32)
    ids = np.arange(300, 300 + max(ROWS), dtype=np.int32)
    times: dict[tuple[str, str], list[float]] = {}

    def timed(kind: str, what: str, context: Context, rows: np.ndarray[Any, np.dtype[np.int32]], outputs: int) -> None:
        began = perf_counter()
        context.decode(rows, outputs=outputs)
        times.setdefault((kind, what), []).append(perf_counter() - began)

    with ExitStack() as stack:
        kinds = {"flash": True, "plain": False}
        whole, parts = (
            {
                kind: stack.enter_context(
                    Context(model, ContextSpec(N_CTX, n_batch=rows, threads=threads, flash=flash))
                )
                for kind, flash in kinds.items()
            }
            for rows in (None, 32)
        )
        for repeat in range(repeats):
            for kind in kinds:
                if repeat < max(2, repeats // 10):
                    for what, contexts in (("prefill by 512", whole), ("prefill by 32", parts)):
                        contexts[kind].clear()
                        timed(kind, what, contexts[kind], prompt, 1)
                context = whole[kind]
                for rows in ROWS:
                    for _ in range(2):
                        context.decode(ids[:rows], outputs=rows)
                        context.rollback(depth)
                    timed(kind, f"{rows} row{'s' * (rows > 1)}", context, ids[:rows], rows)
                    context.rollback(depth)
    found: dict[str, dict[str, float]] = {}
    for (kind, what), seconds in times.items():
        found.setdefault(kind, {})[what] = 1e3 * median(seconds)
    return found


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table for each model: a row for each pass, and both attentions at every depth."""
    lines = []
    for model, depths in results["models"].items():
        columns = [f"{kind}, {depth}" for depth in depths for kind in ("flash", "plain")]
        lines += [f"{model}:", "", f"| ms, after | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
        for what in next(iter(depths.values()))["flash"]:
            cells = [f"{depths[depth][kind][what]:.2f}" for depth in depths for kind in ("flash", "plain")]
            lines.append(f"| {what} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["edgellm-draft", "edgellm-verifier", HALF])
    parser.add_argument("--depths", nargs="+", type=int, default=[64, 512])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=40, help="a fourth of them at the 0.5B shape")
    parser.add_argument("--name", default="attention", help="of the result file")
    arguments = parser.parse_args()
    models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            path = Path(folder) / "half.gguf"
            if name == HALF:
                random_model.write(path, random_model.SHAPES["qwen2.5-0.5b"], "Q4_0", 0)
            repeats = max(2, arguments.repeats // 4) if name == HALF else arguments.repeats
            with Model.load(path if name == HALF else resolve(name)) as model:
                models["Qwen2.5-0.5B shape, Q4_0" if name == HALF else name] = {
                    str(depth): measured(model, depth, arguments.threads, repeats) for depth in arguments.depths
                }
    sys.stdout.write(table({"models": models}) + "\n")
    sys.stdout.write(f"written: {write(arguments.name, 'bench.engine.attention', {'models': models}, 0)}\n")


if __name__ == "__main__":
    main()
