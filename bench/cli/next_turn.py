"""Measure the next turn of a long conversation: in the same process, in another one, and where nothing was kept.

    python -m bench.cli.next_turn [--words 4000] [--repeats 3] [--shape qwen2.5-0.5b]

A conversation about a text of random words, with random weights of that shape in Q4_0, and a draft model with four of
its layers. The first turn and the next one are each `edgellm chat --json` in a process of its own, as a user would call
it (`chat -c`); once with what the first process has kept of what it read, and once without. In between, the same two
turns in one process.

Columns: tokens of the prompt; seconds from the request to the first token, without loading; seconds of the whole
process, in which models are loaded, and in which the first one keeps what it has read; the size of what is kept on
disk. Medians over the repeats, and the least and the greatest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from bench.harness.report import write
from edgellm.engine import Message
from edgellm.llm import LLM, compose
from testkit.gguf import random_model

MODULE = "bench.cli.next_turn"
QUESTIONS = ("What is this about?", "And what else?")
TOKENS = 16
FIRST, SAME, KEPT, WITHOUT = (
    "the first turn",
    "the next one, in the same process",
    "the next one, in another process",
    "the next one, where nothing was kept",
)


def asked(question: str, models: Sequence[str], home: Path, *words: str) -> tuple[dict[str, Any], float]:
    """Ask `edgellm chat` in a process of its own; return the reply's summary and the process's seconds."""
    began = monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "edgellm", "chat", "--json", "--max-tokens", str(TOKENS), *models, *words, question],
        env=os.environ | {"EDGELLM_HOME": str(home)}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    summary: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["summary"]
    return summary, monotonic() - began


def size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def measured(folder: Path, files: Mapping[str, Path], text: str) -> list[dict[str, Any]]:
    """Return a row for each of the four turns."""
    home, bare = folder / "home", folder / "bare"
    notes = folder / "notes.txt"
    notes.write_text(text, encoding="utf-8")
    models = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    rows: list[dict[str, Any]] = []

    def add(turn: str, summary: Mapping[str, Any], process: float | None, kept: int | None = None) -> None:
        seconds = summary["ttft_ms"] / 1e3
        rows.append({"turn": turn, "prompt": summary["prompt_tokens"], "first": seconds, "process": process,
                     "kept": kept})  # fmt: skip

    prompts = home / "cache" / "prompts"
    summary, process = asked(QUESTIONS[0], models, home, "--context", str(notes))
    add(FIRST, summary, process, size(prompts))
    shutil.copytree(home, bare)
    shutil.rmtree(bare / "cache" / "prompts")
    summary, process = asked(QUESTIONS[1], models, home, "-c")
    add(KEPT, summary, process, size(prompts))
    add(WITHOUT, *asked(QUESTIONS[1], models, bare, "-c", "--prompt-cache", "0"))
    with LLM.open(files["draft"], files["verifier"], history=False) as pair:
        first = compose(QUESTIONS[0], context=[text])
        reply = pair.reply(first, max_tokens=TOKENS)
        list(reply)
        turns = [*first, Message("assistant", reply.summary.text), Message("user", QUESTIONS[1])]
        reply = pair.reply(turns, max_tokens=TOKENS)
        list(reply)
        add(SAME, {"ttft_ms": reply.summary.ttft_ms, "prompt_tokens": reply.summary.prompt_tokens}, None)
    shutil.rmtree(home)
    shutil.rmtree(bare)
    return rows


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each turn."""
    lines = ["| turn | prompt | to the first token, s | process, s | kept, MB |", "|---|---|---|---|---|"]
    for turn in (FIRST, SAME, KEPT, WITHOUT):
        rows = [row for row in found["rows"] if row["turn"] == turn]
        kept = max((row["kept"] for row in rows if row["kept"] is not None), default=None)
        lines.append(
            f"| {turn} | {median(row['prompt'] for row in rows):,.0f} | {_spread(row['first'] for row in rows)}"
            f" | {_spread(row['process'] for row in rows)} | {'' if kept is None else f'{kept / 1e6:.1f}'} |"
        )
    return "\n".join(lines) + "\n"


def _spread(values: Any) -> str:
    known = [value for value in values if value is not None]
    return f"{median(known):.2f} ({min(known):.2f} to {max(known):.2f})" if known else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=4000, help="of the text")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=random_model.SHAPES)
    parser.add_argument("--name", default="next_turn", help="of the result file")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = random_model.SHAPES[arguments.shape]
        files = {"draft": folder / "draft.gguf", "verifier": folder / "verifier.gguf"}
        random_model.write(files["draft"], replace(shape, n_layer=min(4, shape.n_layer)), "Q4_0")
        random_model.write(files["verifier"], shape, "Q4_0", seed=1)
        for turn in range(arguments.repeats):
            rng = random.Random(turn)
            text = " ".join("".join(rng.choices("abcdefghijklmnoprstuw", k=4)) for _ in range(arguments.words))
            rows += measured(folder, files, text)
            write(arguments.name, MODULE, {"shape": arguments.shape, "rows": rows}, 0)
    sys.stdout.write(table({"rows": rows}))


if __name__ == "__main__":
    main()
