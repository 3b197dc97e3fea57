"""From an empty home: keys pressed and seconds until the first words of the bundled pair, and of a pair of real models.

    python -m bench.cli.empty_home [--repeats 3] [--verifier qwen2.5:1.5b] [--draft qwen2.5:0.5b]

Each turn types what a newcomer would into a terminal of its own, with an empty home and an empty model cache:

- `edgellm chat` with a question about a file, which the bundled pair answers;
- `edgellm setup`, where the Return key answers every question, and a first question to the pair that it set up.

A hub on loopback serves the pair under the names and in the layout of the real repositories. The files have the shapes
and vocabulary sizes of the real models and random weights in Q4_0, so they are somewhat smaller than those of the
catalogue, and load and compute like them; their text is noise. `--verifier` is given to `setup` because only these
shapes are at hand. Seconds count from the start of the program. The download's are those of this machine's loopback
and disk: in a home they are the bytes over the line's speed.
"""

from __future__ import annotations

import argparse
import hashlib
import mmap
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from select import select
from statistics import median
from typing import Any

from bench.harness.report import write
from edgellm.storage import catalog
from testkit import ROOT
from testkit.gguf import random_model
from testkit.network.hub import Hub, running

MODULE = "bench.cli.empty_home"
NOTES = ROOT / "docs" / "notes.txt"
BUNDLED = ("edgellm", "chat", "--context", "notes.txt", "When is the film night?")
ASK = ("edgellm", "chat", "--max-tokens", "16", "Why is the sky blue?")
_QUESTION = re.compile(rb"\[[yYnN]/[yYnN]\]: ?$")
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_SECONDS = 540.0  # for one command
_STEP = 65_536


@dataclass(frozen=True, slots=True)
class Typed:
    """A command as it was typed: keys pressed, seconds to the first byte of its answer and to its end, the answer, and
    all that the terminal showed."""

    command: str
    keys: int
    first: float
    seconds: float
    answer: str
    shown: str


def typed(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Typed:
    """Type a command into a terminal, and Return whenever it asks something. Raise RuntimeError if it fails."""
    line = shlex.join(words)
    keys, began, first = len(line) + 1, time.monotonic(), 0.0
    terminal, side = pty.openpty()
    program = [sys.executable, "-m", *words]
    with subprocess.Popen(
        program, stdin=side, stderr=side, stdout=subprocess.PIPE, env=environment, cwd=folder, start_new_session=True
    ) as child:
        os.close(side)
        assert child.stdout is not None
        answers, answer, shown, asked = child.stdout.fileno(), bytearray(), bytearray(), bytearray()
        open_ones = {terminal, answers}
        while open_ones:
            if time.monotonic() - began > _SECONDS:
                child.kill()
                raise RuntimeError(f"{line} took more than {_SECONDS:.0f} s")
            ready = select(list(open_ones), [], [], 0.2)[0]
            for source in sorted(ready, key=lambda one: one == terminal):  # figures are printed behind the answer
                try:
                    data = os.read(source, _STEP)
                except OSError:  # the terminal's other side is closed
                    data = b""
                if not data:
                    open_ones.remove(source)
                    continue
                first = first or (time.monotonic() - began if source == answers else 0.0)
                shown += data
                (asked if source == terminal else answer).extend(data)
                if _QUESTION.search(asked):
                    asked.clear()
                    os.write(terminal, b"\n")
                    keys += 1
            if child.poll() is not None and terminal in open_ones and not select([terminal], [], [], 0.2)[0]:
                open_ones.discard(terminal)
    os.close(terminal)
    answered, text = (
        _CONTROL.sub("", data.decode("utf-8", "replace")).replace(str(folder), "~") for data in (answer, shown)
    )
    if child.returncode:
        raise RuntimeError(f"{line} ended with {child.returncode}:\n{text}")
    return Typed(line, keys, first, time.monotonic() - began, answered, text)


@contextmanager
def served(folder: Path, names: Sequence[str], shapes: Sequence[str]) -> Iterator[Hub]:
    """Serve files of these shapes as the models of these names in the catalogue."""
    hub = Hub()
    with ExitStack() as closing:
        for name, shape in zip(names, shapes, strict=True):
            model = catalog().models[name]
            stem = model.repo_id.partition("/")[2].removesuffix("-GGUF")
            file = f"{stem}-{model.quant}.gguf"
            if not (folder / file).exists():
                random_model.write(folder / file, random_model.SHAPES[shape], "Q4_0")
            opened = closing.enter_context((folder / file).open("rb"))
            data: Any = closing.enter_context(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            hub.digests[file] = hashlib.sha256(data).hexdigest()
            hub.repos[model.repo_id] = {"README.md": b"words", file: data, f"{stem}-Q8_0.gguf": b"not asked for"}
        with running(hub):
            yield hub


def turn(folder: Path, hub: Hub, verifier: str) -> dict[str, Typed]:
    """Type all commands in an empty home, and return them by what they are for."""
    with tempfile.TemporaryDirectory(dir=folder) as empty:
        home = Path(empty)
        (home / "notes.txt").write_bytes(NOTES.read_bytes())
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("EDGELLM_", "HF_"))},
            "HOME": str(home), "EDGELLM_HOME": str(home / "edgellm"), "HF_HOME": str(home / "hf"),
            "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "100",
            "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        return {
            "bundled pair: first reply": typed(BUNDLED, environment, home),
            "real pair: setup": typed(("edgellm", "setup", "--verifier", verifier), environment, home),
            "real pair: first reply": typed(ASK, environment, home),
        }


