"""Measure whether a thread decodes as fast if another thread of the process has decoded before it.

    python -m bench.engine.openmp [--model edgellm-verifier] [--rows 1 2 5 32] [--repeats 60]

GNU's OpenMP sends waiting threads to sleep at once if two threads of a process have decoded, which made the decode
of a small model five to eight times slower; `edgellm/engine/native.py` has them wait a little.

Medians in milliseconds of a decode after 256 cached tokens by two threads, each case in a process of its own: by the
main thread, and by a second thread while the main thread still has its team; with OpenMP's own waiting policy, and with
ours. Columns are numbers of rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.report import write
from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.native import WAITING
from edgellm.storage import resolve

CACHED = 256
POLICIES = {"OpenMP's own": {"GOMP_SPINCOUNT": WAITING["GOMP_SPINCOUNT"]}, "ours": {}}


def measured(model: Model, rows: list[int], repeats: int) -> dict[str, float]:
    """Return the milliseconds of a decode of each number of rows."""
    prompt = (np.arange(CACHED) % 400 + 300).astype(np.int32)
    medians: dict[str, float] = {}
    with Context(model, ContextSpec(n_ctx=CACHED + max(rows), threads=2)) as context:
        context.decode(prompt)
        for count in rows:
            ids, seconds = prompt[:count], []
            for _ in range(repeats):
                began = perf_counter()
                context.decode(ids, outputs=count)
                seconds.append(perf_counter() - began)
                context.rollback(CACHED)
            medians[str(count)] = 1e3 * median(seconds[3:])
    return medians


def both(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Measure in this process: in the main thread, then in a second one."""
    found: dict[str, dict[str, float]] = {}
    with Model.load(resolve(arguments.model)) as model:

        def run(who: str) -> None:
            found[who] = measured(model, arguments.rows, arguments.repeats)

        run("main thread")
        second = threading.Thread(target=run, args=("second thread",))
        second.start()
        second.join()
    return found


def table(found: dict[str, Any]) -> str:
    """Return a line for each policy and thread: milliseconds by number of rows."""
    first = next(iter(found["milliseconds"].values()))["main thread"]
    lines = [f"{'waiting':<14}{'decoded by':<15}" + "".join(f"{rows + ' rows':>10}" for rows in first)]
    for policy, threads in found["milliseconds"].items():
        for who, medians in threads.items():
            lines.append(f"{policy:<14}{who:<15}" + "".join(f"{value:>10.2f}" for value in medians.values()))
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="edgellm-verifier")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 32])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="openmp", help="of the result file")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(both(arguments)))
        return
    found: dict[str, Any] = {}
    for policy, extra in POLICIES.items():
        environment = {name: value for name, value in os.environ.items() if name not in WAITING} | extra
        command = [sys.executable, "-m", "bench.engine.openmp", "--here", *sys.argv[1:]]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        found[policy] = json.loads(done.stdout)
    figures = {"model": arguments.model, "milliseconds": found}
    print(table(figures), end="")
    print(f"written: {write(arguments.name, 'bench.engine.openmp', figures, 0)}")


if __name__ == "__main__":
    main()
