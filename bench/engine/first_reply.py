"""The first reply of a pair that this device has not seen, and the time and files of its profile.

    python -m bench.engine.first_reply [--shapes qwen2.5-0.5b qwen2.5-1.5b] [--type Q4_0]
    python -m bench.engine.first_reply --files DRAFT VERIFIER

Models of real shape and with random weights are written to a temporary folder, if no files are named. Every process
below has a home of its own that is empty at first:

- `new`: the pair is loaded (tried in a child process, too) and writes its first reply;
- `known`: another process does the same, after the pair was tested, hashed and measured;
- `bare`: the same of a known pair with retrieval off, which needs no cost curve: loading and prefill alone.

`tests` are the CPU seconds of this process's children, which try the models, and of what is measured between replies;
`peak` is the most memory that the process took until the second reply, in MB.

`first` is the time from asking to the first token. `share` is loading and first token of the new pair by those of a
bare one: 1.0 means that nothing but loading and prefill was waited for. `profile` is the time of a
profile for a prompt by the time of a reply to it, with what it leaves in the cache and its peak of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from bench.harness.report import write
from bench.harness.statistics import spread
from edgellm.engine import Model
from edgellm.llm import LLM
from testkit import ROOT

QUESTION = "Tell me a story about a lighthouse and its keeper. "
MODES = ("new", "known", "bare")
FIGURES = {
    "load": "load", "first": "first token", "second": "of another reply", "tests": "tests, CPU s", "peak": "peak, MB",
}  # fmt: skip
"""What a table calls the figures of a process, which are seconds where it does not say otherwise."""


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table of the medians in seconds, and the figures of the profile."""
    names = [name for name in FIGURES if name in results["replies"]["new"]]
    lines = [f"| pair | {' | '.join(FIGURES[name] for name in names)} |", "|---" * (1 + len(names)) + "|"]
    for mode, found in results["replies"].items():
        medians = (f"{found[name]['median']:.2f}" for name in names)
        lines.append(f"| {mode} | {' | '.join(medians)} |")
    profile = results["profile"]
    share, memory, kept = results["share"]["median"], profile["memory_ratio"], profile["shard_bytes"] / 1e6
    lines += ["", f"A new pair takes {share:.2f} times as long as loading and prefill."]
    lines += [f"A profile takes {profile['replies']:.1f} replies' time a prompt, {memory:.2f} times the memory, and"]
    lines += [f"leaves {kept:.0f} MB.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs=2, default=["qwen2.5-0.5b", "qwen2.5-1.5b"], metavar=("DRAFT", "VERIFIER"))
    parser.add_argument("--files", nargs=2, metavar=("DRAFT", "VERIFIER"), help="model files, in place of --shapes")
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--words", type=int, default=20, help="repetitions of the question in a prompt")
    parser.add_argument("--tokens", type=int, default=24, help="of a reply")
    parser.add_argument("--prompts", type=int, default=3, help="of the profile")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="first_reply", help="name of the result")
    parser.add_argument("--part", choices=("reply", "bare", "measure", "profile"), help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        sys.stdout.write(json.dumps(part(arguments)) + "\n")
        return
    with tempfile.TemporaryDirectory() as folder:
        made = [f"{folder}/{shape}.gguf" for shape in arguments.shapes]
        files = [str(Path(file).absolute()) for file in arguments.files or made]
        for shape, file in zip(arguments.shapes, () if arguments.files else made, strict=not arguments.files):
            words = ("--shape", shape, "--type", arguments.type)
            command = [sys.executable, "-m", "testkit.gguf.random_model", file, *words]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        rounds = [turn(arguments, files, Path(folder) / f"home{number}") for number in range(arguments.repeats)]
        profiled = child(arguments, files, Path(folder) / "home0", "profile")
    found = {
        "shapes": arguments.files or arguments.shapes,
        "type": arguments.type,
        "replies": {mode: {name: spread([one[mode][name] for one in rounds]) for name in FIGURES} for mode in MODES},
        "share": spread([_waited(one["new"]) / _waited(one["bare"]) for one in rounds]),
        "profile": profiled,
    }
    write(arguments.name, "bench.engine.first_reply", found)
    sys.stdout.write(table(found))


def _waited(reply: dict[str, float]) -> float:
    return reply["load"] + reply["first"]


def turn(arguments: argparse.Namespace, files: list[str], home: Path) -> dict[str, Any]:
    """Return the times of a new, a known and a bare pair, in homes of this turn."""
    new = child(arguments, files, home, "reply")
    child(arguments, files, home, "measure")
    return {
        "new": new,
        **{mode: child(arguments, files, home, part) for mode, part in (("bare", "bare"), ("known", "reply"))},
    }


def child(arguments: argparse.Namespace, files: list[str], home: Path, name: str) -> Any:
    """Return what a process of its own finds."""
    command = [
        sys.executable, "-m", "bench.engine.first_reply", "--part", name, "--models", *files,
        "--words", str(arguments.words), "--tokens", str(arguments.tokens), "--prompts", str(arguments.prompts),
    ]  # fmt: skip
    environment = {**os.environ, "EDGELLM_HOME": str(home)}
    done = subprocess.run(command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def part(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of this process."""
    if arguments.part in ("measure", "profile"):
        for path in arguments.models:
            Model.load(Path(path)).close()  # tested now, and not beside a run
    began = perf_counter()
    with LLM.open(*arguments.models) as pair:
        load = perf_counter() - began
        if arguments.part == "measure":
            pair.hash_models()
            pair.curve()
            return {}
        retrieval = "off" if arguments.part == "bare" else "auto"
        prompts = [f"{number} " + QUESTION * arguments.words for number in range(max(2, arguments.prompts))]
        if arguments.part != "profile":
            first, second = (reply(pair, prompt, arguments.tokens, retrieval)[0] for prompt in prompts[:2])
            peak, before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, process_time()
            pair.wait_until_measured()
            tried = resource.getrusage(resource.RUSAGE_CHILDREN)
            tests = tried.ru_utime + tried.ru_stime + process_time() - before
            return {"load": load, "first": first, "second": second, "tests": tests, "peak": peak}
        pair.curve()
        alone = [reply(pair, prompt, arguments.tokens, retrieval)[1] for prompt in prompts]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = perf_counter()
        pair.profile(prompts, max_tokens=arguments.tokens)
        taken = perf_counter() - began
    cache = Path(os.environ["EDGELLM_HOME"], "cache", "shards")
    return {
        "replies": taken / sum(alone),
        "seconds": taken,
        "shard_bytes": sum(path.stat().st_size for path in cache.glob("*")),
        "memory_ratio": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / before,
    }


def reply(pair: LLM, prompt: str, tokens: int, retrieval: str) -> tuple[float, float]:
    """Return the seconds to the first token, and those of the whole reply."""
    began, first = perf_counter(), None
    for _ in pair.reply(prompt, max_tokens=tokens, retrieval=retrieval):
        first = first or perf_counter() - began
    return first or perf_counter() - began, perf_counter() - began


if __name__ == "__main__":
    main()
