"""Run every feature with every architecture, and 10,000 random rollbacks and branches with each.

Models are small files with random weights and the structure of their kind (`testkit/gguf/architectures.py`); the draft
model is the verifier with a noise of 12 %. Each architecture has a process of its own, so that one that llama.cpp
crashes on is a row that says so; one is measured for each core at a time. Rows that are in the result already are
kept, so that a run can be stopped and continued.

Columns: *alone*, the verifier without drafts and copies; *pair*, all drafts verified; *copies*, retrieval of the pair
and of the verifier alone; *budget* and *importance gate*, at 0.4: whether each token is the most probable one of the
model that its source names, and the reply after it equal; *early exit*, with all drafts verified; *cut into layers*,
two blocks of layers; *served*, the verifier behind a socket, with parallel inference. `equal` is the text that
llama.cpp writes one token at a time. *walk* is a random walk of decodes, rollbacks, branches, copies, rejected drafts
and batches of several sequences, through the contexts of a verifier, a served verifier and a draft model, with all
logits compared with those of a fresh context (`testkit/cache_walk.py`): operations, compared rows, and wrong states.

In the table, a share in the columns *budget* and *importance gate* is that of the tokens that were verified.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

from bench.harness.children import Crashed, in_child
from bench.harness.progress import track
from bench.harness.results import Figures, cores
from bench.harness.settings import Earlier
from bench.models.features import EQUAL, Pair, filled
from edgellm.engine import Model
from edgellm.errors import InvalidOption
from testkit import cache_walk
from testkit.gguf import architectures

NOISE = 0.12
N_CTX = 512
COLUMNS = ("alone", "pair", "copies", "budget", "importance gate", "early exit", "cut into layers", "served")


def row(name: str, operations: int, tokens: int) -> dict[str, Any]:
    """Return the row of an architecture, computed in this process."""
    began = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        verifier, draft = Path(folder) / "verifier.gguf", Path(folder) / "draft.gguf"
        architectures.write(name, verifier)
        architectures.write(name, draft, noise=NOISE)
        with ExitStack() as closing:
            cells = filled(Pair(draft, verifier, tokens=tokens, n_ctx=N_CTX, closing=closing).cells())
        with Model.load(verifier) as model:
            faults = sorted(model.faults)
            found = cache_walk.walk(model, operations)
    return {
        "kind": architectures.ARCHITECTURES[name].kind,
        "avoided": faults,
        "cells": cells,
        "walk": {
            "operations": dict(found.operations), "rows": found.rows, "other_batches": found.other_batches,
            "wrong": found.n_wrong, "examples": found.wrong,
        },
        "seconds": round(perf_counter() - began, 1),
    }  # fmt: skip


def is_right(row: Mapping[str, Any]) -> bool:
    """Return whether nothing in a row differs."""
    if "crash" in row or row["walk"]["wrong"]:
        return False
    return all(text.startswith((EQUAL, "right", "refused", "rounding")) for text in row["cells"].values())


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each architecture, the texts of refusals, and all that differs."""
    notes: list[str] = []
    heads = ("architecture", "kind", "alone", "pair", "copies", "budget", "importance", "exit", "cut", "served")
    rows_of_text = [(*heads, "walk", "wrong")]
    for name, row in found["rows"].items():
        if "crash" in row:
            rows_of_text.append((name, row["kind"], _short(f"crash: {row['crash']}", notes), *[""] * (len(heads) - 1)))
            continue
        shown = [_short(row["cells"][column], notes) for column in COLUMNS]
        walk = row["walk"]
        avoided = "".join(f" ({_note(f'avoided: {fault}', notes)})" for fault in row["avoided"])
        rows_of_text.append(
            (name + avoided, row["kind"], *shown, f"{sum(walk['operations'].values()):,}", f"{walk['wrong']}")
        )
    widths = [max(map(len, column)) for column in zip(*rows_of_text, strict=True)]
    lines = [
        "  ".join(f"{text:{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows_of_text
    ]
    rows = found["rows"].values()
    operations = sum(sum(row["walk"]["operations"].values()) for row in rows if "walk" in row)
    compared = sum(row["walk"]["rows"] for row in rows if "walk" in row)
    wrong = sum(row["walk"]["wrong"] for row in rows if "walk" in row)
    right = sum(map(is_right, rows))
    lines += ["", f"{right} of {len(rows)} architectures right in all columns."]
    lines += [f"{operations:,} operations, {compared:,} rows compared, {wrong} wrong."]
    lines += [f"({number}) {note}" for number, note in enumerate(notes, start=1)]
    return "\n".join(lines) + "\n"


def _short(text: str, notes: list[str]) -> str:
    """Return a cell's text; a reason becomes a numbered note."""
    kind, _, reason = text.partition(": ")
    if reason:
        return f"{kind} ({_note(reason, notes)})"
    return kind.removesuffix(" verified").replace("right, ", "")


def _note(reason: str, notes: list[str]) -> int:
    """Return the number of a note, which is added if it is new."""
    if reason not in notes:
        notes.append(reason)
    return notes.index(reason) + 1


def measure(
    earlier: Earlier,
    names: Annotated[Sequence[str], "none for all"] = (),
    operations: Annotated[int, "of the random walk"] = 10_000,
    tokens: Annotated[int, "of a reply"] = 40,
    again: Annotated[bool, "measure rows that are there again"] = False,
) -> Iterator[Figures]:
    """Yield the rows so far, after each architecture; one is measured for each core at a time."""
    known = architectures.ARCHITECTURES
    if unknown := set(names) - known.keys():
        raise InvalidOption(f"There is no architecture {', '.join(unknown)}.", f"Choose from {', '.join(known)}.")
    rows = dict(earlier.get("rows", {}))
    wanted = [name for name in names or known if again or name not in rows]
    with ThreadPoolExecutor(cores()) as pool:
        begun = {pool.submit(in_child, __name__, "row", name, operations, tokens): name for name in wanted}
        for done in track(as_completed(begun), "architectures", len(begun)):
            name = begun[done]
            try:
                rows[name] = done.result()
            except Crashed as crash:
                rows[name] = {"kind": known[name].kind, "crash": str(crash)}
            yield {"operations": operations, "rows": {one: rows[one] for one in known if one in rows}}
    yield {"operations": operations, "rows": rows}


def failures(found: Figures) -> list[str]:
    """Return the architectures of which something differs."""
    return [name for name, row in found["rows"].items() if not is_right(row)]
