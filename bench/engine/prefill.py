"""Compare prefill and decoding behind a long prompt with plain llama.cpp, in one run.

A file with random weights in the shape of Qwen2.5-0.5B, Q4_0. *Plain* is `llama_decode` in batches of 512 rows with
llama.cpp's default attention, then one token at a time; *ours* is a reply of `LLM`, with retrieval off, as by default,
and as by default with a draft model of four layers, which also reads the prompt, behind the first token. They take
turns, with another first token each time, so that nothing is cached. Ratios are plain's time by ours within a turn: 1
is as fast, less is slower. The targets are 0.97 for the prefill and 0.98 for the decoding.

On two slow cores a turn of 8,192 tokens takes about eight minutes.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np

from bench.harness.plain import Plain
from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import spread
from edgellm import LLM
from edgellm.engine import Model
from testkit.gguf import random_model

SHAPE, TYPE = "qwen2.5-0.5b", "Q4_0"
BATCH = 512
OURS = {"off": "ours, retrieval off", "auto": "ours", "pair": "ours, a draft model"}
PLAIN = "plain"

Seconds = tuple[float, float]
"""Of the prefill with the first token, and of each further token."""


def run_plain(context: Plain, tokens: int, prompt: Sequence[int]) -> Seconds:
    """Return the times of llama.cpp itself."""
    context.clear()
    began = perf_counter()
    token = 0
    for start in range(0, len(prompt), BATCH):
        token = int(context.decode(prompt[start : start + BATCH]).argmax())
    first = perf_counter()
    for _ in range(tokens):
        token = int(context.decode([token]).argmax())
    return first - began, (perf_counter() - first) / tokens


def run_ours(llm: LLM, kind: str, tokens: int, prompt: Sequence[int]) -> Seconds:
    """Return the times of a reply."""
    began = perf_counter()
    reply = llm.complete(list(prompt), max_tokens=tokens + 1, retrieval="off" if kind == "off" else "auto")
    next(reply)
    first = perf_counter()
    further = sum(1 for _ in reply)
    return first - began, (perf_counter() - first) / max(1, further)


def measured(
    path: Path, draft: Path, length: int, tokens: int, repeats: int, threads: int, ours: Sequence[str]
) -> dict[str, Any]:
    """Return the times at one length of the prompt."""
    rng = np.random.default_rng(length)
    n_ctx = length + tokens + 64
    times: dict[str, list[Seconds]] = {}
    with ExitStack() as stack:
        model = stack.enter_context(Model.load(path))  # tested now, and not beside a run
        opened = {
            kind: stack.enter_context(
                LLM.open(draft if kind == "pair" else None, path, threads=threads, n_ctx=n_ctx, history=False)
            )
            for kind in ours
        }
        for llm in opened.values():
            llm.curve()
            llm.wait_until_measured()
        context = stack.enter_context(closing(Plain(model, n_ctx, BATCH, threads)))
        text = rng.integers(300, 100_000, length).tolist()
        runs: dict[str, Callable[[list[int]], Seconds]] = {
            PLAIN: partial(run_plain, context, tokens),
            **{OURS[kind]: partial(run_ours, llm, kind, tokens) for kind, llm in opened.items()},
        }
        for turn in range(repeats):
            order = list(runs) if turn % 2 == 0 else list(reversed(runs))
            for at, name in enumerate(order):
                prompt = [300 + len(runs) * turn + at, *text[1:]]
                times.setdefault(name, []).append(runs[name](prompt))
    ratios = {
        name: {
            what: spread([plain[part] / mine[part] for plain, mine in zip(times[PLAIN], times[name], strict=True)])
            for part, what in enumerate(("prefill", "decode"))
        }
        for name in times
        if name != PLAIN
    }
    seconds = {
        name: {what: spread([one[part] for one in some]) for part, what in enumerate(("prefill", "decode"))}
        for name, some in times.items()
    }
    return {"length": length, "repeats": repeats, "threads": threads, "seconds": seconds, "ratios": ratios}


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each length and way: medians, and the quartiles of the ratios."""
    lines = [f"{'prompt':>7}  {'':<20}{'prefill, s':>11}{'ratio':>24}{'ms a token':>12}{'ratio':>24}"]
    for row in found["rows"]:
        for name, seconds in row["seconds"].items():
            shown = [f"{row['length']:>7,}  {name:<20}"]
            for what, factor, width in (("prefill", 1.0, 11), ("decode", 1e3, 12)):
                shown.append(f"{factor * seconds[what]['median']:>{width}.2f}")
                ratio = row["ratios"].get(name, {}).get(what)
                shown.append(
                    f"{ratio['median']:>9.3f} ({ratio['q1']:.3f}-{ratio['q3']:.3f})".rjust(24) if ratio else " " * 24
                )
            lines.append("".join(shown).rstrip())
    return "\n".join(lines) + "\n"


def measure(
    lengths: Annotated[Sequence[int], "tokens of the prompt"] = (8_192, 32_768),
    tokens: Annotated[int, "decoded behind it"] = 32,
    repeats: int = 3,
    threads: int = 1,
    ways: Annotated[Sequence[Literal["off", "auto", "pair"]], "of ours"] = ("off", "auto", "pair"),
) -> Iterator[Figures]:
    """Yield the figures of all lengths so far, after each."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path, draft = Path(folder) / "half.gguf", Path(folder) / "draft.gguf"
        shape = random_model.SHAPES[SHAPE]
        random_model.write(path, shape, TYPE)
        random_model.write(draft, replace(shape, n_layer=4), TYPE, seed=1)
        for length in track(lengths, "lengths"):
            rows.append(measured(path, draft, length, tokens, repeats, threads, ways))
            yield {"shape": SHAPE, "type": TYPE, "rows": rows}
