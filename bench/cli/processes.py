"""Measure the tokens a second of one process after another, by turns with llama-cpp-python's own loop.

A process opens the model alone, writes a reply that is not counted, and then one that is, greedily. Where its threads
sleep while they wait for each other, all of its replies are slow: the slowest processes are what is looked at.
"""

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.storage.model_files import resolve

OURS = """
import sys; from edgellm.llm import LLM
with LLM.open("none", sys.argv[1], history=False) as model:
    def write(): list(reply := model.reply("Tell a story.", max_tokens=int(sys.argv[2]), temperature=0.0)); return reply
    write(); print(write().summary.tokens_per_second)
"""
THEIRS = """
import sys; from time import perf_counter; from edgellm.engine import native; from llama_cpp import Llama
native.start()
model, count = Llama(sys.argv[1], n_ctx=2048, n_threads=2, verbose=False), int(sys.argv[2])
def write():
    tokens = model.generate(model.tokenize(b"Tell a story."), temp=0.0); next(tokens); began = perf_counter()
    for _ in range(count - 1): next(tokens)
    return (count - 1) / (perf_counter() - began)
write(); print(write())
"""
WAYS = {"edgellm": OURS, "llama_cpp.Llama": THEIRS}
SLOW = 0.85  # of the median


def measure(
    model: str = "smollm2:135m", processes: int = 60, tokens: Annotated[int, "of a reply"] = 64
) -> Iterator[Figures]:
    """Yield the speeds so far, after one process of each."""
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in track(range(processes), "processes"):
        for way, program in WAYS.items():
            call = [sys.executable, "-c", program, str(resolve(model)), str(tokens)]
            speeds[way].append(float(subprocess.run(call, stdout=subprocess.PIPE, check=True).stdout))
        yield {"speeds": speeds}


def table(found: Mapping[str, Any]) -> str:
    """Return the spread of each way's processes, and how many are slow."""
    lines = [f"{'tokens/s':18}  least  median  most   below {SLOW} of the median\n"]
    for way, speeds in found["speeds"].items():
        slow = sum(speed < SLOW * float(np.median(speeds)) for speed in speeds)
        lines.append(
            f"{way:18}{min(speeds):7.0f}{np.median(speeds):8.0f}{max(speeds):6.0f}   {slow} of {len(speeds)}\n"
        )
    return "".join(lines)
