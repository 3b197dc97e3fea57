"""The evidence for trust in one command: bad input, attacks, a link that goes wrong, half an hour of many devices.

    python -m bench.reliability [PART ...] [--quick]          # or: edgellm bench reliability
    python -m bench.reliability --list

Each part prints a table and writes `bench/results/NAME.json`. `--quick` takes few cases, to see that all works; what it
writes goes to `quick-NAME`, and is no evidence.
"""

from __future__ import annotations

from bench import faults, fuzz, http_load, load, suite
from bench.attack import __main__ as attack
from bench.suite import Part

PARTS = {
    "fuzz": Part(
        "bench.fuzz",
        "a million bad inputs for everything that reads what others write",
        ("--inputs", "20000", "--headers", "200"),
        lambda found: f"{fuzz.table(found)}\nwhat refused them:\n{fuzz.errors(found)}",
    ),
    "attack": Part(
        "bench.attack",
        "attacks from outside, by devices, clients, files and texts",
        ("--quick",),
        attack.table,
    ),
    "faults": Part(
        "bench.faults",
        "a thousand replies over a link that goes wrong",
        ("20",),
        faults.table,
    ),
    "load": Part(
        "bench.load",
        "64 devices that come and go for half an hour",
        ("--minutes", "2"),
        load.table,
    ),
    "http": Part(
        "bench.http_load",
        "clients at the HTTP door for half an hour",
        ("--minutes", "2"),
        http_load.table,
    ),
}

if __name__ == "__main__":
    suite.main(PARTS, __doc__)
