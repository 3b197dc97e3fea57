"""Plain decoding beside llama-server, with the same file; and prompts that fill the context."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np

from bench.gpu.llama_server import LlamaServer
from bench.gpu.machine import Machine
from bench.harness.statistics import spread
from edgellm.llm import LLM

AIM, LONG_AIM = 0.98, 0.97
PROMPT = 64
_MARGIN = 64  # tokens of a context beyond prompt and reply


def timed(llm: LLM, prompt: Sequence[int], tokens: int) -> tuple[float, float]:
    """Return the seconds to the first token of a reply, and of each further one; nothing is retrieved."""
    began = perf_counter()
    reply = llm.complete(list(prompt), max_tokens=tokens, retrieval="off")
    next(reply)
    first = perf_counter()
    further = sum(1 for _ in reply)
    return first - began, (perf_counter() - first) / max(1, further)


def beside_server(machine: Machine, shape: str, length: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Return the milliseconds of both sides for a prompt of `length` tokens and each token behind it, and the ratios of
    llama-server's time to ours: above 1, ours is faster."""
    path, n_ctx = machine.random_model(shape), length + tokens + _MARGIN
    text = np.random.default_rng(length).integers(300, 100_000, length).tolist()
    ours: list[tuple[float, float]] = []
    theirs: list[tuple[float, float]] = []

    def ask_ours(turn: int) -> None:
        ours.append(timed(llm, [300 + turn, *text[1:]], tokens))

    def ask_theirs(turn: int) -> None:
        answer = server.complete([300 + turn, *text[1:]], tokens)
        theirs.append((answer.prompt_seconds, answer.token_seconds))

    words = machine.server_words(n_ctx)
    with (
        LlamaServer(machine.server, path, words, machine.folder / f"server-{shape}-{length}.log") as server,
        LLM.open(None, path, hardware=machine.hardware(n_ctx), history=False) as llm,
    ):
        llm.wait_until_measured()
        for turn in range(repeats + 1):  # the first one warms up
            for ask in (ask_ours, ask_theirs)[:: 1 if turn % 2 else -1]:
                ask(turn)
    found: dict[str, Any] = {"shape": shape, "length": length}
    for part, name in enumerate(("prompt", "token")):
        mine, other = ([one[part] for one in some[1:]] for some in (ours, theirs))
        found[name] = {
            "ours_ms": spread([1e3 * one for one in mine]),
            "llama_server_ms": spread([1e3 * one for one in other]),
            "ratio": spread([b / a for a, b in zip(mine, other, strict=True)]),
        }
    return found


def plain(machine: Machine) -> dict[str, Any]:
    """Return plain decoding of every shape."""
    amount = machine.amount
    rows = [beside_server(machine, shape, PROMPT, amount.tokens, amount.repeats) for shape in amount.shapes]
    return {"aim": AIM, "rows": rows}


def long_prompts(machine: Machine) -> dict[str, Any]:
    """Return prompts that are long, of the smallest shape."""
    amount = machine.amount
    shape = amount.shapes[0]
    rows = [beside_server(machine, shape, length, 32, max(2, amount.repeats - 2)) for length in amount.lengths]
    return {"aim": LONG_AIM, "rows": rows}


def table(found: dict[str, Any]) -> str:
    """Return a line for each row: medians, and the quartiles of the ratios."""
    lines = [f"{'shape':<16}{'prompt':>8}{'':8}{'ours ms':>10}{'llama-server':>14}{'ratio':>8}  quartiles"]
    for row in found["rows"]:
        for name in ("prompt", "token"):
            ours, theirs, ratio = (row[name][key] for key in ("ours_ms", "llama_server_ms", "ratio"))
            lines.append(
                f"{row['shape']:<16}{row['length']:>8,}  {name:<6}{ours['median']:>10.2f}{theirs['median']:>14.2f}"
                f"{ratio['median']:>8.3f}  {ratio['q1']:.3f} to {ratio['q3']:.3f}"
            )
    return "\n".join([*lines, f"aim: {found['aim']} or more"]) + "\n"
