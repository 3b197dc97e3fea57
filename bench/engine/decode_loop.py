"""Compare our decoding loop with a bare ctypes loop and with llama_cpp.Llama.

The same greedy text is decoded one token at a time, by three loops that take turns in one process: `Context.decode` and
`top2` (argmax and the two largest probabilities); `llama_decode` through ctypes and numpy's argmax over a view that is
made once; and `Llama.eval` and `Llama.sample`. On the bundled draft model, and on random weights of the Qwen2.5-0.5B
shape.

Each figure has two values: `clock` is the time that a user waits, `processor` leaves out the time of other programs.
Read the second on a busy machine; it needs one thread, because threads that wait for each other burn processor time.
Turns are short, because long ones are sure to be interrupted. Ratios are taken within each turn; medians and quartiles
over the turns. The targets are 0.98 of the bare loop's speed at the 0.5B shape, and 0.75 on the bundled draft model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import Annotated, Any

import llama_cpp
import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import alternate, spread
from edgellm.engine import Context, ContextSpec, Model, top2
from edgellm.engine.native import lib
from testkit import ROOT
from testkit.gguf import random_model

POSITIONS = 1_024
WARM = 3
PROMPT = np.arange(40, 72, dtype=np.int32)
Loop = Callable[[int], list[int]]


def ours(model: Model, threads: int) -> tuple[Callable[[], None], Loop]:
    """Return functions that prepare and run our loop; the second is timed."""
    context = Context(model, ContextSpec(n_ctx=POSITIONS, threads=threads))
    feed = np.zeros(1, dtype=np.int32)

    def ready() -> None:
        context.clear()
        feed[0] = top2(context.decode(PROMPT)).id

    def loop(n: int) -> list[int]:
        ids = []
        for _ in range(n):
            ids.append(top2(context.decode(feed)).id)
            feed[0] = ids[-1]
        return ids

    return ready, loop


def bare(model: Model, threads: int) -> tuple[Callable[[], None], Loop]:
    """Return the same for the shortest possible loop in Python: one prepared batch, one prepared view."""
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.kv_unified, params.no_perf = POSITIONS, 512, 512, True, True
    params.n_threads = params.n_threads_batch = threads
    context = lib.llama_init_from_model(model.owned.pointer, params)
    memory = lib.llama_get_memory(context)
    batch = lib.llama_batch_init(len(PROMPT), 0, 1)
    state = {"token": 0, "at": 0}

    def argmax() -> int:
        return int(np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (model.n_vocab,)).argmax())

    def ready() -> None:
        lib.llama_memory_seq_rm(memory, 0, -1, -1)
        batch.n_tokens = len(PROMPT)
        for i, token in enumerate(PROMPT.tolist()):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 0
        batch.logits[len(PROMPT) - 1] = 1
        lib.llama_decode(context, batch)
        state["token"], state["at"] = argmax(), len(PROMPT)
        batch.n_tokens, batch.logits[0] = 1, 1

    def loop(n: int) -> list[int]:
        ids, token, at, decode = [], state["token"], state["at"], lib.llama_decode
        view = np.ctypeslib.as_array(lib.llama_get_logits(context), (model.n_vocab,))
        for _ in range(n):
            batch.token[0], batch.pos[0] = token, at
            if decode(context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            token = int(view.argmax())
            at += 1
            ids.append(token)
        state["token"], state["at"] = token, at
        return ids

    return ready, loop


def high_level(path: Path, threads: int) -> tuple[Callable[[], None], Loop]:
    """Return the same for llama-cpp-python's own class."""
    model = llama_cpp.Llama(
        str(path), n_ctx=POSITIONS, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
    )

    def ready() -> None:
        model.reset()  # type: ignore[no-untyped-call]
        model.eval(PROMPT.tolist())
        model.eval([model.sample(temp=0.0, top_k=1)])

    def loop(n: int) -> list[int]:
        ids = []
        for _ in range(n):
            ids.append(model.sample(temp=0.0, top_k=1))
            model.eval([ids[-1]])
        return ids

    return ready, loop


