"""A function of a benchmark in a process of its own, which may crash."""

import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from typing import Any

from testkit import ROOT


class Crashed(Exception):
    """The process ended before its function returned."""


def in_child(module: str, function: str, *arguments: Any) -> Any:
    """Return what a module's function returns of these arguments, all of which JSON can hold, in an empty home. Raise
    Crashed with the last line on standard error."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "EDGELLM_HOME": home, "GGML_NO_BACKTRACE": "1"}
        command = [sys.executable, "-m", "bench.harness.children", module, function, json.dumps(arguments)]
        done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Crashed(f"exit code {done.returncode}: {lines[-1] if lines else ''}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    name, called, given = sys.argv[1:]
    print(json.dumps(getattr(import_module(name), called)(*json.loads(given))))
