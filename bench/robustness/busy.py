"""Run a command beside busy processes, where code that assumes an idle machine fails.

    python -m bench.robustness.busy [--processes 4] [--times 1] -- COMMAND ...

The busy processes have the command's own priority and end with it. For each run: its exit code, its seconds, and how
late a thread of this process woke up from sleeping 10 ms. Exit code 1 if a run failed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

NAP = 0.01  # seconds
_SPIN = "while True: pass"


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run `processes` busy processes within the `with` block."""
    spinning = [subprocess.Popen([sys.executable, "-c", _SPIN]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in spinning:
            one.kill()
            one.wait()


class Lateness:
    """Measures by how many seconds a thread oversleeps, within the `with` block."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._nap, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_raised: object) -> None:
        self._over.set()
        self._thread.join()

    def _nap(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(NAP)
            self.late.append(time.monotonic() - began - NAP)

    def summary(self) -> str:
        """Return median and maximum in milliseconds, for people."""
        return f"{1e3 * statistics.median(self.late):.1f} ms late, {1e3 * max(self.late):.0f} ms at most"


def attempt(command: Sequence[str], processes: int) -> tuple[int, float, str]:
    """Run the command once beside `processes` busy ones. Return its exit code, its seconds, and the lateness."""
    with busy(processes), Lateness() as lateness:
        began = time.monotonic()
        code = subprocess.run(command, check=False).returncode
        took = time.monotonic() - began
    return code, took, lateness.summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    failed = 0
    for run in range(1, arguments.times + 1):
        code, took, late = attempt(arguments.command, arguments.processes)
        failed += code != 0
        load = os.getloadavg()[0]
        print(f"run {run}: exit code {code}, {took:.1f} s, load {load:.1f}, threads {late}", file=sys.stderr)
    print(f"{arguments.times} runs beside {arguments.processes} busy processes, {failed} failed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
