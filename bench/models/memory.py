"""Compare the estimate of a model's memory with what a process really takes, for every architecture.

    python -m bench.models.memory [--architectures NAME ...] [--context 4096] [--again] [--jobs 1]

Each architecture is a file with random weights in F16, as wide as a small real model (`bench/models/widened.py`), with
a vocabulary of 32,000 tokens. One more is in Q4_0, which llama.cpp packs anew, and has the 151,936 tokens of Qwen2.5. A
new process loads it, opens the context of a verifier with flash attention, and fills it: batches of 512 random tokens,
one of 32 rows that all give logits, and single tokens to the end. Linux only; 1.5 GB of disk.

Real memory is the kernel's count, from `/proc/self/smaps`. *mapped*: pages of the file that are in memory after the
context was filled; before, the process gave back all that loading had read, so that these are the pages that computing
uses. *packed*: weights that llama.cpp has copied into another order. All other columns are anonymous pages, by the step
in which they came: *loading* the model, *opening* the context, *computing*. llama.cpp writes zeros into caches as it
opens them, so all of their pages count. No checkpoints are saved to roll back to; the estimate counts them apart, and
`tests/engine/test_memory_fit.py` compares them with those that are kept.

The estimate is `engine.memory_fit.reckon`'s, by parts: *weights* to compare with mapped and packed, *caches* with
opening, *compute* and *other* (vocabulary, descriptions of graphs, converted rows, logits) with loading and computing.

Rows that are in the result already are kept; `--again` measures them again. Exit code 1 if an estimate is off by over
10 %, or a process crashed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import report
from bench.models.widened import widened, write_widened
from edgellm.engine import Context, ContextSpec, Model, ModelFile, native
from edgellm.engine.hardware import Hardware
from edgellm.engine.llama_api import LlamaBatch
from edgellm.engine.memory_fit import reckon
from testkit import ROOT
from testkit.gguf import random_model
from testkit.gguf.architectures import ARCHITECTURES

MODULE = "bench.models.memory"
PACKED = "qwen2, Q4_0"
NAMES = (*ARCHITECTURES, PACKED)
LOGITS_ROWS = 32
SINGLE_TOKENS = 8
MOST_OFF = 0.1
_MIB = 2**20
_PACKED_SIZE = re.compile(r"CPU_REPACK model buffer size = +([\d.]+) MiB")
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")
_DONT_NEED = 4  # MADV_DONTNEED


@dataclass(frozen=True, slots=True)
class Pages:
    """Bytes of this process in memory: of `anonymous` pages, and of pages that are `mapped` from a file, which lies at
    these addresses."""

    anonymous: int
    mapped: int
    places: tuple[tuple[int, int], ...]

    @classmethod
    def now(cls, file: Path) -> Pages:
        """Return what the kernel counts now."""
        anonymous = mapped = 0
        places, of_file = [], False
        with Path("/proc/self/smaps").open(encoding="utf-8") as lines:
            for line in lines:
                if found := _MAPPING.match(line):
                    of_file = found[3].strip() == str(file)
                    if of_file:
                        places.append((int(found[1], 16), int(found[2], 16)))
                elif line.startswith("Anonymous:"):
                    anonymous += 1024 * int(line.split()[1])
                elif of_file and line.startswith("Rss:"):
                    mapped += 1024 * int(line.split()[1])
        return cls(anonymous, mapped, tuple(places))

    def give_back(self) -> None:
        """Give the pages of the file back; those that are used are mapped again."""
        advise = ctypes.CDLL(None, use_errno=True).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for start, end in self.places:
            if advise(start, end - start, _DONT_NEED):
                raise OSError(ctypes.get_errno(), "madvise")


def make(name: str, path: Path, n_ctx: int) -> None:
    """Write the model of a row."""
    if name == PACKED:
        shape = replace(random_model.SHAPES["qwen2.5-0.5b"], n_layer=6, n_ctx=n_ctx)
        random_model.write(path, shape, "Q4_0")
    else:
        write_widened(name, path, widened(name, n_ctx))


def opened(model: Model, n_ctx: int) -> Context:
    """Return a verifier's context."""
    return Context(model, ContextSpec(n_ctx=n_ctx, threads=1, flash=True, rolls_back=True, speculates=True))


def fill(model: Model, context: Context) -> None:
    """Fill a context with random tokens, straight through llama.cpp, so that no checkpoints are saved."""
    rng = np.random.default_rng(0)
    batch = LlamaBatch(context.n_batch, context.n_ctx, planes=model.position_planes)
    at, rest = 0, LOGITS_ROWS + SINGLE_TOKENS
    while at < context.n_ctx:
        left = context.n_ctx - at
        rows = min(context.n_batch, left - rest) if left > rest else LOGITS_ROWS if left > SINGLE_TOKENS else 1
        ids = rng.integers(0, model.n_vocab, rows).astype(np.int32)
        batch.put(0, 0, at, ids, rows if left <= rest else 1, False)
        batch.tokens.n_tokens = rows
        if status := native.lib.llama_decode(context.native.owned.pointer, batch.tokens):
            raise SystemExit(f"llama.cpp cannot decode {rows} rows at {at} (status {status})")
        at += rows


