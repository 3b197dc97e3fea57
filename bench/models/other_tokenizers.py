"""What a draft model is worth to a verifier with another tokenizer, by the trained weights of a made pair.

The pair's files are written once more with other tokenizers, and the same weights as far as tokens remain
(`testkit.retokenized`): tokens in another order, fewer merges, SentencePiece in place of byte-level BPE on either side,
and a verifier that has 1,000 of the tokens. Everything is verified, and greedy. Columns: texts that are those of the
verifier alone, drafted tokens that were accepted, and the mean acceptance length, in tokens for each verification, for
all held-out cases together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.synera.pair_quality import replies
from edgellm.llm import LLM
from models.case import Case
from models.pairs import PAIRS as MADE
from models.pairs import Pair
from testkit import retokenized
from testkit.questions import PairName
from testkit.retokenized import ONE_TOKENIZER, PAIRS

AS_IT_IS = "the same tokenizer"


def written(llm: LLM, cases: Sequence[Case]) -> tuple[list[str], dict[str, int]]:
    """Return the texts of greedy replies, and the counts of all of them together."""
    texts, counts = [], {"drafted": 0, "accepted": 0, "tokens": 0, "rounds": 0}
    for _, text, summary in replies(llm, cases):
        texts.append(text)
        for name in counts:
            counts[name] += getattr(summary, name)
    return texts, counts


def files(pair: Pair, name: str, folder: Path) -> tuple[Path, Path]:
    """Return the files of a draft model and a verifier with the tokenizers of this name."""
    found = []
    for part, change in zip(("draft", "verifier"), PAIRS.get(name, (None, None)), strict=True):
        path = pair.file(part)
        if change is not None:
            source, path = path, folder / f"{part}.gguf"
            retokenized.write(source, path, change)
        found.append(path)
    return found[0], found[1]


def row(pair: Pair, name: str, cases: Sequence[Case]) -> Figures:
    """Return the figures of the pair with the tokenizers of this name."""
    with tempfile.TemporaryDirectory() as folder:
        draft, verifier = files(pair, name, Path(folder))
        with LLM.open("none", verifier, history=False) as alone:
            wanted, _ = written(alone, cases)
        with LLM.open(draft, verifier, history=False) as llm:
            texts, counts = written(llm, cases)
    return {
        "tokenizers": name, "replies": len(cases), **counts,
        "equal": sum(one == other for one, other in zip(texts, wanted, strict=True)),
    }  # fmt: skip


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each pair of tokenizers."""
    lines = [f"{'draft model, or verifier':26}{'equal':>12}{'accepted':>10}{'length':>8}"]
    for one in found["rows"]:
        equal = f"{one['equal']} of {one['replies']}"
        accepted = f"{one['accepted'] / one['drafted']:.1%}" if one["drafted"] else "-"
        lines.append(f"{one['tokenizers']:26}{equal:>12}{accepted:>10}{one['tokens'] / one['rounds']:8.2f}")
    replies = found["rows"][0]["replies"]
    lines.append(f"{found['pair']} pair, {replies} held-out cases, greedy, everything verified")
    return "\n".join(lines) + "\n"


def measure(pair: PairName = "home", cases: Annotated[int, "of each family"] = 8) -> Figures:
    """Return a row for each pair of tokenizers."""
    made = MADE[pair]
    asked = [case for family in made.families for case in made.held_out(family, cases)]
    names = [AS_IT_IS, *list(PAIRS)[ONE_TOKENIZER:]]
    return {"pair": pair, "rows": [row(made, name, asked) for name in track(names, "tokenizers")]}
