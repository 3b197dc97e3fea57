"""Compare greedy replies of a pair with replies that are sampled as its verifier wants.

`repeated`: the share of a reply's runs of eight tokens that it has had before; `in loops` are replies with more than
a quarter. `accepted` and `length`: of drafts of the draft model alone, in chunks of four. `same`: replies whose tokens
the verifier also writes without drafts, by the same seed. Each line of the prompts has `turns`, of which the first is
asked.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import questions
from edgellm.cli.options import DRAFT, VERIFIER, HardwareOptions
from edgellm.llm import LLM
from edgellm.spec.params import CHUNK, ReplyOptions
from edgellm.spec.stats import Summary
from edgellm.spec.types import Token

RUN = 8  # tokens of a run that counts as repeated


def repeated(ids: Sequence[int]) -> float:
    """Return the share of the runs of `RUN` tokens that are there before."""
    runs = [tuple(ids[at : at + RUN]) for at in range(len(ids) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def written(pair: LLM, prompt: str, options: ReplyOptions) -> tuple[list[int], Summary]:
    """Return the tokens of a reply and its summary."""
    reply = pair.reply(prompt, options)
    return [event.id for event in reply if isinstance(event, Token)], reply.summary


def table(figures: Mapping[str, Any]) -> str:
    """Return the means of each rule."""
    lines = [f"{'':20}  tokens  repeated  in loops  accepted  length      same\n"]
    for rule in dict.fromkeys(row["rule"] for row in figures["replies"]):
        rows = [row for row in figures["replies"] if row["rule"] == rule]
        mean = {
            name: statistics.mean(row[name] for row in rows if row[name] is not None)
            for name in ("tokens", "repeated", "accepted", "length")
        }
        loops, same = sum(row["repeated"] > 0.25 for row in rows), sum(row["same"] for row in rows)
        lines.append(
            f"{rule:20}{mean['tokens']:8.0f}{mean['repeated']:10.2f}{loops:6} of {len(rows)}{mean['accepted']:10.2f}"
            f"{mean['length']:8.2f}{same:5} of {len(rows)}\n"
        )
    return "".join(lines)


def measure(
    hardware: HardwareOptions,
    verifier: str = "edgellm-verifier",
    draft: str = "edgellm-draft",
    asked: Annotated[Path | None, "JSON lines; without them one question about the bundled home"] = None,
    count: Annotated[int, "prompts, spread over the file"] = 10,
    tokens: Annotated[int, "of a reply at most"] = 192,
) -> Figures:
    """Return the figures of each reply."""
    prompts = ["When is the film night?"]
    if asked is not None:
        found = questions(asked)
        prompts = [question.text for question in found[:: max(1, len(found) // count)]][:count]
    own, own_draft = hardware.of(VERIFIER), hardware.of(DRAFT)
    rows = []
    with (
        LLM.open(draft, verifier, history=False, hardware=own, draft_hardware=own_draft) as pair,
        LLM.open("none", verifier, history=False, hardware=own) as alone,
    ):
        rules: dict[str, float | None] = {"greedy": 0.0, "as the model wants": None}
        for seed, prompt in enumerate(track(prompts, "prompts")):
            for rule, temperature in rules.items():
                options = ReplyOptions(
                    max_tokens=tokens, temperature=temperature, seed=seed, gamma=CHUNK, retrieval="off", gate="always"
                )
                ids, summary = written(pair, prompt, options)
                rows.append({
                    "rule": rule, "tokens": len(ids), "repeated": repeated(ids),
                    "accepted": summary.acceptance_rate, "length": summary.mean_acceptance_length,
                    "same": written(alone, prompt, options)[0] == ids,
                })  # fmt: skip
    return {"replies": rows}
