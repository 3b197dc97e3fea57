"""Measure the cost of retrieval: indexing, drafting in vain, and calibration in the prefill (CoordGen, 4.3, 4.4).

    python -m bench.coordgen.cost [--tokens 100000] [--context 512 1024 4096] [--repeats 5] [--threads N] [--name ...]

The first line is a suffix automaton over `--tokens` tokens of the little world: its seconds and its memory. The first
table is what drafting costs where nothing that is copied is ever right: the CPU time of this thread for a token, in
replies of tokens of the little world in any order, and that as a share of a decode. No model computes, so that it holds
beside other work; wrong drafts cost more than that, which `bench.cli.never_slower` shows. The second table compares a
prefill that keeps the likeliest next tokens of every position with a plain one, in turns, on the bundled verifier (up
to the context that it was trained for) and on a Qwen 3 of the 0.5B shape: its seconds, how much longer it takes with
calibration, and the memory that is kept.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from bench.coordgen.tasks import SEED, TASKS
from bench.harness.report import write
from bench.harness.statistics import alternate, spread
from edgellm.engine import Context, ContextSpec, Model
from edgellm.llm.ngram_runtime import continues_word
from edgellm.spec.draft_length import MAX_DRAFT, CostCurve
from edgellm.spec.drafters.hybrid import HybridDrafter
from edgellm.spec.loop import NoDrafter
from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.ngram.draft_index import DraftIndex, PastConversation
from edgellm.spec.ngram.sources import ContextIndex as Seen
from edgellm.spec.ngram.suffix_automaton import SuffixAutomaton
from edgellm.spec.params import DEFAULT_SOURCES
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationLimits, GenerationState, Suggestions
from edgellm.spec.types import NO_IDS, Chunk, Decision, Expected, Ids, Round, Verdict
from edgellm.storage import resolve
from edgellm.verifier.in_process import ContextPool, LocalVerifier
from models.home.corpus import held_out
from testkit.gguf import random_model

DECODES = {"tiny": 0.9e-3, "0.5B": 14e-3}
"""Seconds of a decode of models of two sizes on a processor."""
_GROWTH = {1: 1.0, 2: 1.2, 4: 1.5, 8: 2.0, 16: 3.0, 64: 8.0}  # of a decode with its rows
_REPLY, _PROMPT = 128, 100  # tokens
_ALL = Decision(True, "everything is verified")
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
        "tokens": len(ids),
        "seconds": spread(seconds),
        "megabytes": memory / 1e6,
        "states": automaton.states,
        "microseconds_a_token": 1e6 * token,
    }


class Useless(Drafter):
    """Drafts a token that is never right."""

    @property
    def needs_verdict(self) -> bool:
        return True

    def propose(self, state: GenerationState, gamma: int) -> Chunk:  # noqa: ARG002
        return Chunk(np.array([-1], dtype=np.int32), np.ones(1, dtype=np.float32), np.ones(1, dtype=np.float32))


def drafting(model: Model, ids: list[int], decode: float, replies: int, *, pair: bool) -> dict[str, Any]:
    """Return the microseconds that drafting takes for a token where nothing is right and a decode takes `decode`
    seconds: retrieval, with `pair` beside a useless model."""
    rng, curve = random.Random(SEED), CostCurve(tuple(_GROWTH), tuple(decode * growth for growth in _GROWTH.values()))
    index = DraftIndex(DEFAULT_SOURCES, curve, continues_word(model), cache(model.is_eog))
    taken, drafted = [], 0
    for _ in range(replies):
        text = rng.sample(ids, _PROMPT + _REPLY)
        copies = index.take()
        assert copies is not None
        drafter = HybridDrafter(copies, Useless(), 16, index.rounds) if pair else copies
        drafts = written(drafter, text, curve)
        took, plain = drafts[0], written(NoDrafter(), text, curve)[0]
        index.give()
        index.add(PastConversation(text[:_PROMPT], text[_PROMPT:]))
        taken.append(1e6 * (took - plain) / _REPLY)
        drafted += drafts[1]
    return {
        "decode_ms": 1e3 * decode, "microseconds": spread(taken), "drafted": drafted / (replies * _REPLY),
        "share": 1e-6 * median(taken) / decode,
    }  # fmt: skip


def written(drafter: Drafter, text: list[int], curve: CostCurve) -> tuple[float, int]:
    """Return the CPU seconds of a reply's rounds without its decodes, and the drafted tokens, all of them wrong."""
    seconds, drafted = curve.table(), 0
    state = GenerationState(np.array(text[:_PROMPT], dtype=np.int32), limits=GenerationLimits(_REPLY, 4096))
    began = thread_time()
    drafter.begin(state)
    for token in text[_PROMPT:]:
        chunk = drafter.propose(state, MAX_DRAFT)
        drafted += len(chunk)
        wrong = token if token not in chunk.ids[:1] else token + 1
        verdict = Verdict(0, np.array([wrong], dtype=np.int32))
        drafter.observe(state, Round(0, chunk, _ALL, verdict, 0.0, 0.0, seconds[1 + len(chunk)]))
        state.append(wrong)
    drafter.end()
    return thread_time() - began, drafted


