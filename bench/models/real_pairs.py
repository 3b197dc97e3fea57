"""Run every feature with pairs that people use, in their real vocabularies, templates and kinds, at a small width.

    python -m bench.models.real_pairs FOLDER [NAME ...] [--tokens 24] [--again]

pip fetches the source of the installed llama-cpp-python into FOLDER, if it is not there: its `models/` has vocabularies
and chat templates of real models. Weights are random and in float32, and the draft model is the verifier with a noise
of 12 %. Vocabularies are padded with unused tokens to the real sizes, which differ in some pairs. Where the source has
no vocabulary of a family (gpt-oss, SmolLM3, LFM2.5, Nemotron 3, Gemma 3), that of another stands in, with the control
tokens of the family's template; Gemma 3 has Gemma 2's template. Each pair has a process of its own; rows that are in
the result are kept, unless `--again`.

Columns as in `bench.models.architectures`. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import gguf

from bench.harness import report
from bench.harness.llama_source import source
from bench.models.architectures import COLUMNS, NOISE
from bench.models.features import EQUAL, Pair, filled
from testkit import ROOT
from testkit.gguf import architectures
from testkit.gguf.architectures import TokenizerEntry

MODULE = "bench.models.real_pairs"
N_CTX = 1_024
_TEMPLATE = "tokenizer.chat_template"
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5


@dataclass(frozen=True, slots=True)
class RealPair:
    """A pair: its architecture, vocabulary and template, and the tokens of draft model and verifier. `controls` are
    tokens that the template writes and a vocabulary that stands in lacks; the first unused places are theirs, and
    `ends` is the one that ends a turn."""

    architecture: str
    vocabulary: str
    template: str
    draft_tokens: int
    tokens: int
    controls: tuple[str, ...] = ()
    ends: str = ""


_HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>")
_CHATML = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
PAIRS = {
    "Qwen3 0.6B, 8B": RealPair("qwen3", "qwen2", "Qwen-Qwen3-0.6B", 151_936, 151_936),
    "Qwen2.5 0.5B, 7B": RealPair("qwen2", "qwen2", "Qwen-Qwen2.5-7B-Instruct", 151_936, 152_064),
    "Qwen3.5 0.8B, Qwen3.6 27B": RealPair("qwen35", "qwen35", "Qwen3.5-4B", 248_320, 248_320),
    "Gemma 4 E2B, 31B": RealPair("gemma4", "gemma-4", "google-gemma-4-31B-it", 262_144, 262_144),
    "Gemma 3 1B, 27B": RealPair("gemma3", "gemma-4", "google-gemma-2-2b-it", 262_144, 262_208),
    "gpt-oss 20b, 120b": RealPair(
        "gpt-oss", "llama-bpe", "openai-gpt-oss-120b", 201_088, 201_088, _HARMONY, "<|return|>"
    ),
    "Llama 3.2 1B, 3.1 8B": RealPair("llama", "llama-bpe", "meta-llama-Llama-3.1-8B-Instruct", 128_256, 128_256),
    "SmolLM3 3B": RealPair("smollm3", "llama-bpe", "HuggingFaceTB-SmolLM3-3B", 128_256, 128_256),
    "LFM2.5 1.2B, 8B-A1B": RealPair("lfm2moe", "gpt-2", "LFM2.5-8B-A1B", 65_536, 65_536, _CHATML, "<|im_end|>"),
    "Nemotron 3 Nano": RealPair(
        "nemotron_h", "llama-bpe", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 131_072, 131_072, _CHATML, "<|im_end|>"
    ),
}


def tokenizer(folder: Path, pair: RealPair, tokens: int) -> list[TokenizerEntry]:
    """Return the entries of a pair's vocabulary, padded to so many tokens, and of its chat template."""
    models = source(folder) / "models"
    known = {entry.name: entry for entry in architectures.tokenizer_of(models / f"ggml-vocab-{pair.vocabulary}.gguf")}
    texts = list(known["tokenizer.ggml.tokens"].value)
    size = len(texts)
    more = [*pair.controls, *(f"[PAD{at}]" for at in range(size + len(pair.controls), tokens))]
    kinds = [*known["tokenizer.ggml.token_type"].value, *[_CONTROL] * len(pair.controls)]
    values = {
        "tokenizer.ggml.tokens": [*texts, *more],
        "tokenizer.ggml.token_type": [*kinds, *[_UNUSED] * (tokens - len(kinds))],
    }
    if (scores := known.get("tokenizer.ggml.scores")) is not None:
        values["tokenizer.ggml.scores"] = [*scores.value, *[-1e4] * len(more)]
    found = {name: replace(known[name], value=value) for name, value in values.items()}
    string, number = gguf.GGUFValueType.STRING, gguf.GGUFValueType.UINT32
    text = (models / "templates" / f"{pair.template}.jinja").read_text(encoding="utf-8")
    found[_TEMPLATE] = TokenizerEntry(_TEMPLATE, text, string)
    if pair.ends:
        key = "tokenizer.ggml.eos_token_id"
        found[key] = TokenizerEntry(key, size + pair.controls.index(pair.ends), number)
    return [*{**known, **found}.values()]


