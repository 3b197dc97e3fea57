"""Python programs of tests, each in a process of its own."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_python(
    code: str, *args: object, without: Collection[str] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with the variables of this process but those in `without`, and with `variables`."""
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=120, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT), **variables}, check=False,
    )  # fmt: skip