def of_model(path: Path, tokens: int, repeats: int, threads: int) -> dict[str, Any]:
    """Return the milliseconds a token of the three loops, and our speed as a share of the others'."""
    model = Model.load(path)
    loops = [ours(model, threads), bare(model, threads), high_level(path, threads)]
    texts: list[list[int]] = [[], [], []]

    processor: list[list[float]] = [[], [], []]

    def timed(which: int) -> Callable[[], float]:
        ready, loop = loops[which]

        def run() -> float:
            if len(texts[which]) % (POSITIONS // 2 // tokens * tokens) == 0:
                ready()
            start, busy = perf_counter(), process_time()
            ids = loop(tokens)
            taken = perf_counter() - start
            processor[which].append((process_time() - busy) / tokens * 1e3)
            texts[which].extend(ids)
            return taken / tokens * 1e3

        return run

    runs = [timed(i) for i in range(3)]
    alternate(WARM, *runs)
    clock = alternate(repeats, *runs)
    return {
        "model": path.name,
        "parameters": model.n_params,
        "threads": threads,
        "tokens": tokens,
        "repeats": repeats,
        "same_text": texts[0] == texts[1] == texts[2],
        "clock": compared(*clock),
        "processor": compared(*(taken[WARM:] for taken in processor)),
    }


def compared(mine: list[float], lean: list[float], theirs: list[float]) -> dict[str, dict[str, float]]:
    """Return spreads of the three loops, and of our speed as a share of the others' in the same turn."""
    return {
        "ours_ms": spread(mine),
        "bare_ms": spread(lean),
        "llama_ms": spread(theirs),
        "overhead_us": spread([(a - b) * 1e3 for a, b in zip(mine, lean, strict=True)]),
        "speed_against_bare": spread([b / a for a, b in zip(mine, lean, strict=True)]),
        "speed_against_llama": spread([c / a for a, c in zip(mine, theirs, strict=True)]),
    }


LABELS = {
    "ours_ms": "ours, ms a token",
    "bare_ms": "bare ctypes loop, ms a token",
    "llama_ms": "llama_cpp.Llama, ms a token",
    "overhead_us": "ours over bare, µs a token",
    "speed_against_bare": "speed against the bare loop",
    "speed_against_llama": "speed against llama_cpp.Llama",
}


def table(found: dict[str, Any]) -> str:
    """Return a block for each model: medians and quartiles, on the clock and in processor time."""
    return "\n".join(map(_block, found["models"]))


def _block(row: dict[str, Any]) -> str:
    lines = [
        f"{row['model']}, {row['threads']} threads, median (quartiles) of {row['repeats']} turns",
        f"the three wrote the same text: {row['same_text']}",
    ]
    for clock in ("clock", "processor"):
        for name, label in LABELS.items():
            v = row[clock][name]
            lines.append(f"  {clock:10} {label:30} {v['median']:8.3f} ({v['q1']:.3f} to {v['q3']:.3f})")
    return "\n".join(lines) + "\n"


def measure(
    tokens: Annotated[int, "a turn of the small model; a quarter for the big one"] = 8,
    repeats: Annotated[int, "turns of the small model; a fifth for the big one"] = 300,
    threads: Annotated[int, "for all three loops"] = 1,
) -> Figures:
    """Return the figures of both models."""
    with tempfile.TemporaryDirectory() as folder:
        big = Path(folder) / "random-qwen2.5-0.5b-Q4_0.gguf"
        random_model.write(big, random_model.SHAPES["qwen2.5-0.5b"], "Q4_0")
        runs = ((ROOT / "models" / "draft.gguf", tokens, repeats), (big, max(1, tokens // 4), max(2, repeats // 5)))
        return {"models": [of_model(*run, threads) for run in track(runs, "models")]}
