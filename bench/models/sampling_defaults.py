"""Compare greedy replies of a pair with replies that are sampled as its verifier wants.

    python -m bench.models.sampling_defaults VERIFIER.gguf DRAFT.gguf --prompts prompts.jsonl

`repeated`: the share of a reply's runs of eight tokens that it has had before; `in loops` are replies with more than
a quarter. `accepted` and `length`: of drafts of the draft model alone, in chunks of four. `same`: replies whose tokens
the verifier also writes without drafts, by the same seed. Each line of the prompts has `turns`, of which the first is
asked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import hardware
from bench.harness.report import write
from bench.harness.spec_bench import questions
from edgellm.cli.options.hardware import DRAFT
from edgellm.llm import LLM
from edgellm.spec.params import CHUNK, ReplyOptions
from edgellm.spec.types import Summary, Token

RUN = 8  # tokens of a run that counts as repeated


def repeated(ids: Sequence[int]) -> float:
    """Return the share of the runs of `RUN` tokens that are there before."""
    runs = [tuple(ids[at : at + RUN]) for at in range(len(ids) - RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def written(pair: LLM, prompt: str, options: ReplyOptions) -> tuple[list[int], Summary]:
    """Return the tokens of a reply and its summary."""
    reply = pair.reply(prompt, options)
    return [event.id for event in reply if isinstance(event, Token)], reply.summary


def measure(arguments: argparse.Namespace, prompts: Iterable[str]) -> list[dict[str, Any]]:
    """Return the figures of each reply."""
    own, own_draft = hardware.of(arguments), hardware.of(arguments, DRAFT)
    rows = []
    with (
        LLM.open(arguments.draft, arguments.verifier, history=False, hardware=own, draft_hardware=own_draft) as pair,
        LLM.open("none", arguments.verifier, history=False, hardware=own) as alone,
    ):
        rules: dict[str, float | None] = {"greedy": 0.0, "as the model wants": None}
        for seed, prompt in enumerate(prompts):
            for rule, temperature in rules.items():
                options = ReplyOptions(
                    max_tokens=arguments.tokens, temperature=temperature, seed=seed, gamma=CHUNK, retrieval="off"
                )
                ids, summary = written(pair, prompt, options)
                rows.append(
                    {
                        "rule": rule, "tokens": len(ids), "repeated": repeated(ids),
                        "accepted": summary.acceptance_rate, "length": summary.mean_acceptance_length,
                        "same": written(alone, prompt, options)[0] == ids,
                    }
                )  # fmt: skip
    return rows


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verifier", nargs="?", default="edgellm-verifier")
    parser.add_argument("draft", nargs="?", default="edgellm-draft")
    parser.add_argument("--prompts", type=Path, help="JSON lines; by default one question about the bundled home")
    parser.add_argument("--count", type=int, default=10, help="prompts, spread over the file")
    parser.add_argument("--tokens", type=int, default=192, help="of a reply at most")
    parser.add_argument("--name", default="sampling_defaults", help="of the result file")
    hardware.add_arguments(parser)
    arguments = parser.parse_args()
    prompts = ["When is the film night?"]
    if arguments.prompts is not None:
        found = questions(arguments.prompts)
        prompts = [question.text for question in found[:: max(1, len(found) // arguments.count)]]
    figures = {"replies": measure(arguments, prompts[: arguments.count])}
    path = write(arguments.name, "bench.models.sampling_defaults", figures)
    sys.stdout.write(f"{table(figures)}written: {path}\n")


if __name__ == "__main__":
    main()
