"""Measure what tokens of the context are worth in sampled replies at a budget (`spec.drafters.model`).

    python -m bench.synera.sampled_lookup [--pair home|code] [--cases 12] [--budget 0.2] [--temperatures 0 0.8]

Each held-out question is answered with context lookup, where the draft model's doubtful tokens give way to the
context's, and without. Columns: the mean score of each, in percent, with the standard error; and the mean of the paired
differences with its 95 % half-width.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bench.harness.report import write
from edgellm.llm import LLM
from models.home.corpus import HELD_OUT_SEED
from testkit.questions import answered, parsed_with_pair, questions, reply_with


def row(temperature: float, scores: Mapping[bool, Sequence[float]]) -> dict[str, Any]:
    """Return the figures of a temperature from the replies with and without lookup."""
    with_lookup, without = (np.array(scores[lookup]) for lookup in (True, False))
    apart, n = with_lookup - without, len(with_lookup)
    return {
        "temperature": temperature, "replies": n, "with": float(with_lookup.mean()), "without": float(without.mean()),
        "error": [float(one.std(ddof=1) / np.sqrt(n)) for one in (with_lookup, without)],
        "gain": float(apart.mean()), "gain_95": float(1.96 * apart.std(ddof=1) / np.sqrt(n)),
    }  # fmt: skip


def table(results: Mapping[str, Any]) -> str:
    """Return a line for each temperature."""
    lines = [f"{'T':>4}{'replies':>9}{'with lookup':>16}{'without':>16}{'gain':>16}"]
    for one in results["rows"]:
        with_lookup, without = one["error"]
        lines.append(
            f"{one['temperature']:4}{one['replies']:9}{one['with']:10.1f} ±{with_lookup:4.1f}{one['without']:10.1f}"
            f" ±{without:4.1f}{one['gain']:+10.1f} ±{one['gain_95']:4.1f}"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=12, help="of each family")
    parser.add_argument("--budget", type=float, default=0.2)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--name", default="sampled_lookup", help="of the result file")
    arguments = parsed_with_pair(parser)
    cases, rows = questions(arguments.cases, pair=arguments.pair), []
    for temperature in arguments.temperatures:
        scores = {}
        for lookup in (True, False):
            options = {"budget": arguments.budget, "temperature": temperature, "context_lookup": lookup}
            with LLM.open(arguments.draft, arguments.verifier, profile=arguments.profile, history=False) as pair:
                scores[lookup] = answered(cases, reply_with(pair, **options)).scores
        rows.append(row(temperature, scores))
    figures = {"pair": arguments.pair, "budget": arguments.budget, "rows": rows}
    print(table(figures), end="")
    print(f"written: {write(arguments.name, 'bench.synera.sampled_lookup', figures, HELD_OUT_SEED)}")


if __name__ == "__main__":
    main()
