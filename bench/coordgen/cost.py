"""Measure the cost of retrieval: indexing, and calibration in the prefill (CoordGen, 4.3, 4.4).

The first line is a suffix automaton over TOKENS tokens of the little world: its seconds and its memory. The table
compares a prefill that keeps the likeliest next tokens of every position with a plain one, in turns, on the bundled
verifier (up to the context that it was trained for) and on a Qwen 3 of the 0.5B shape: its seconds, how much longer it
takes with calibration, and the memory that is kept. What drafting costs where no draft is right is in `never_slower`.
"""

from __future__ import annotations

import random
import tempfile
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from bench.coordgen.tasks import SEED, TASKS
from bench.harness.results import Figures
from bench.harness.statistics import alternate, spread
from edgellm.engine import ContextSpec, Model
from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.ngram.sources import ContextIndex as Seen
from edgellm.spec.ngram.sources import SuffixAutomaton
from edgellm.spec.protocols import GenerationState, VerdictTerms
from edgellm.spec.types import NO_IDS, Chunk, Ids
from edgellm.storage import resolve
from edgellm.verifier.in_process import LocalVerifier
from models.home.corpus import held_out
from testkit.gguf import random_model

_ONE = 100  # tokens that are added at a time, to measure the time of each


def world(model: Model, tokens: int) -> list[int]:
    """Return `tokens` tokens of the little world's prompts and answers."""
    ids: list[int] = []
    number = 0
    while len(ids) < tokens:
        for task in TASKS["home"].values():
            for case in held_out(task, 50, SEED + number):
                for turn in case.turns:
                    ids += model.tokenize(turn.text).tolist()
        number += 1
    return ids[:tokens]


def indexing(ids: list[int], repeats: int) -> dict[str, Any]:
    """Return seconds and bytes of an automaton over `ids`, and microseconds of a further token at its end."""
    seconds = []
    for _ in range(repeats):
        began = perf_counter()
        SuffixAutomaton().extend(ids)
        seconds.append(perf_counter() - began)
    tracemalloc.start()
    automaton = SuffixAutomaton()
    automaton.extend(ids)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    more = random.Random(SEED).sample(ids, _ONE)
    began = perf_counter()
    automaton.extend(more)
    token = (perf_counter() - began) / _ONE
    return {
        "tokens": len(ids), "seconds": spread(seconds), "megabytes": memory / 1e6, "states": len(automaton.length),
        "microseconds_a_token": 1e6 * token,
    }  # fmt: skip


def calibration(model: Model, length: int, repeats: int, threads: int | None) -> dict[str, Any]:
    """Return seconds of a prefill of `length` tokens, plain and calibrating, and the memory that calibration keeps."""
    rng = random.Random(SEED)
    prompt: Ids = np.array([rng.randrange(300, model.n_vocab - 300) for _ in range(length)], dtype=np.int32)
    kept = Calibration(Seen())
    kept.begin(prompt.tolist())
    verifier = LocalVerifier(model, ContextSpec(n_ctx=length + 8, threads=threads))
    verifier.give(context := verifier.take())

    def prefill(calibrating: bool) -> float:
        context.clear()
        session = verifier.open(GenerationState(terms=VerdictTerms(expect=kept.expect if calibrating else None)))
        began = perf_counter()
        session.submit(prompt, Chunk(NO_IDS)).result()
        taken = perf_counter() - began
        session.close()
        return taken

    tracemalloc.start()
    prefill(True)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    plain, calibrated = alternate(repeats, partial(prefill, False), partial(prefill, True))
    verifier.close()
    ratios = [two / one for one, two in zip(plain, calibrated, strict=True)]
    return {
        "tokens": length, "prefill_seconds": spread(plain), "overhead": median(ratios) - 1.0, "ratios": spread(ratios),
        "megabytes": memory / 1e6,
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Return a line on indexing, and a Markdown table with a row for each prefill."""
    row = found["indexing"]
    index = (
        f"{row['tokens']:,} tokens are indexed in {row['seconds']['median']:.2f} s and {row['megabytes']:.0f} MB;"
        f" a token more takes {row['microseconds_a_token']:.1f} µs."
    )
    lines = [index, ""]
    lines += ["| prefill | tokens | seconds | calibration takes | and keeps |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {row['tokens']} | {row['prefill_seconds']['median']:.2f} | {row['overhead']:+.1%} |"
        f" {row['megabytes']:.1f} MB |"
        for name, rows in found["calibration"].items()
        for row in rows
    ]
    return "\n".join(lines)


def measure(
    tokens: int = 100_000, context: Sequence[int] = (512, 1024, 4096), repeats: int = 5, threads: int | None = None
) -> Figures:
    """Return the costs of indexing and of calibration."""
    found: Figures = {"calibration": {}}
    with tempfile.TemporaryDirectory() as folder, Model.load(resolve("edgellm-verifier")) as bundled:
        found["indexing"] = indexing(world(bundled, tokens), repeats)
        path = Path(folder) / "half.gguf"
        # llama.cpp hands out the layer that calibration reads for Qwen 3, not for Qwen 2; the arithmetic is the same
        shape = replace(random_model.SHAPES["qwen2.5-0.5b"], arch="qwen3", bias=False)
        random_model.write(path, shape, "Q4_0")
        with Model.load(path) as half:
            for name, model, count in (("bundled verifier", bundled, repeats), ("0.5B shape of Qwen 3", half, 2)):
                lengths = [length for length in context if length + 8 <= model.n_ctx_train]
                found["calibration"][name] = [calibration(model, length, count, threads) for length in lengths]
    return found
