"""Give a million bad inputs to every decoder of foreign data: does one of them do harm?

    python -m bench.robustness.fuzz [TARGET ...] [--inputs 1000000] [--headers 10000] [--seed 0]

Good messages, names, lists and GGUF headers are changed at random, bytes and fields alike, and given to the code that
reads them, after a saved corpus of inputs that once did harm (`corpus.json`). An input must be taken or refused with an
error of edgellm's; anything else, also a warning, is strange, and kept. Headers that pass are loaded by llama.cpp in a
process of its own. The largest headers and messages are read in a process each, which may use at most LIMIT more memory
than without them. Exit code 1 if an input is strange.

Columns, for each decoder: inputs, and how many were taken, refused and strange; the longest time for one, and the most
memory beyond the allowance for its length.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.harness.report import write
from bench.robustness.fuzz import files, mesh_messages, messages, own_files
from bench.robustness.fuzz.target import MEMORY, PER_BYTE, Outcome, Target, fire
from edgellm.rpc.channel import MAX_MESSAGE
from testkit import ROOT
from testkit.hostile.inputs import HEADERS, header

LIMIT = 256 * 2**20  # bytes that the largest header, or message, may take
_SHOWN = 12  # error messages shown for each decoder
_CHILD = [sys.executable, "-m", "bench.robustness.fuzz.large_input"]


def targets(folder: Path, stack: ExitStack) -> list[Target]:
    """Return all decoders of small inputs."""
    own = stack.enter_context(own_files.targets(folder / "home"))
    link = stack.enter_context(messages.targets(folder / "link"))
    return [*link, *mesh_messages.targets(), *files.targets(folder), *own]


def alone(kind: str, name: str) -> dict[str, Any]:
    """Read one large input in a process of its own; return seconds, bytes and the error, or the exit code."""
    done = subprocess.run([*_CHILD, kind, name], capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        return {
            "name": name,
            "error": f"ended with {done.returncode}: {done.stderr[-300:]}",
            "bytes": 0,
            "seconds": 0.0,
        }
    found: dict[str, Any] = {"name": name, **json.loads(done.stdout)}
    return found


def large() -> Iterator[tuple[str, dict[str, Any]]]:
    """Read headers and messages as large as they may be, and return a row for each."""
    for name in HEADERS:
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(header(name))
            file.flush()
            yield "header", {**alone("header", file.name), "name": name}
    for name in ("session", "verdict", "vocabulary", "pairing"):
        for shape in ("zeros", "numbers", "empty"):
            yield "message", alone("message", f"{name} {shape}")


def _row(name: str, done: Outcome) -> dict[str, Any]:
    classes: Counter[str] = Counter()
    for text, count in done.refused.items():
        classes[text.split(":")[0]] += count
    found = {**asdict(done), "refused": dict(done.refused.most_common(_SHOWN)), "classes": dict(classes)}
    return {"name": name, "refused_in_all": sum(done.refused.values()), **found}


def table(found: dict[str, Any]) -> str:
    """Return a line for each decoder, and the errors that refused input."""
    return f"{_decoders(found)}\nrefused with:\n{_errors(found)}"


def _decoders(found: dict[str, Any]) -> str:
    """Return a line for each decoder."""
    lines = [
        f"{'read by':<16}{'inputs':>10}{'taken':>9}{'refused':>9}{'strange':>9}{'longest ms':>12}{'memory KiB':>12}"
    ]
    for row in found["targets"]:
        memory = f"{row['most_memory'] / 1024:.0f}" if row["most_memory"] else "-"
        lines.append(
            f"{row['name']:<16}{row['inputs']:>10,}{row['taken']:>9,}{row['refused_in_all']:>9,}{len(row['strange']):>9}"
            f"{row['longest'] * 1e3:>12.1f}{memory:>12}"
        )
    total = sum(row["inputs"] for row in found["targets"])
    lines.append(f"{total:,} inputs, {sum(len(row['strange']) for row in found['targets'])} of them strange")
    kinds = {"header": "headers of the largest size", "message": f"messages of {MAX_MESSAGE >> 20} MiB"}
    for kind, what in kinds.items():
        rows = [row for row in found["large"] if row["kind"] == kind]
        most, longest = max(row["bytes"] for row in rows), max(row["seconds"] for row in rows)
        lines.append(
            f"{len(rows)} {what}: {sum(not row['sound'] for row in rows)} did harm; {most / 2**20:.0f} MiB at most, of"
            f" {LIMIT >> 20} allowed, and {longest:.1f} s"
        )
    return "\n".join(lines) + "\n"


def _errors(found: dict[str, Any]) -> str:
    """Return the errors of all decoders by class, with their counts."""
    counts: Counter[str] = Counter()
    for row in found["targets"]:
        counts.update(row["classes"])
    return "\n".join(f"{count:>10,}  {name}" for name, count in counts.most_common()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="names of decoders; all by default")
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of all decoders together")
    parser.add_argument("--headers", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="fuzz", help="of the result file")
    arguments = parser.parse_args()
    rows, most = [], []
    folder = Path(tempfile.mkdtemp(prefix="edgellm-fuzz-"))
    with ExitStack() as stack:
        chosen = [one for one in targets(folder, stack) if not arguments.targets or one.name in arguments.targets]
        for target in chosen:
            rows.append(_row(target.name, fire(target, target.share * arguments.inputs // 1_000_000, arguments.seed)))
            print(f"{target.name}: {rows[-1]['inputs']:,} inputs, {len(rows[-1]['strange'])} strange", flush=True)
    if not arguments.targets or "headers" in arguments.targets:
        rows.append(_row("GGUF headers", files.headers(arguments.headers, arguments.seed, folder)))
        print(f"headers: {len(rows[-1]['strange'])} strange", flush=True)
    if not arguments.targets or "large" in arguments.targets:
        most = [{"kind": kind, **row, "sound": not row["error"].startswith("ended")} for kind, row in large()]
        for row in most:
            print(f"{row['kind']} {row['name']}: {row['bytes'] >> 20} MiB, {row['seconds']:.2f} s, {row['error'][:90]}")
    strange = [one for row in rows for one in row["strange"]]
    bad = [row for row in most if not row["sound"] or row["bytes"] > LIMIT]
    print(*(one["error"] for one in strange), *bad, sep="\n")
    if not arguments.targets:
        figures = {
            "targets": rows, "large": most, "limits": {"large": LIMIT, "small": MEMORY, "per_byte": PER_BYTE},
            "load_average": os.getloadavg()[0],
        }  # fmt: skip
        print(f"{table(figures)}written: {write(arguments.name, 'bench.robustness.fuzz', figures, arguments.seed)}")
    sys.exit(1 if strange or bad else 0)


if __name__ == "__main__":
    main()
