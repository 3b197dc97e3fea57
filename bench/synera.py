"""Synera's evidence in one command: every benchmark behind a figure or a table of the paper.

    python -m bench.synera [PART ...] [--quick]          # or: edgellm bench synera
    python -m bench.synera --list

Each part prints a table, writes `bench/results/NAME.json` and, where matplotlib is there, draws `NAME.png`. `--quick`
takes few cases, to see that all works; what it writes goes to `quick-NAME`, and is no evidence.
"""

from __future__ import annotations

from bench import (
    bandwidth,
    compression,
    exits,
    first_verdict,
    gate_cost,
    guesses,
    importance,
    kill_verifier,
    many_devices,
    paths,
    scheduler_cost,
    stalls,
    suite,
    synera_quality,
)
from bench.suite import Part

PARTS = {
    "quality": Part(
        "bench.synera_quality",
        "quality of every gate at a budget (Table 4, Fig. 14)",
        ("--cases", "10", "--profiled", "20", "--budgets", "0.2"),
        lambda found: "\n".join(synera_quality.table(found, budget) for budget in found["budgets"]),
    ),
    "importance": Part(
        "bench.importance",
        "what attention tells of a chunk (4.2)",
        ("--prompts", "24"),
        importance.table,
    ),
    "gates": Part(
        "bench.gate_cost",
        "cost of a gate on the device (Table 5)",
        ("--repeats", "4"),
        lambda found: gate_cost.table(found["models"]),
    ),
    "stalls": Part(
        "bench.stalls",
        "time between tokens, hit rate and stall hidden (4.4)",
        ("--cases", "1"),
        lambda found: stalls.table(found["ways"]),
    ),
    "guesses": Part(
        "bench.guesses",
        "how often so many guesses have the right verdict among them (4.4)",
        ("--cases", "2", "--known", "30"),
        lambda found: guesses.table(found["rows"]),
    ),
    "bandwidth": Part(
        "bench.bandwidth",
        "time between tokens against bandwidth (Fig. 13)",
        ("--megabits", "1", "10"),
        lambda found: bandwidth.table(found["networks"]),
    ),
    "compression": Part(
        "bench.compression",
        "bytes of a verified chunk (4.2)",
        ("--cases", "4", "--chunks", "4"),
        lambda found: compression.table(found["requests"]),
    ),
    "devices": Part(
        "bench.many_devices",
        "verifier latency against request rate (Fig. 15)",
        ("--seconds", "3", "--repeats", "1", "--rounds", "3", "--rates", "0.5", "1.0"),
        many_devices.table,
    ),
    "first": Part(
        "bench.first_verdict",
        "the first verdict of a device that is alone with its verifier (4.5)",
        ("--models", "edgellm-verifier", "--repeats", "3"),
        lambda found: first_verdict.table(found["models"]),
    ),
    "scheduler": Part(
        "bench.scheduler_cost",
        "cost of scheduling (Fig. 18)",
        ("--rounds", "4", "--repeats", "1"),
        lambda found: scheduler_cost.table(found["costs"]),
    ),
    "exits": Part(
        "bench.exits",
        "sweep of the early exit's threshold (Fig. 17)",
        ("--cases", "4"),
        lambda found: exits.table(found["thresholds"]),
    ),
    "paths": Part(
        "bench.paths",
        "budget 1.0 is the verifier alone, on every way",
        ("--prompts", "16"),
        lambda found: paths.table(found["ways"]),
    ),
    "kills": Part(
        "bench.kill_verifier",
        "a verifier that dies or hangs in the middle of replies",
        ("5",),
        kill_verifier.table,
    ),
    "kills-budget": Part(
        "bench.kill_verifier",
        "the same at a budget, with parallel inference",
        ("5", "--budget", "0.3", "--parallel"),
        kill_verifier.table,
        ("200", "--budget", "0.3", "--parallel"),
        "kill_verifier_budget",
    ),
    "devices-kept": Part(
        "bench.many_devices",
        "the same where requests bring what was not checked",
        ("--kept", "--seconds", "3", "--repeats", "1", "--rounds", "3", "--rates", "0.5", "1.0"),
        many_devices.table,
        ("--kept",),
        "many_devices_kept",
    ),
}

if __name__ == "__main__":
    suite.main(PARTS, __doc__)
