"""CSGO's evidence in one command: every benchmark behind the planner of cold starts.

    python -m bench.coldstart [PART ...] [--quick]          # or: edgellm bench coldstart
    python -m bench.coldstart --list

Each part prints a table, writes `bench/results/NAME.json` and, where matplotlib is there, draws `NAME.png`. `--quick`
takes few cases, to see that all works; what it writes goes to `quick-NAME`, and is no evidence.
"""

from __future__ import annotations

from bench import cold_home, coldstart_exact, coldstart_paper, coldstart_speed, suite
from bench.suite import Part

PARTS = {
    "paper": Part(
        "bench.coldstart_paper",
        "seconds to the first token in the paper's setting (Table 1, Figures 3 to 5)",
        (),
        coldstart_paper.table,
    ),
    "exact": Part(
        "bench.coldstart_exact",
        "the fast planner against Algorithm 1, and what planning gains, on random fleets",
        ("--instances", "5"),
        coldstart_exact.table,
    ),
    "speed": Part(
        "bench.coldstart_speed",
        "the planner's time against devices and layers, on random fleets",
        ("--instances", "1", "--limit", "0.5"),
        coldstart_speed.table,
    ),
    "home": Part(
        "bench.cold_home",
        "cold starts in homes of throttled machines (Linux, as root): the plan beside every other way",
        ("--fleets", "1", "--layers", "4"),
        cold_home.table,
    ),
    "home-wide": Part(
        "bench.cold_home",
        "the same with layers so large that llama.cpp's RPC server keeps them",
        ("--fleets", "1", "--layers", "2", "--shape", "qwen2.5-3b"),
        cold_home.table,
        full=("--fleets", "2", "--layers", "5", "--shape", "qwen2.5-3b", "--words", "20"),
        result="cold_home_wide",
    ),
}

if __name__ == "__main__":
    suite.main(PARTS, __doc__)
