"""What a draft model is worth to a verifier with another tokenizer, by the trained weights of a made pair.

    python -m bench.models.other_tokenizers [--pair home] [--cases 8] [--served]

The pair's files are written once more with other tokenizers, and the same weights as far as tokens remain
(`testkit.retokenized`): tokens in another order, fewer merges, SentencePiece in place of byte-level BPE on either side,
and a verifier that has 1,000 of the tokens. Everything is verified, and greedy. Columns: texts that are those of the
verifier alone, drafted tokens that were accepted, and the mean acceptance length, in tokens for each verification, for
all held-out cases together. With `--served` the verifier is in a process of its own, and sends its tokenizer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from bench.harness.report import write
from bench.synera.pair_quality import replies
from edgellm.engine import Model
from edgellm.llm import LLM
from models.case import Case
from models.pairs import PAIRS as MADE
from models.pairs import Pair
from testkit import retokenized
from testkit.processes.verifier import VerifierProcess
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


@contextmanager
def address_of(verifier: Path) -> Iterator[str]:
    """Serve a verifier in a process of its own; yield its address."""
    with closing(VerifierProcess(verifier)) as process, Model.load(verifier, text_only=True) as text:
        process.connect(text).close()
        yield f"127.0.0.1:{process.port}"


def row(pair: Pair, name: str, cases: Sequence[Case], *, served: bool = False) -> dict[str, Any]:
    """Return the figures of the pair with the tokenizers of this name; `served`: with the verifier in another
    process."""
    with tempfile.TemporaryDirectory() as folder:
        draft, verifier = files(pair, name, Path(folder))
        with LLM.open("none", verifier, history=False) as alone:
            wanted, _ = written(alone, cases)
        with (
            address_of(verifier) if served else nullcontext(verifier) as where,
            LLM.open(draft, where, history=False) as llm,
        ):
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
    where = ", by a verifier in another process" if found.get("served") else ""
    replies = found["rows"][0]["replies"]
    lines.append(f"{found['pair']} pair, {replies} held-out cases, greedy, everything verified{where}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=MADE, default="home")
    parser.add_argument("--cases", type=int, default=8, help="of each family")
    parser.add_argument("--served", action="store_true", help="with the verifier in a process of its own")
    parser.add_argument("--name", default="other_tokenizers", help="of the result file")
    arguments = parser.parse_args()
    pair = MADE[arguments.pair]
    cases = [case for family in pair.families for case in pair.held_out(family, arguments.cases)]
    names = [AS_IT_IS, *list(PAIRS)[ONE_TOKENIZER:]]
    rows = [row(pair, name, cases, served=arguments.served) for name in names]
    found = {"pair": arguments.pair, "rows": rows, **({"served": True} if arguments.served else {})}
    path = write(arguments.name, "bench.models.other_tokenizers", found)
    sys.stdout.write(f"{table(found)}written: {path}\n")


if __name__ == "__main__":
    main()
