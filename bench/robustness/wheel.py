"""Build the wheel, install it with its dependencies into an empty environment outside the checkout, and ask it.

    python -m bench.robustness.wheel [--name wheel]

pip's settings are the user's: its index, and the wheels that it has kept. Noted are the seconds of each step, the
wheel's size, and where llama-cpp-python came from: an index, pip's own wheels, or compiled here. Exit code 1 if a step
fails or the answer is wrong.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.report import write
from testkit import ROOT

NOTES, QUESTION, ANSWER = "- The drill is in the cellar.\n", "Where is the drill?", "The drill is in the cellar."


def timed(command: Sequence[object], cwd: Path) -> tuple[float, str]:
    """Run a command outside the checkout; return its seconds and all that it printed. Raise if it fails."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EDGELLM"))}
    began = time.perf_counter()
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env={**inherited, "EDGELLM_HOME": str(cwd / "home")}, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stdout}")
    return time.perf_counter() - began, done.stdout


def came_from(printed: str) -> str:
    """Return where pip got llama-cpp-python, by what it printed."""
    if "Building wheel for llama" in printed:
        return "compiled here"
    return "a wheel of an index" if "Downloading llama_cpp_python-" in printed else "a wheel that pip had kept"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="wheel", help="of the result file")
    name = parser.parse_args().name
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        pip = (sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check")
        seconds["build"], _ = timed([*pip, "wheel", "--no-deps", "-w", folder, ROOT], folder)
        (wheel,) = folder.glob("edgellm-*.whl")
        seconds["environment"], _ = timed([sys.executable, "-m", "venv", folder / "venv"], folder)
        programs = Path(sysconfig.get_path("scripts", "venv", {"base": str(folder / "venv")}))
        install = [programs / "python", "-m", "pip", "install", "-v", "--no-input", wheel]
        seconds["install"], printed = timed(install, folder)
        (folder / "notes.txt").write_text(NOTES, encoding="utf-8")
        words = ("chat", "--context", folder / "notes.txt", QUESTION)
        seconds["first reply"], answer = timed([programs / "edgellm", *words], folder)
        seconds["second reply"], _ = timed([programs / "edgellm", *words], folder)
        figures: dict[str, Any] = {
            "wheel": wheel.name,
            "megabytes": wheel.stat().st_size / 1e6,
            "llama_cpp_python": came_from(printed),
            "seconds": seconds,
            "right": answer.startswith(ANSWER),
        }
    write(name, "bench.robustness.wheel", figures)
    sys.stdout.write(table(figures))
    sys.exit(not figures["right"])


def table(figures: dict[str, Any]) -> str:
    """Return the seconds of each step, and a line about the wheel."""
    lines = [f"{step:12} {seconds:8.1f} s" for step, seconds in figures["seconds"].items()]
    lines.append(f"{figures['wheel']}, {figures['megabytes']:.1f} MB; llama-cpp-python: {figures['llama_cpp_python']};")
    lines[-1] += f" the answer is {'right' if figures['right'] else 'wrong'}"
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
