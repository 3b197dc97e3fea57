"""Compare whole replies with those of llama-cpp-python's `Llama`, with and without its prompt lookup.

    python -m bench.coordgen.llama [--cases 40] [--repeats 3] [--threads 2]

The bundled verifier answers the questions of four tasks greedily: by edgellm without and with retrieved drafts, by
`Llama`, and by `Llama` with `LlamaPromptLookupDecoding` (its default, ten tokens). All take turns in one process, keep
their cache of a prompt's beginning, and see the same questions in the same order. `Llama` fails where a text outgrows
its batch and a draft model is set, so its batch is as long as its context here.

Rows: tokens each second of whole replies, from the request to the last token, and of decoding, which leaves out the
time to the first token; the ratio of ours to theirs; and the share of replies with the same text.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench.coordgen.tasks import SEED, TASKS
from bench.harness.report import write
from edgellm.engine import Message, Model
from edgellm.llm import LLM
from edgellm.storage import resolve
from models.home.corpus import held_out

MOST = 120
POSITIONS = 1024
OURS = "edgellm, drafts retrieved"
THEIRS = "Llama with prompt lookup"


@dataclass
class Method:
    """A method of answering, with the seconds and the text of every reply."""

    begin: Callable[[Sequence[Message]], Iterable[int]]
    whole: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    texts: list[tuple[int, ...]] = field(default_factory=list)

    def answer(self, messages: Sequence[Message]) -> None:
        began = perf_counter()
        ids: list[int] = []
        first = began
        for token in self.begin(messages):
            if not ids:
                first = perf_counter()
            ids.append(token)
        now = perf_counter()
        self.whole.append(now - began)
        self.decoding.append(now - first)
        self.texts.append(tuple(ids))

    def seconds(self, kind: str, repeats: int) -> float:
        """Return the seconds of all replies, the median of the repeats for each."""
        return float(np.median(np.reshape(getattr(self, kind), (repeats, -1)), axis=0).sum())


def edgellm(pair: LLM, retrieval: str, messages: Sequence[Message]) -> Iterable[int]:
    """Return the ids of a reply."""
    return (token.id for token in pair.reply(messages, max_tokens=MOST, temperature=0.0, retrieval=retrieval))


def llama(model: Llama, text: Model, messages: Sequence[Message]) -> Iterable[int]:
    """Yield the ids of a reply to the same prompt, without the token that ends the turn."""
    for written, token in enumerate(model.generate(text.chat_prompt(messages).tolist(), temp=0.0)):
        if written == MOST or text.is_eog(token):
            return
        yield token


def methods(path: Path, threads: int, stack: ExitStack) -> dict[str, Method]:
    """Return all methods by name, each with its own models and memory."""

    def pair() -> LLM:
        pair = stack.enter_context(LLM.open(None, path, n_ctx=POSITIONS, threads=threads))
        pair.curve()  # measured now, and not between two replies
        return pair

    def high_level(lookup: LlamaPromptLookupDecoding | None) -> Llama:
        model = Llama(
            str(path), n_ctx=POSITIONS, n_batch=POSITIONS, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
            draft_model=lookup, verbose=False,
        )  # fmt: skip
        stack.callback(model.close)
        return model

    text = stack.enter_context(Model.load(path))
    return {
        "edgellm": Method(partial(edgellm, pair(), "off")),
        OURS: Method(partial(edgellm, pair(), "auto")),
        "Llama": Method(partial(llama, high_level(None), text)),
        THEIRS: Method(partial(llama, high_level(LlamaPromptLookupDecoding()), text)),
    }


def measured(task: str, cases: int, repeats: int, threads: int) -> dict[str, Any]:
    """Return every method's tokens a second on one task, and how often its text equals that of the first method."""
    prompts = [
        [Message(turn.role, turn.text) for turn in case.prompt] for case in held_out(TASKS["home"][task], cases, SEED)
    ]
    found: dict[str, Method] = {}
    for _ in range(repeats):
        with ExitStack() as stack:  # each repeat begins without memories
            fresh = methods(resolve("edgellm-verifier"), threads, stack)
            for name, method in fresh.items():
                method.answer(prompts[-1])  # opens, measures and warms up
                found.setdefault(name, Method(method.begin))
            for number, messages in enumerate(prompts):
                for name in list(fresh) if number % 2 else reversed(fresh):
                    found[name].begin = fresh[name].begin
                    found[name].answer(messages)
    expected = found["edgellm"].texts
    tokens = sum(map(len, expected[: len(prompts)]))
    return {
        name: {
            "tokens_per_second": tokens / method.seconds("decoding", repeats),
            "whole_tokens_per_second": tokens / method.seconds("whole", repeats),
            "same_text": sum(one == other for one, other in zip(method.texts, expected, strict=True)) / len(expected),
        }
        for name, method in found.items()
    }


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table: tokens a second of decoding and of whole replies, and their ratios."""
    tasks = results["tasks"]
    lines = [f"| tokens a second | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
    for name in next(iter(tasks.values())):
        for key, label in (("tokens_per_second", "decoding"), ("whole_tokens_per_second", "whole replies")):
            cells = " | ".join(f"{rows[name][key]:.0f}" for rows in tasks.values())
            lines.append(f"| {name}, {label} | {cells} |")
    for key, label in (("tokens_per_second", "decoding"), ("whole_tokens_per_second", "whole replies")):
        cells = " | ".join(f"{rows[OURS][key] / rows[THEIRS][key]:.2f}" for rows in tasks.values())
        lines.append(f"| {OURS} / {THEIRS}, {label} | {cells} |")
    lines.append("| same text as edgellm: " + ", ".join(list(next(iter(tasks.values())))[1:]) + " | " + " | ".join(
        ", ".join(f"{rows[name]['same_text']:.0%}" for name in list(rows)[1:]) for rows in tasks.values()
    ) + " |")  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40, help="of each task")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default="llama", help="of the result file")
    arguments = parser.parse_args()
    tasks = {task: measured(task, arguments.cases, arguments.repeats, arguments.threads) for task in TASKS["home"]}
    sys.stdout.write(table({"tasks": tasks}) + "\n")
    kept = {"cases": arguments.cases, "repeats": arguments.repeats, "threads": arguments.threads, "tasks": tasks}
    sys.stdout.write(f"written: {write(arguments.name, 'bench.coordgen.llama', kept, SEED)}\n")


if __name__ == "__main__":
    main()