def measured(path: Path, n_ctx: int) -> dict[str, Any]:
    """Return the row of a file, measured in this process, which must not have loaded any model before."""
    native.start()
    file = ModelFile.open(path)
    before = Pages.now(path)
    with native.log.listen() as lines:
        model = Model.load(file, probe=False, speculates=True)
        loaded = Pages.now(path)
        context = opened(model, n_ctx)
    ready = Pages.now(path)
    ready.give_back()
    fill(model, context)
    after = Pages.now(path)
    packed = int(_MIB * sum(float(found[1]) for line in lines if (found := _PACKED_SIZE.search(line))))
    context.close()
    model.close()
    use = reckon(file, Hardware(n_ctx=n_ctx), lambda model: [opened(model, n_ctx)])
    return {
        "estimate": {
            "weights": use.weights["CPU"], "caches": use.caches["CPU"], "compute": use.compute["CPU"],
            "other": use.overhead,
        },
        "real": {
            "mapped": after.mapped, "packed": packed, "loading": loaded.anonymous - before.anonymous - packed,
            "opening": ready.anonymous - loaded.anonymous, "computing": after.anonymous - ready.anonymous,
        },
        "checkpoints": use.checkpoints,
    }  # fmt: skip


def in_children(name: str, n_ctx: int) -> dict[str, Any]:
    """Return the row of an architecture: one process writes its file, and a new one measures."""
    kind = "dense" if name == PACKED else ARCHITECTURES[name].kind
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "EDGELLM_HOME": folder, "GGML_NO_BACKTRACE": "1"}
        path = Path(folder).resolve() / "model.gguf"
        for step in ("make", "measure"):
            words = [sys.executable, "-m", MODULE, "--step", step, str(path), "--architectures", name]
            words += ["--context", str(n_ctx)]
            done = subprocess.run(words, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                return {"kind": kind, "crash": f"exit code {done.returncode}: {lines[-1] if lines else ''}"}
    row: dict[str, Any] = {"kind": kind, **json.loads(done.stdout.splitlines()[-1])}
    return row


def ratio(row: Mapping[str, Any]) -> float:
    """Return the estimate as a share of the real memory."""
    estimate, real = (sum(row[what].values()) for what in ("estimate", "real"))
    return float(estimate / real)


def is_off(row: Mapping[str, Any]) -> bool:
    """Return whether an estimate is off by over a tenth, or there is none."""
    return "crash" in row or abs(ratio(row) - 1) > MOST_OFF


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each architecture, in MB."""
    estimated, real = ("weights", "caches", "compute", "other"), ("mapped", "packed", "loading", "opening", "computing")
    heads = ["estimate", *estimated, "real", *real, "ratio"]
    lines = [f"{'':<16}" + "".join(f"{head:>10}" for head in heads)]
    for name, row in found["rows"].items():
        if "crash" in row:
            lines.append(f"{name:<16}  crash: {row['crash']}")
            continue
        sizes = [sum(row["estimate"].values()), *(row["estimate"][part] for part in estimated)]
        sizes += [sum(row["real"].values()), *(row["real"][part] for part in real)]
        lines.append(f"{name:<16}" + "".join(f"{size / 1e6:>10.1f}" for size in sizes) + f"{ratio(row):>10.3f}")
    ratios = [ratio(row) for row in found["rows"].values() if "crash" not in row]
    right = len(found["rows"]) - sum(map(is_off, found["rows"].values()))
    lines += ["", f"{right} of {len(found['rows'])} estimates within a tenth; {min(ratios):.3f} to {max(ratios):.3f}."]
    return "\n".join(lines) + "\n"


def kept(name: str, n_ctx: int) -> dict[str, Any]:
    """Return the rows of an earlier run with contexts of this length."""
    try:
        found = report.read(MODULE, name)
    except FileNotFoundError:
        return {}
    return dict(found["rows"]) if found["context"] == n_ctx else {}


def _measure(names: Iterable[str], rows: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Measure rows, and write the result after each."""
    with ThreadPoolExecutor(arguments.jobs) as pool:
        begun = {pool.submit(in_children, name, arguments.context): name for name in names}
        for done in as_completed(begun):
            name = begun[done]
            rows[name] = done.result()
            sys.stdout.write(f"{name}: {rows[name].get('crash') or f'{ratio(rows[name]):.3f}'}\n")
            sys.stdout.flush()
            ordered = {one: rows[one] for one in NAMES if one in rows}
            report.write(arguments.name, MODULE, {"context": arguments.context, "rows": ordered}, 0)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", metavar="NAME", choices=NAMES, default=NAMES)
    parser.add_argument("--context", type=int, default=4_096, help="positions")
    parser.add_argument("--again", action="store_true", help="measure rows that are there again")
    parser.add_argument("--jobs", type=int, default=1, help="architectures at once")
    parser.add_argument("--name", default="memory", help="of the result file")
    parser.add_argument("--step", nargs=2, metavar=("STEP", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    if not Path("/proc/self/smaps").exists():
        parser.error("the memory of a process is read from /proc/self/smaps, which only Linux has")
    if arguments.step:
        step, path = arguments.step
        if step == "make":
            make(arguments.architectures[0], Path(path), arguments.context)
        else:
            sys.stdout.write(json.dumps(measured(Path(path), arguments.context)) + "\n")
        return
    rows = kept(arguments.name, arguments.context)
    _measure([name for name in arguments.architectures if arguments.again or name not in rows], rows, arguments)
    found = report.read(MODULE, arguments.name)
    sys.stdout.write(table(found))
    sys.exit(1 if any(map(is_off, found["rows"].values())) else 0)


if __name__ == "__main__":
    main()
