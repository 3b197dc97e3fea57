"""Measure the prebuilt llama.cpp beside one that was compiled for this processor: passes of 1 to 16 rows, and prefill.

    python -m bench.engine.libraries COMPILED [--models smollm2:135m 0.5b] [--rounds 3]

COMPILED is the folder of the compiled shared libraries. Each measurement is a process of its own; the libraries take
turns, and every second round begins with the other one. *n rows* is the median of one pass of n rows behind 128 tokens,
in milliseconds; *prefill* is that of 512 tokens, in tokens a second. A cell has the median of the rounds, and in
parentheses the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.report import write
from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.library import VARIABLE
from edgellm.storage import resolve
from testkit.gguf import random_model

MODULE = "bench.engine.libraries"
ROWS = (1, 2, 4, 8, 16)
BEHIND, PROMPT = 128, 512
HALF = "0.5b"
PREFILL = "prefill"


def measured(path: Path, repeats: int) -> dict[str, float]:
    """Return the milliseconds of each pass, and the tokens a second of a prefill, with this process's library."""
    ids = np.random.default_rng(0).integers(300, 2000, PROMPT).astype(np.int32)
    found = {}
    with Model.load(path) as model, Context(model, ContextSpec(n_ctx=2 * PROMPT)) as context:
        for name, behind, rows in [*((str(n), BEHIND, n) for n in ROWS), (PREFILL, 0, PROMPT)]:
            context.clear()
            if behind:
                context.decode(ids[:behind])
            taken = []
            for _ in range(repeats if behind else max(2, repeats // 8)):
                context.rollback(behind)
                began = perf_counter()
                context.decode(ids[:rows], outputs=rows if behind else 1)
                taken.append(perf_counter() - began)
            found[name] = 1e3 * median(taken[1:]) if behind else PROMPT / median(taken[1:])
    return found


def in_child(path: Path, library: Path | None) -> dict[str, float]:
    """Return what a process with that library measures; with the prebuilt one for None."""
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if library is not None:
        environment[VARIABLE] = str(library)
    words = [sys.executable, "-m", MODULE, str(library), "--one", str(path)]
    done = subprocess.run(words, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each model and library."""
    columns = [*(f"{n} rows" for n in ROWS), PREFILL]
    lines = [f"{'':32}" + "".join(f"{column:>18}" for column in columns)]
    for model, libraries in found["models"].items():
        for library, rounds in libraries.items():
            cells = [_cell([one[name] for one in rounds]) for name in rounds[0]]
            lines.append(f"{model} {library:32}"[:32] + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines) + "\n"


def _cell(values: list[float]) -> str:
    digits = 0 if median(values) >= 100 else 1
    return f"{median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("compiled", type=Path)
    parser.add_argument("--models", nargs="+", default=["smollm2:135m", HALF])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--name", default="libraries", help="of the result file")
    arguments = parser.parse_args()
    if arguments.one:
        sys.stdout.write(json.dumps(measured(arguments.one, 40)))
        return
    libraries = {"prebuilt": None, "compiled": arguments.compiled.resolve()}
    models: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models:
            path = Path(folder) / "half.gguf" if name == HALF else resolve(name)
            if name == HALF:
                random_model.write(path, random_model.SHAPES["qwen2.5-0.5b"], "Q4_0")
            rounds = models.setdefault("0.5B shape, Q4_0" if name == HALF else name, {one: [] for one in libraries})
            for number in range(arguments.rounds):
                order = list(libraries) if number % 2 == 0 else list(reversed(libraries))
                for library in order:
                    rounds[library].append(in_child(path, libraries[library]))
    written = write(arguments.name, MODULE, {"models": models})
    sys.stdout.write(f"{table({'models': models})}written: {written}\n")


if __name__ == "__main__":
    main()
