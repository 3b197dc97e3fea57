"""Measure first replies to long prompts, with what attention adds to a decode and without.

    python -m bench.coordgen.long_prompts [--length 8192] [--replies 16] [--tokens 32]

A model in the shape of Qwen2.5-0.5B with random weights in Q4_0, whose text repeats itself, so that much is copied. On
a processor every row of a decode attends to all positions before it, which a cost curve measured at the beginning of a
context does not know. Each reply is the first one of a newly opened model, which restores what it has read of the
prompt (`prompt_cache`); only the prompts' ends differ. *Depth known* is as by default; for *depth unknown* the stored
curve is the same one without `attention`. Beside them is plain decoding, without retrieval. They take turns.

Columns: plain decoding's time a token by ours, the geometric mean over replies, the least and the greatest; and drafted
tokens, and those accepted of them, in the mean.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, geometric_mean
from time import perf_counter
from typing import Any

import numpy as np

from bench.harness.report import write
from edgellm import LLM
from edgellm.engine import Ids
from testkit.gguf import random_model

MODULE = "bench.coordgen.long_prompts"
SHAPE, TYPE = "qwen2.5-0.5b", "Q4_0"
PLAIN, KNOWN, UNKNOWN = "plain decoding", "depth known", "depth unknown"
CACHE = 2**31


def opened(path: Path, n_ctx: int, threads: int) -> LLM:
    """Return the model with its stored curve, or a measured one."""
    llm = LLM.open(None, path, threads=threads, n_ctx=n_ctx, prompt_cache=CACHE)
    llm.curve()
    return llm


def reply(llm: LLM, prompt: Ids, tokens: int, retrieval: str) -> dict[str, float]:
    """Return the seconds of a token behind the first one, and the drafted and accepted tokens."""
    written = llm.complete(prompt.tolist(), max_tokens=tokens + 1, retrieval=retrieval)
    next(written)
    began = perf_counter()
    count = sum(1 for _ in written)
    seconds = (perf_counter() - began) / max(1, count)
    return {"seconds": seconds, "drafted": written.summary.drafted, "accepted": written.summary.accepted}


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each way."""
    lines = ["| way | speed, of plain | least | greatest | drafted | accepted |", "|---|---|---|---|---|---|"]
    plain = [one["seconds"] for one in found["replies"][PLAIN]]
    for way in (KNOWN, UNKNOWN):
        replies = found["replies"][way]
        speeds = [taken / one["seconds"] for taken, one in zip(plain, replies, strict=True)]
        counts = " | ".join(f"{fmean(one[what] for one in replies):.1f}" for what in ("drafted", "accepted"))
        lines.append(f"| {way} | {geometric_mean(speeds):.3f} | {min(speeds):.3f} | {max(speeds):.3f} | {counts} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192, help="tokens of the prompts")
    parser.add_argument("--replies", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of a reply")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", default=SHAPE, choices=random_model.SHAPES)
    parser.add_argument("--name", default="long_prompts", help="of the result file")
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    text = rng.integers(300, 2000, arguments.length - 16, dtype=np.int32)
    ends = rng.integers(300, 2000, (arguments.replies, 16), dtype=np.int32)
    n_ctx, replies = arguments.length + arguments.tokens + 64, dict[str, list[dict[str, float]]]()
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "model.gguf"
        os.environ["EDGELLM_HOME"] = name
        random_model.write(path, random_model.SHAPES[arguments.shape], TYPE)
        with opened(path, n_ctx, arguments.threads) as llm:
            llm.wait_until_measured()
            reply(llm, text, 1, "off")
        (curve,) = (Path(name) / "cache" / "curves").iterdir()
        measured = json.loads(curve.read_text())
        curves = {PLAIN: measured, KNOWN: measured, UNKNOWN: measured | {"attention": [0.0, 0.0]}}
        for number, end in enumerate(ends):
            ways = (PLAIN, KNOWN, UNKNOWN)
            for way in ways[number % 3 :] + ways[: number % 3]:
                curve.write_text(json.dumps(curves[way]))  # replies correct it, and keep that
                with opened(path, n_ctx, arguments.threads) as llm:
                    retrieval = "off" if way == PLAIN else "auto"
                    found = reply(llm, np.concatenate((text, end)), arguments.tokens, retrieval)
                replies.setdefault(way, []).append(found)
    figures = {"length": arguments.length, "tokens": arguments.tokens, "replies": replies}
    write(arguments.name, MODULE, figures, 0)
    sys.stdout.write(table(figures))


if __name__ == "__main__":
    main()
