"""Compare the measurements of a home of throttled machines with the limits that were set.

    python -m bench.mesh.home_profile [--layers 8]

Real processes in namespaces (`testkit.network.home`; Linux, as root): the laptop plans for a model of the 0.5B shape,
for which every device measures itself and its lines. Then it deploys most of the layers to the other two, then a split
that needs one layer more. A line for each device has the measured speed, disk and lines; below come the plan's advice
and the transfers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.harness import report
from testkit.gguf.random_model import SHAPES, write
from testkit.network.home import Spec, home, why_not

SPECS = (
    Spec("laptop", up=200, down=200, disk=150, cpu=0.5),
    Spec("desk", up=160, down=160, disk=300, cpu=1.0),
    Spec("phone", up=40, down=80, disk=60, cpu=0.3),
)


def row(spec: Spec, found: dict[str, Any], laptop: Spec) -> str:
    speed, line = found["speed"], found["line"]
    lines = "" if line is None else (
        f"  line {line['up_mbps']:>6.1f} up {line['down_mbps']:>6.1f} down Mbit/s, {line['round_trip_ms']:.1f} ms"
        f" (given {min(laptop.up, spec.down):g} and {min(spec.up, laptop.down):g})"
    )  # fmt: skip
    return (
        f"{spec.name:<7} cpu {spec.cpu:g}: {max(speed['gflops']):>6.1f} GFLOP/s, fit within {speed['fit_worst']:.0%}  "
        f"disk {speed['disk_mb_s']:>6.1f} MB/s (given {spec.disk:g}){lines}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="home_profile", help="of the result file")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no home can be made here: {reason}")
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        model = str(folder / "model.gguf")
        write(Path(model), replace(SHAPES["qwen2.5-0.5b"], n_layer=args.layers, n_vocab=8192), "Q4_0", args.seed)
        machines = running.enter_context(home(SPECS, folder))
        for machine in machines[1:]:
            running.enter_context(machine.worker())
        laptop = machines[0]
        plan = laptop.json("mesh", "plan", model, "--tokens-in", "256")
        peers = laptop.json("mesh", "peers")
        n = args.layers
        splits = (f"desk:1-{n - 2},phone:{n - 1}-{n}", f"desk:1-{n - 3},phone:{n - 2}-{n}")
        moved = [laptop.json("mesh", "deploy", model, "--split", split) for split in splits]
    figures = {"given": [asdict(spec) for spec in SPECS], "measured": peers, "plan": plan, "moved": moved}
    print(table(figures), end="")
    print(f"written: {report.write(args.name, 'bench.mesh.home_profile', figures, args.seed)}")


def table(found: dict[str, Any]) -> str:
    """Return a line for each device, the plan's advice, and a line for each transfer of layers."""
    given = [Spec(**one) for one in found["given"]]
    lines = [row(spec, measured, given[0]) for spec, measured in zip(given, found["measured"], strict=True)]
    lines.append(found["plan"]["advice"])
    lines += [
        f"{one['device']} {one['sent'] / 1e6:.1f} MB sent at {8e-6 * one['sent'] / one['seconds']:.1f} Mbit/s,"
        f" {one['error'] or 'whole'}"
        for moved in found["moved"]
        for one in moved
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
