"""CoordGen's evidence in one command: every benchmark behind a figure or a table of the paper.

    python -m bench.retrieval [PART ...] [--quick]          # or: edgellm bench retrieval
    python -m bench.retrieval --list

Each part prints a table, writes `bench/results/NAME.json` and, where matplotlib is there, draws `NAME.png`. `--quick`
takes few cases, to see that all works; what it writes goes to `quick-NAME`, and is no evidence.
"""

from __future__ import annotations

from bench import (
    heads,
    progressive,
    retrieval_acceptance,
    retrieval_cost,
    retrieval_hindsight,
    retrieval_link,
    retrieval_llama,
    retrieval_lossless,
    retrieval_speed,
    rows,
    suite,
)
from bench.suite import Part

PARTS = {
    "acceptance": Part(
        "bench.retrieval_acceptance",
        "tokens a verification brings, and what each technique adds (Table 4)",
        ("--cases", "6", "--models", "edgellm-verifier"),
        lambda found: retrieval_acceptance.table(found["models"]),
    ),
    "speed": Part(
        "bench.retrieval_speed",
        "decoding speed against plain decoding, PLD, SAM and an oracle (Table 3)",
        ("--cases", "4", "--models", "bundled", "--repeats", "1"),
        lambda found: retrieval_speed.table(found["models"]),
    ),
    "hindsight": Part(
        "bench.retrieval_hindsight",
        "ours, all of what was offered that stands, and an oracle",
        ("--cases", "3"),
        retrieval_hindsight.table,
    ),
    "llama": Part(
        "bench.retrieval_llama",
        "whole replies beside llama-cpp-python's Llama and its prompt lookup",
        ("--cases", "4", "--repeats", "1"),
        lambda found: retrieval_llama.table(found["tasks"]),
    ),
    "link": Part(
        "bench.retrieval_link",
        "copies and the small model where the verifier is across a network",
        ("--cases", "1", "--token-ms", "1", "--pass-ms", "1", "--round-trip-ms", "1"),
        lambda found: retrieval_link.table(found["tasks"]),
    ),
    "rows": Part(
        "bench.rows",
        "the time of one decode of so many rows, alone and filled up",
        ("--models", "edgellm-verifier", "--repeats", "2"),
        lambda found: rows.table(found["models"]),
    ),
    "heads": Part(
        "bench.heads",
        "the time of a pass up to the head, and with the heads of what is looked at",
        ("--shapes", "tiny-verifier", "--repeats", "2"),
        lambda found: heads.table(found["models"]),
    ),
    "lossless": Part(
        "bench.retrieval_lossless",
        "the text is the verifier's own, with every combination of sources",
        ("--rounds", "1"),
        retrieval_lossless.table,
    ),
    "cost": Part(
        "bench.retrieval_cost",
        "memory and time of indexing, drafting and calibration (4.3, 4.4)",
        ("--tokens", "5000", "--repeats", "1"),
        retrieval_cost.table,
    ),
    "progressive": Part(
        "bench.progressive",
        "progressive graph scheduling against the best plan there is (3.2)",
        ("--instances", "4"),
        progressive.table,
    ),
}

if __name__ == "__main__":
    suite.main(PARTS, __doc__)
