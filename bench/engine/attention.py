"""Measure where llama.cpp's flash attention pays on this processor, and where the plain one does.

    python -m bench.engine.attention [--models edgellm-draft edgellm-verifier 0.5b] [--depths 64 512] [--repeats 40]

llama.cpp's flash attention on a processor takes a batch of fewer than 64 rows row by row, so it is slow at what a
verifier does. The rule in `edgellm/engine/native.py` (`flash_pays`) rests on these figures.

Rows: the prefill of a prompt, in batches of 512 and of 32, as the verifier service takes it, and one decode of n rows
behind that prompt. Columns: each attention behind each depth, in turns; medians in milliseconds. The same decode has
been done twice before, so that everything is set up for it. Without flash attention, `Context.decode` gives a single
token of a small model a copy of itself as a second row.
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
from edgellm.engine import Context, Model
from edgellm.storage import resolve
from testkit import random_gguf

ROWS = (1, 2, 4, 8, 16, 32)
N_CTX = 2_048
HALF = "0.5b"


def measured(model: Model, depth: int, threads: int | None, repeats: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each pass, by attention."""
    prompt = (np.arange(depth) % 400 + 300).astype(np.int32)
    ids = np.arange(300, 300 + max(ROWS), dtype=np.int32)
    taken: dict[tuple[str, str], list[float]] = {}

    def timed(way: str, what: str, context: Context, rows: np.ndarray[Any, np.dtype[np.int32]], outputs: int) -> None:
        began = perf_counter()
        context.decode(rows, outputs=outputs)
        taken.setdefault((way, what), []).append(perf_counter() - began)

    with ExitStack() as stack:
        ways = {"flash": True, "plain": False}
        whole = {w: stack.enter_context(Context(model, n_ctx=N_CTX, threads=threads, flash=f)) for w, f in ways.items()}
        parts = {
            w: stack.enter_context(Context(model, n_ctx=N_CTX, threads=threads, flash=f, n_batch=32))
            for w, f in ways.items()
        }
        for repeat in range(repeats):
            for way in ways:
                if repeat < max(2, repeats // 10):
                    for what, contexts in (("prefill by 512", whole), ("prefill by 32", parts)):
                        contexts[way].clear()
                        timed(way, what, contexts[way], prompt, 1)
                context = whole[way]
                for rows in ROWS:
                    for _ in range(2):
                        context.decode(ids[:rows], outputs=rows)
                        context.rollback(depth)
                    timed(way, f"{rows} row{'s' * (rows > 1)}", context, ids[:rows], rows)
                    context.rollback(depth)
    found: dict[str, dict[str, float]] = {}
    for (way, what), seconds in taken.items():
        found.setdefault(way, {})[what] = 1e3 * median(seconds)
    return found


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table for each model: a row for each pass, and both attentions at every depth."""
    lines = []
    for model, depths in results["models"].items():
        columns = [f"{way}, {depth}" for depth in depths for way in ("flash", "plain")]
        lines += [f"{model}:", "", f"| ms, behind | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
        for what in next(iter(depths.values()))["flash"]:
            cells = [f"{depths[depth][way][what]:.2f}" for depth in depths for way in ("flash", "plain")]
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
                random_gguf.write(path, random_gguf.SHAPES["qwen2.5-0.5b"], "Q4_0", 0)
            repeats = max(2, arguments.repeats // 4) if name == HALF else arguments.repeats
            with Model.load(path if name == HALF else resolve(name)) as model:
                models["Qwen2.5-0.5B shape, Q4_0" if name == HALF else name] = {
                    str(depth): measured(model, depth, arguments.threads, repeats) for depth in arguments.depths
                }
    sys.stdout.write(table({"models": models}) + "\n")
    sys.stdout.write(f"written: {write(arguments.name, 'bench.engine.attention', {'models': models}, 0)}\n")


if __name__ == "__main__":
    main()
