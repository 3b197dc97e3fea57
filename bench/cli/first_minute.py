"""From a fresh clone to the first word: wall and processor seconds of each step, in an empty home with an empty cache.

Each run clones what is committed here and sets it up from nothing in the ways that a newcomer has: `./start chat` at
once; the same in another clone, with the cache that pip kept; `pipx install .`, then `edgellm chat`. Git, Python and
pipx are there. *first word* counts from the start of the line to the first byte of the answer, so it is the sum that a
newcomer waits for; the steps of `./start` are those of its `setup.log`. The packages come from pip's configured index,
and so does the default pair's model, which `./start` has fetched meanwhile, and the first `edgellm chat` fetches.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from bench.harness.progress import track
from bench.harness.results import Figures
from testkit import ROOT

ASK = ("chat", "What is photosynthesis?")
"""The first line of the README."""
STEPS = ("environment", "pip and build tools", "packages, and the model's", "model")
"""What `setup.log` has the seconds of, in this order."""
_LOGGED = re.compile(r"^# ([\d.]+) s, ([\d.]+) s of processor time$", re.MULTILINE)
_DROPPED = ("EDGELLM_", "HF_", "PYTHON", "XDG_", "PIPX_", "UV_CACHE", "PIP_CACHE", "VIRTUAL_ENV", "SKBUILD", "CMAKE")


class Taken(NamedTuple):
    """Seconds of a step, and of the processor."""

    wall: float
    processor: float


def timed(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[Taken, float, str]:
    """Run a command; return what it took, the seconds to the first byte on standard output, and that output. Raise
    RuntimeError if it fails."""
    with tempfile.TemporaryFile() as told:
        began = time.monotonic()
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=told
        )
        assert child.stdout is not None
        answer = child.stdout.read(1)
        first = time.monotonic() - began
        answer += child.stdout.read()
        child.stdout.close()
        _, status, used = os.wait4(child.pid, 0)  # with the processes that it waited for
        child.returncode = os.waitstatus_to_exitcode(status)
        wall = time.monotonic() - began
        if child.returncode:
            told.seek(0)
            raise RuntimeError(f"{command} ended with {child.returncode}:\n{told.read().decode(errors='replace')}")
    return Taken(wall, used.ru_utime + used.ru_stime), first, answer.decode()


def environment_of(home: Path, pipx: Path) -> dict[str, str]:
    """Return an environment in which nothing was ever set up."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_DROPPED)}
    python = str(Path(getattr(sys, "_base_executable", sys.executable)))
    path = os.pathsep.join((str(pipx.parent), os.environ["PATH"]))
    return {**kept, "HOME": str(home), "PATH": path, "PYTHON": python, "PIPX_DEFAULT_PYTHON": python}


def check(answer: str, environment: Mapping[str, str]) -> None:
    """Raise RuntimeError unless there is an answer, and the default pair's model."""
    if not answer.strip() or not any(Path(environment["HOME"]).rglob("SmolLM2*.gguf")):
        raise RuntimeError(f"the default pair did not answer, but {answer!r} came")


def started(clone: Path, environment: Mapping[str, str]) -> Iterator[tuple[str, Taken]]:
    """Yield the steps of `./start chat` in a fresh clone."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    whole, first, answer = timed(["./start", *ASK], clone, environment)
    logged = [Taken(float(wall), float(cpu)) for wall, cpu in _LOGGED.findall((clone / ".venv/setup.log").read_text())]
    yield from zip(STEPS, logged, strict=True)
    yield (
        "the rest, to the first word",
        Taken(first - sum(one.wall for one in logged), whole.processor - sum(one.processor for one in logged)),
    )
    yield "first word", Taken(first, whole.processor)
    check(answer, environment)


def by_pipx(clone: Path, environment: Mapping[str, str], pipx: Path) -> Iterator[tuple[str, Taken]]:
    """Yield the steps of `pipx install .` in a fresh clone, and of a first question."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    install, _, _ = timed([str(pipx), "install", "."], clone, {**environment, "SKBUILD_WHEEL_CMAKE": "false"})
    yield "pipx install .", install
    asked, first, answer = timed([f"{environment['HOME']}/.local/bin/edgellm", *ASK], clone, environment)
    check(answer, environment)
    yield "edgellm chat, to the first word", Taken(first, asked.processor)
    yield "first word", Taken(install.wall + first, install.processor + asked.processor)


def run(pipx: Path) -> Iterator[tuple[str, str, Taken]]:
    """Yield each step of each way, once."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for home in ("start", "pipx"):
            (folder / home).mkdir()
        empty, other = (environment_of(folder / home, pipx) for home in ("start", "pipx"))
        for way, steps in (
            ("./start", started(folder / "first", empty)),
            ("./start, cache kept", started(folder / "second", empty)),
            ("pipx", by_pipx(folder / "third", other, pipx)),
        ):
            for step, taken in steps:
                yield way, step, taken


def table(found: dict[str, Any]) -> str:
    """Return a line for each step of each way."""
    lines = [f"{'':<36}{'wall s':>8}{'spread s':>16}{'processor s':>13}"]
    for way, steps in found["ways"].items():
        lines.append(way)
        for step, all_taken in steps.items():
            walls, processor = zip(*all_taken, strict=True)
            spread = f"{min(walls):.1f} to {max(walls):.1f}"
            lines.append(f"  {step:<34}{median(walls):>8.1f}{spread:>16}{median(processor):>13.1f}")
    return "\n".join([*lines, "", f"median of {found['runs']}; spread of the wall seconds"]) + "\n"


def measure(runs: int = 3) -> Figures:
    """Return the seconds of each step in each way, run by run."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "bin", "python")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", "pipx"], check=True)
        ways: dict[str, dict[str, list[Taken]]] = {}
        for _ in track(range(runs), "runs"):
            for way, step, taken in run(python.with_name("pipx")):
                ways.setdefault(way, {}).setdefault(step, []).append(taken)
    return {"runs": runs, "ways": ways}
