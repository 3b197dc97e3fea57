"""A process that runs a program on one file after another, so that a file that ends it is noticed and named."""

import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from testkit import ROOT


class Loader:
    """A process that loads model files one after another, and is replaced when it dies."""

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        """Start a Python `program`, which reads paths and prints a line about each: with a `!` first for harm."""
        self._start = partial(
            subprocess.Popen[str], [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        self._process = self._start()

    def load(self, path: Path) -> str:
        """Return the line about a file; it begins with `!`, too, if the process died."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        process.stdin.write(f"{path}\n")
        process.stdin.flush()
        if outcome := process.stdout.readline().strip():
            return outcome
        process.communicate()
        self._process = self._start()
        return f"!the process ended with {process.returncode}"

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
