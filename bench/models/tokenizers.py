"""Run the vectors of llama.cpp's vocabularies through our tokenizer, and stream their texts token by token.

    python -m bench.models.tokenizers FOLDER

pip fetches the source of the installed llama-cpp-python into FOLDER, if it is not there. Its `models/` has vocabularies
of real models; beside most lie texts (`.inp`) and the ids that Hugging Face's tokenizers give them (`.out`).

Columns: tokens of the vocabulary; texts whose ids are those of the vectors; texts of which the streamed characters are
the text again, after the space that SentencePiece puts before it (WordPiece, BERT's, changes texts, and is not asked
for that); streams of random ids whose characters are those of all their bytes together, with U+FFFD for wrong ones; and
in how many of the tokens a character was left unfinished. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness.llama_source import source
from bench.harness.report import write
from edgellm.engine import Model
from edgellm.spec.stream import Utf8

_BETWEEN = "\n__ggml_vocab_test__\n"
_CHANGES_TEXTS = "bert"  # the tokenizer.ggml.model of WordPiece
_STREAMS, _LENGTH = 200, 50  # of random ids


def vectors(path: Path) -> list[tuple[str, list[int]]]:
    """Return the texts beside a vocabulary, and their ids; none without such files."""
    texts, ids = Path(f"{path}.inp"), Path(f"{path}.out")
    if not texts.is_file() or not ids.is_file():
        return []
    lines = ids.read_text(encoding="utf-8").split("\n")
    cases = zip_longest(texts.read_text(encoding="utf-8").split(_BETWEEN), lines, fillvalue="")
    return [(text, [int(one) for one in line.split()]) for text, line in cases if text or line]


def streamed(model: Model, ids: Sequence[int]) -> tuple[str, int]:
    """Return the characters that a stream of these tokens shows, and how many tokens end within a character."""
    decoder, shown, partial = Utf8(), "", 0
    for token in ids:
        shown += decoder.feed(model.piece(token))
        partial += decoder.has_partial
    return shown + decoder.end(), partial


def measured(path: Path) -> dict[str, Any]:
    """Return the row of a vocabulary."""
    rng = np.random.default_rng(0)
    with Model.load(path, text_only=True, probe=False) as model:
        changes = model.metadata.get("tokenizer.ggml.model") == _CHANGES_TEXTS
        cases = vectors(path)
        right = same = streams = partial = 0
        for text, wanted in cases:
            ids = model.tokenize(text).tolist()
            right += ids == wanted
            shown, unfinished = streamed(model, ids)
            same += changes or shown in (text, f" {text}")
            partial += unfinished
        for _ in range(_STREAMS):
            ids = rng.integers(0, model.n_vocab, _LENGTH).tolist()
            shown, unfinished = streamed(model, ids)
            streams += shown == b"".join(map(model.piece, ids)).decode("utf-8", "replace")
            partial += unfinished
        size = model.n_vocab
    return {
        "vocabulary": path.stem.removeprefix("ggml-vocab-"), "tokens": size, "cases": len(cases), "right": right,
        "same": None if changes else same, "streams": streams, "of": _STREAMS, "partial": partial,
    }  # fmt: skip


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether nothing differs."""
    same = row["same"] in (None, row["cases"])
    return bool(row["right"] == row["cases"] and same and row["streams"] == row["of"])


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each vocabulary."""
    lines = [f"{'vocabulary':<18}{'tokens':>8}{'ids':>12}{'texts':>12}{'random':>13}{'unfinished':>12}"]
    for row in found["rows"]:
        ids = f"{row['right']} of {row['cases']}" if row["cases"] else "no vectors"
        same = "" if row["same"] is None or not row["cases"] else f"{row['same']} of {row['cases']}"
        streams = f"{row['streams']} of {row['of']}"
        lines.append(f"{row['vocabulary']:<18}{row['tokens']:>8,}{ids:>12}{same:>12}{streams:>13}{row['partial']:>12,}")
    with_vectors = [row for row in found["rows"] if row["cases"]]
    passed = sum(map(is_right, with_vectors))
    cases = sum(row["cases"] for row in with_vectors)
    lines += ["", f"{passed} of {len(with_vectors)} vocabularies with vectors pass all of theirs, {cases} in all."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("llama.cpp"))
    parser.add_argument("--name", default="tokenizers", help="of the result file")
    arguments = parser.parse_args()
    paths = sorted((source(arguments.folder) / "models").glob("*.gguf"))
    found = {"rows": [measured(path) for path in paths]}
    sys.stdout.write(table(found))
    write(arguments.name, "bench.models.tokenizers", found, 0)
    sys.exit(0 if all(map(is_right, found["rows"])) else 1)


if __name__ == "__main__":
    main()
