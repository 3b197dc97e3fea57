"""Measure the next turn of a long conversation: in the same process, in another one, and where nothing was kept.

A conversation about this project's guides. The first turn and the next one are each `edgellm chat --json` in a process
of its own, as a user would call it (`chat -c`); once with what the first process has kept of what it read, and once
without. In between, the same two turns in one process.

Columns: tokens of the prompt; seconds from the request to the first token, without loading; seconds of the whole
process, in which models are loaded, and in which the first one keeps what it has read; the size of what is kept on
disk. Medians over the repeats, and the least and the greatest.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Annotated, Any

from bench.harness.progress import track
from bench.harness.results import Figures
from edgellm.engine import Message
from edgellm.llm import LLM, compose
from edgellm.storage.model_files import resolve
from testkit import ROOT

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


def measure(
    verifier: str = "smollm2:135m",
    draft: str = "smollm2:draft",
    characters: Annotated[int, "of the text"] = 16_000,
    repeats: int = 3,
) -> Iterator[Figures]:
    """Yield the rows so far, after each repeat."""
    guides = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/guide/*.md")))
    files = {"draft": resolve(draft), "verifier": resolve(verifier)}
    rows: list[Figures] = []
    for turn in track(range(repeats), "repeats"):
        with tempfile.TemporaryDirectory() as folder:
            rows += measured(Path(folder), files, guides[turn * 100 :][:characters])
        yield {"rows": rows}