def measured(folder: Path, name: str, tokens: int) -> dict[str, Any]:
    """Return the row of a pair, computed in this process."""
    began, pair = perf_counter(), PAIRS[name]
    with tempfile.TemporaryDirectory() as place, ExitStack() as closing:
        draft, verifier = Path(place) / "draft.gguf", Path(place) / "verifier.gguf"
        for path, size, noise in ((draft, pair.draft_tokens, NOISE), (verifier, pair.tokens, 0.0)):
            made = tokenizer(folder, pair, size)
            architectures.write(pair.architecture, path, noise=noise, tokenizer=made)
        ready = Pair(draft, verifier, tokens=tokens, n_ctx=N_CTX, closing=closing)
        cells = filled(ready.cells())
        prompt = len(ready.reference.prompt)
    return {
        "architecture": pair.architecture, "tokens": [pair.draft_tokens, pair.tokens], "prompt": prompt, "cells": cells,
        "seconds": round(perf_counter() - began, 1),
    }  # fmt: skip


def in_child(folder: Path, name: str, tokens: int) -> dict[str, Any]:
    """Return the row of a pair, computed in a process of its own with an empty home."""
    words = [sys.executable, "-m", MODULE, str(folder), name, "--tokens", str(tokens), "--one"]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "EDGELLM_HOME": home, "GGML_NO_BACKTRACE": "1"}
        done = subprocess.run(words, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return {"cells": {"alone": f"crash: exit code {done.returncode}: {lines[-1] if lines else ''}"}}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether nothing in a row differs."""
    return all(text.startswith((EQUAL, "right", "refused", "rounding")) for text in row["cells"].values())


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each pair, and the reasons of what was refused or left out."""
    notes: list[str] = []
    lines = [("pair", "architecture", "vocabularies", "prompt", *COLUMNS)]
    for name, row in found["rows"].items():
        cells = []
        for column in COLUMNS:
            kind, _, reason = row["cells"].get(column, "").partition(": ")
            if reason and reason not in notes:
                notes.append(reason)
            cells.append(
                f"{kind} ({notes.index(reason) + 1})"
                if reason
                else kind.replace("right, ", "").removesuffix(" verified")
            )
        sizes = " ".join(f"{one:,}" for one in row.get("tokens", ()))
        lines.append((name, row.get("architecture", ""), sizes, str(row.get("prompt", "")), *cells))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    right = sum(map(is_right, found["rows"].values()))
    shown += ["", f"{right} of {len(found['rows'])} pairs right in all columns."]
    shown += [f"({number}) {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join(shown) + "\n"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PAIRS)}; all without any")
    parser.add_argument("--tokens", type=int, default=24, help="of a reply")
    parser.add_argument("--again", action="store_true", help="measure rows that are there again")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="real_pairs", help="of the result file")
    arguments = parser.parse_args(words)
    if unknown := set(arguments.names) - PAIRS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PAIRS)}")
    folder = arguments.folder.resolve()
    if arguments.one:
        sys.stdout.write(json.dumps(measured(folder, arguments.names[0], arguments.tokens)) + "\n")
        return
    try:
        rows: dict[str, Any] = report.read(MODULE, arguments.name)["rows"]
    except FileNotFoundError:
        rows = {}
    for name in arguments.names or PAIRS:
        if name in rows and not arguments.again:
            continue
        rows[name] = in_child(folder, name, arguments.tokens)
        sys.stdout.write(f"{name}: {'right' if is_right(rows[name]) else rows[name]}\n")
        sys.stdout.flush()
        ordered = {one: rows[one] for one in PAIRS if one in rows}
        report.write(arguments.name, MODULE, {"rows": ordered}, 0)
    found = report.read(MODULE, arguments.name)
    sys.stdout.write(table(found))
    sys.exit(0 if all(map(is_right, found["rows"].values())) else 1)


if __name__ == "__main__":
    main()
