"""Perplexity, size and speed of a model in its own types of weights, and in types that llama.cpp computes faster.

    python -m bench.models.requantised MODEL.gguf --questions spec_bench_dev.jsonl [--cases 60] [--tokens 64]

The questions are the first turns of a file of JSON lines with `turns`, such as Spec-Bench's, evenly chosen of those
that have at most `--prompt` tokens in the model's chat template; the model as it is writes a greedy reply to each.
Perplexity is taken over the tokens of the prompts, and over those of the replies; `lost` is how much more it is than
that of the file as it is. A pass over 1, 2, 4 or 8 rows is the fastest of `--repeats` turns, in which the files
alternate.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.report import write
from bench.harness.spec_bench import greedy_reply, questions
from edgellm.engine import Context, ContextSpec, Floats, Ids, Message, Model
from edgellm.engine.gguf.requantise import requantise
from edgellm.llm.messages import chat_ids
from edgellm.storage import resolve

ROWS = (1, 2, 4, 8)
CONTEXT = 1024  # tokens of a prompt and its reply
OWN = "as it is"
MIXES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "Q4_0": ("Q4_0", {}),
    "IQ4_NL": ("IQ4_NL", {}),
    "Q8_0": ("Q8_0", {}),
    "Q4_0, ffn_down Q8_0": ("Q4_0", {"ffn_down": "Q8_0"}),
    "Q4_0, ffn_down and attention Q8_0": ("Q4_0", {"ffn_down|attn_": "Q8_0"}),
    "Q4_0, attention Q8_0": ("Q4_0", {"attn_": "Q8_0"}),
    "Q5_0": ("Q5_0", {}),
    "Q8_0, ffn_down Q4_K": ("Q8_0", {"ffn_down": "Q4_K"}),
    "Q8_0, ffn_up and ffn_gate Q4_0": ("Q8_0", {"ffn_up|ffn_gate": "Q4_0"}),
}
"""The type of the matrices, and the types of those whose names differ."""


def prompts_of(path: Path, model: Model, cases: int, most: int) -> list[Ids]:
    """Return the prompts of `cases` first turns, evenly chosen of those in a file with at most so many tokens."""
    prompts = [chat_ids(model, [Message("user", question.text)], 8 * CONTEXT) for question in questions(path)]
    prompts = [prompt for prompt in prompts if len(prompt) <= most]
    return [prompts[at * len(prompts) // cases] for at in range(min(cases, len(prompts)))]


def surprise(context: Context, prompt: Ids, written: Ids) -> tuple[float, float]:
    """Return the sums of the negative log probabilities of a prompt's tokens but the first, and of a reply's."""
    context.clear()
    ids = np.concatenate((prompt, written))
    logits: Floats = context.decode(ids, outputs=len(ids))[:-1]
    most = logits.max(axis=1)
    whole = most + np.log(np.exp(logits - most[:, None]).sum(axis=1))
    each = whole - logits[np.arange(len(ids) - 1), ids[1:]]
    return float(each[: len(prompt) - 1].sum()), float(each[len(prompt) - 1 :].sum())


def passes(contexts: Sequence[Context], repeats: int) -> list[dict[str, float]]:
    """Return the milliseconds of a pass over each number of rows, of each file."""
    best = [dict.fromkeys(ROWS, float("inf")) for _ in contexts]
    for _ in range(repeats):
        for context, found in zip(contexts, best, strict=True):
            context.clear()
            context.decode(np.arange(100, 132, dtype=np.int32))
            for rows in ROWS:
                began = time.perf_counter()
                context.decode(np.arange(100, 100 + rows, dtype=np.int32), outputs=rows)
                found[rows] = min(found[rows], 1e3 * (time.perf_counter() - began))
    return [{str(rows): ms for rows, ms in found.items()} for found in best]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each mix, and how many tokens they are taken over."""
    source = resolve(arguments.model)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        paths = {OWN: source}
        seconds = {OWN: 0.0}
        for number, name in enumerate(arguments.mixes):
            paths[name] = Path(folder, f"{number}.gguf")
            began = time.perf_counter()
            requantise(source, paths[name], *MIXES[name])
            seconds[name] = time.perf_counter() - began
        contexts = {}
        for name, path in paths.items():
            model = stack.enter_context(Model.load(path, probe=False))
            contexts[name] = stack.enter_context(Context(model, ContextSpec(n_ctx=CONTEXT, threads=arguments.threads)))
        own = contexts[OWN]
        prompts = prompts_of(arguments.questions, own.model, arguments.cases, arguments.prompt)
        texts = [(prompt, greedy_reply(own, prompt, arguments.tokens)) for prompt in prompts]
        counts = [sum(len(prompt) - 1 for prompt, _ in texts), sum(len(written) for _, written in texts)]
        rows = []
        for name, context in contexts.items():
            sums = np.sum([surprise(context, prompt, written) for prompt, written in texts], axis=0)
            of_prompts, of_replies = np.exp(sums / counts).tolist()
            rows.append({"mix": name, "bytes": paths[name].stat().st_size, "seconds": seconds[name],
                         "prompts": of_prompts, "replies": of_replies})  # fmt: skip
        for row, found in zip(rows, passes(list(contexts.values()), arguments.repeats), strict=True):
            row["ms"] = found
        return {"model": source.name, "prompt_tokens": counts[0], "reply_tokens": counts[1], "mixes": rows}


def table(figures: Mapping[str, Any]) -> str:
    """Return a row for each mix."""
    first = figures["mixes"][0]
    lines = [f"{'weights':36}{'MB':>6}{'prompts':>9}{'lost':>8}{'replies':>9}{'lost':>8}   ms of 1, 2, 4, 8 rows"]
    for row in figures["mixes"]:
        lost = [f"{row[kind] / first[kind] - 1:+.1%}" for kind in ("prompts", "replies")]
        ms = "  ".join(f"{row['ms'][str(rows)]:5.1f}" for rows in ROWS)
        lines.append(
            f"{row['mix']:36}{row['bytes'] / 1e6:6.0f}{row['prompts']:9.3f}{lost[0]:>8}{row['replies']:9.3f}"
            f"{lost[1]:>8}   {ms}"
        )
    counted = f"{figures['prompt_tokens']:,} tokens of prompts, {figures['reply_tokens']:,} of replies"
    return "\n".join([*lines, counted]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a name, or the path of a GGUF")
    parser.add_argument("--questions", type=Path, required=True, metavar="FILE", help="JSON lines with `turns`")
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt at most")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a reply at most")
    parser.add_argument("--mixes", nargs="+", choices=list(MIXES), default=list(MIXES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--name", default="requantised", help="of the result file")
    arguments = parser.parse_args()
    figures = measure(arguments)
    path = write(arguments.name, "bench.models.requantised", figures)
    sys.stdout.write(f"{table(figures)}written: {path}\n")


if __name__ == "__main__":
    main()
