"""Measure the memory of a draft model's context, of captured attention, and of the index of copies, by length.

    python -m bench.engine.memory [--lengths 4096 32768 98304]

The model has the shape of Qwen2.5 0.5B and random weights; nothing is loaded, llama.cpp reckons. The index is that of a
text whose tokens are distributed as words are (Zipf, exponent 1.3), and of one of random tokens, the most there can be.

Columns: tokens of the context, and MB of keys and values, of computing, of computing while attention is captured for an
importance gate or a profile, of the index of either text, and of the contexts that a profile opens besides the pair's
own to compare an early exit with the whole model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.report import write
from edgellm.engine import Capture, Context, ContextSpec, Model, ModelFile
from edgellm.engine.hardware import Hardware
from edgellm.engine.memory_fit import reckon
from edgellm.llm.profiling import MOST_READ
from testkit.gguf import random_model
from testkit.memory import index_bytes

WORDS = 50_000
LAYER = 1


def measured(file: ModelFile, length: int) -> dict[str, Any]:
    """Return the bytes for contexts of `length` tokens."""
    rng = np.random.default_rng(0)

    def context(model: Model, capture: Capture | None = None) -> list[Context]:
        return [Context(model, ContextSpec(n_ctx=length), capture=capture)]

    plain = reckon(file, Hardware(n_ctx=length), context)
    captured = reckon(file, Hardware(n_ctx=length), lambda model: context(model, Capture(attention=(LAYER,))))
    read = min(length, MOST_READ)
    exits = reckon(
        file,
        Hardware(n_ctx=read),
        lambda model: [Context(model, ContextSpec(n_ctx=read)) for _ in range(2)],
        reserved=True,
    )  # a reply's rows all give logits
    return {
        "tokens": length, "cache": plain.caches["CPU"], "compute": plain.compute["CPU"],
        "captured": captured.compute["CPU"], "text": index_bytes(np.minimum(rng.zipf(1.3, length), WORDS)),
        "random": index_bytes(rng.integers(0, WORDS, length)),
        "profile": exits.caches["CPU"] + exits.compute["CPU"],
    }  # fmt: skip


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each length."""
    columns = ("cache", "compute", "captured", "text", "random", "profile")
    lines = ["".join(f"{name:>10}" for name in ("tokens", *columns))]
    lines += [
        f"{row['tokens']:10}" + "".join(f"{row[name] / 1e6:10.1f}" for name in columns) for row in results["lengths"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4_096, 32_768, 98_304])
    parser.add_argument("--name", default="memory", help="of the result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half.gguf"
        random_model.write(path, random_model.SHAPES["qwen2.5-0.5b"], "Q4_0")
        file = ModelFile.open(path)
        figures = {"lengths": [measured(file, length) for length in arguments.lengths]}
    sys.stdout.write(table(figures))
    write(arguments.name, "bench.engine.memory", figures)


if __name__ == "__main__":
    main()
