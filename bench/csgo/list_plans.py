"""Print the splits of a model over this home's devices, which are measured, and their predicted times, as JSON.

    python -m bench.csgo.list_plans MODEL --tokens 128

A program that `bench.csgo.cold_start` starts on the coordinator. Devices are measured again.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edgellm.coldstart.plan import PlanOption, plan
from edgellm.coldstart.problem import Home
from edgellm.engine import ModelFile
from edgellm.mesh.fleet_profiler import discover_workers, survey, timed_model
from edgellm.mesh.placement import model_costs
from edgellm.rpc.discovery.interfaces import chosen_hosts


def to_json(option: PlanOption) -> dict[str, Any]:
    split = ",".join(f"{stage.device}:{stage.layers}" for stage in option.stages)
    return {"split": split, "ttft_s": option.ttft_s, "stages": [stage.to_json() for stage in option.stages]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, required=True)
    args = parser.parse_args()
    file = ModelFile.open(args.model)
    measured = survey(discover_workers(chosen_hosts()), timed_model(file), remeasure=True)
    for name, error in measured.left_out:
        print(f"{name}: {error}", file=sys.stderr)
    found = plan(Home(measured.fleet().devices, model_costs(file), args.tokens, 1))
    devices = {
        name: {"rows": speed.figures.rows, "seconds": speed.figures.seconds, "disk": speed.figures.disk}
        for name, speed in measured.speeds.items()
    }
    lines = [{"to": name, **asdict(kept.line)} for name, kept in measured.lines.items()]
    named = {
        "planned": found.option, "best single": found.best_single, "even": found.even, "by strength": found.heuristic,
    }  # fmt: skip
    ways = {name: to_json(option) for name, option in named.items() if option is not None}
    print(json.dumps({"advice": found.advice, "devices": devices, "lines": lines, "ways": ways}))


if __name__ == "__main__":
    main()