def table(found: dict[str, Any]) -> str:
    """Return a line for each step, then what the terminal showed in the last turn."""
    lines = [f"{'step':<28}{'keys':>6}{'first word s':>14}{'to the end s':>14}{'spread s':>16}"]
    for step, row in found["steps"].items():
        spread = f"{row['least']:.1f} to {row['most']:.1f}"
        lines.append(f"{step:<28}{row['keys']:>6}{row['first']:>14.1f}{row['seconds']:>14.1f}{spread:>16}")
    lines += [
        "",
        f"downloaded: {found['bytes'] / 1e6:,.0f} MB; median of {found['repeats']}; spread of the last column",
    ]
    for row in found["steps"].values():
        lines += ["", f"$ {row['command']}", *row["shown"].rstrip("\n").split("\n")]
    return "\n".join(lines) + "\n"


def measured(folder: Path, verifier: str, draft: str, shapes: Sequence[str], repeats: int) -> dict[str, Any]:
    """Return the medians of some turns, and the transcript of the last one."""
    with served(folder, (draft, verifier), shapes) as hub:
        turns = [turn(folder, hub, verifier) for _ in range(repeats)]
        size = hub.bytes_sent() // repeats
    steps = {
        step: {
            "command": last.command, "keys": last.keys, "first": median(one[step].first for one in turns),
            "seconds": median(one[step].seconds for one in turns), "least": min(one[step].seconds for one in turns),
            "most": max(one[step].seconds for one in turns), "answer": last.answer, "shown": last.shown,
        }
        for step, last in turns[-1].items()
    }  # fmt: skip
    return {
        "verifier": verifier,
        "draft": draft,
        "shapes": list(shapes),
        "repeats": repeats,
        "bytes": size,
        "steps": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--verifier", default="qwen2.5:1.5b", help="short name of the catalogue")
    parser.add_argument("--draft", default="qwen2.5:0.5b", help="the catalogue's draft model of that")
    parser.add_argument("--shapes", nargs=2, default=["qwen2.5-0.5b", "qwen2.5-1.5b"], help="of draft and verifier")
    parser.add_argument("--name", default="empty_home", help="of the result file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(Path(folder), arguments.verifier, arguments.draft, arguments.shapes, arguments.repeats)
    print(table(found), end="")
    print(f"written: {write(arguments.name, MODULE, found)}")


if __name__ == "__main__":
    main()
