"""Draft for a verifier with another tokenizer, on real weights: whether the text stays, and what is accepted.

ASKED is Spec-Bench's file of questions, or a part of it. In each round four tokens are drafted, greedily, with
`--reproducible`. Columns: texts that are the verifier's own, drafted tokens that were accepted, and the mean acceptance
length.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import of_each, questions
from edgellm.engine.hardware import Hardware
from edgellm.llm import LLM
from edgellm.spec.params import ReplyOptions

VERIFIER, DRAFTS = "smollm2:135m", ("smollm2:draft", "gemma3-270m")
COUNTS = ("drafted", "accepted", "tokens", "rounds")


def table(figures: Mapping[str, Any]) -> str:
    """Return a line for each draft model."""
    lines = [f"{'drafts':16}{'equal':>10}{'accepted':>10}{'length':>8}"]
    for one in figures["rows"]:
        equal, accepted = f"{one['equal']} of {one['replies']}", one["accepted"] / one["drafted"]
        lines.append(f"{one['draft']:16}{equal:>10}{accepted:10.1%}{one['tokens'] / one['rounds']:8.2f}")
    return "\n".join(lines) + "\n"


def measure(
    asked: Annotated[Path, "Spec-Bench's questions, or a part of them"],
    per: Annotated[int, "questions of each category"] = 1,
    tokens: Annotated[int, "of a reply at most"] = 64,
) -> Iterator[Figures]:
    """Yield the figures after each draft model."""
    found = [question.text for question in of_each(questions(asked), per)]
    options = ReplyOptions(max_tokens=tokens, temperature=0.0, retrieval="off", gate="always", gamma=4)
    shared: dict[str, Any] = {"n_ctx": 4096, "history": False, "hardware": Hardware(reproducible=True)}
    rows: list[dict[str, Any]] = []
    for draft in DRAFTS:
        row: dict[str, Any] = {"draft": draft, "replies": len(found), "equal": 0} | dict.fromkeys(COUNTS, 0)
        with LLM.open(None, VERIFIER, **shared) as alone, LLM.open(draft, VERIFIER, **shared) as pair:
            for text in track(found, draft):
                own, reply = alone.reply(text, options), pair.reply(text, options)
                row["equal"] += [token.id for token in own] == [token.id for token in reply]
                for name in COUNTS:
                    row[name] += getattr(reply.summary, name)
        rows.append(row)
        yield {"rows": rows}