class Kept(Suggestions):
    """Keeps the tokens that the verifier expects."""

    @property
    def wants_expected(self) -> bool:
        return True

    def __init__(self, kept: Calibration) -> None:
        self._kept = kept

    def expect(self, expected: Expected) -> None:
        self._kept.expect(expected)


def calibration(model: Model, length: int, repeats: int, threads: int | None) -> dict[str, Any]:
    """Return seconds of a prefill of `length` tokens, plain and calibrating, and the memory that calibration keeps."""
    rng = random.Random(SEED)
    prompt: Ids = np.array([rng.randrange(300, model.n_vocab - 300) for _ in range(length)], dtype=np.int32)
    kept = Calibration(Seen())
    kept.begin(prompt.tolist())
    context = Context(model, ContextSpec(n_ctx=length + 8, threads=threads))
    verifier = LocalVerifier(model, ContextPool(lambda: context), length + 8)

    def prefill(calibrating: bool) -> float:
        context.clear()
        session = verifier.open(GenerationState(suggestions=Kept(kept) if calibrating else None))
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
        "tokens": length,
        "prefill_seconds": spread(plain),
        "overhead": median(ratios) - 1.0,
        "ratios": spread(ratios),
        "megabytes": memory / 1e6,
    }


def table(found: dict[str, Any]) -> str:
    """Return a line on indexing, and a Markdown table with a row for each prefill."""
    row = found["indexing"]
    index = (
        f"{row['tokens']:,} tokens are indexed in {row['seconds']['median']:.2f} s and {row['megabytes']:.0f} MB;"
        f" a token more takes {row['microseconds_a_token']:.1f} µs."
    )
    lines = [index, ""]
    if drafting_rows := found.get("drafting"):
        lines += [
            "| a decode | drafts of | CPU µs a token | of a decode | drafted for a token |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {row['decode_ms']:.1f} ms ({name}) | {kind} | {row['microseconds']['median']:.1f} |"
            f" {row['share']:.2%} | {row['drafted']:.3f} |"
            for name, kinds in drafting_rows.items()
            for kind, row in kinds.items()
        ]
        lines.append("")
    lines += ["| prefill | tokens | seconds | calibration takes | and keeps |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {row['tokens']} | {row['prefill_seconds']['median']:.2f} | {row['overhead']:+.1%} |"
        f" {row['megabytes']:.1f} MB |"
        for name, rows in found["calibration"].items()
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--context", type=int, nargs="+", default=[512, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="cost", help="of the result file")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"calibration": {}}
    with tempfile.TemporaryDirectory() as folder, Model.load(resolve("edgellm-verifier")) as bundled:
        found["indexing"] = indexing(world(bundled, arguments.tokens), arguments.repeats)
        text = world(bundled, 20_000)
        found["drafting"] = {
            name: {
                kind: drafting(bundled, text, decode, 4 * arguments.repeats, pair=kind != "copies")
                for kind in ("copies", "copies and a useless model")
            }
            for name, decode in DECODES.items()
        }
        path = Path(folder) / "half.gguf"
        # llama.cpp hands out the layer that calibration reads for Qwen 3, not for Qwen 2; the arithmetic is the same
        shape = replace(random_model.SHAPES["qwen2.5-0.5b"], arch="qwen3", bias=False)
        random_model.write(path, shape, "Q4_0")
        with Model.load(path) as half:
            for name, model, repeats in (
                ("bundled verifier", bundled, arguments.repeats),
                ("0.5B shape of Qwen 3", half, 2),
            ):
                lengths = [length for length in arguments.context if length + 8 <= model.n_ctx_train]
                found["calibration"][name] = [
                    calibration(model, length, repeats, arguments.threads) for length in lengths
                ]
    sys.stdout.write(table(found) + "\n")
    sys.stdout.write(f"written: {write(arguments.name, 'bench.coordgen.cost', found, SEED)}\n")


if __name__ == "__main__":
    main()
