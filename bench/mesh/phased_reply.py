"""Plan a reply in phases over this home's devices, or write one; a program that `bench.mesh.phases` starts.

    python -m bench.mesh.phased_reply MODEL plan --tokens 64 --lengths 16 64 256
    python -m bench.mesh.phased_reply MODEL write --tokens 64 --length 256 --split A --then B [--wait] [--send]

`plan` measures the devices again. It prints as JSON the splits that stay wide, are narrow from the start and are the
best single device, with the predicted seconds to their last tokens, the phases for every length, and the move of the
longest one by CoordGen's synchronous and progressive schedules. `write` opens the model and prints the seconds to every
token, the tokens, and the moves; with `--wait` nothing is written while a placement loads (the synchronous schedule),
with `--send` it is sent the keys and values.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np

from bench.mesh.plain_rpc import prompt_ids
from edgellm.coldstart.home import best_single
from edgellm.coldstart.phase_schedules import progressive, synchronous
from edgellm.coldstart.phases import WRITING, PhasedReply, PhaseProblem, plan_phases, simulate
from edgellm.coldstart.plan import solve
from edgellm.coldstart.problem import Cut
from edgellm.engine import ModelFile
from edgellm.layer_range import LayerRange
from edgellm.llm.home import Workload
from edgellm.llm.mesh_llm import MeshOptions, open_mesh
from edgellm.mesh.home_workers import discover_workers, measure_workers
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk

CONTEXT = 1024


def split_of(cut: Cut, names: list[str]) -> str:
    """Return a placement in the form of `--split`."""
    parts, first = [], 0
    for device, count in cut:
        parts.append(f"{names[device]}:{LayerRange(first, first + count)}")
        first += count
    return ",".join(parts)


def described(reply: PhasedReply, names: list[str], lengths: list[int]) -> dict[str, Any]:
    """Return a reply's splits, and the predicted seconds to its last token for the lengths."""
    return {
        "split": split_of(reply.start, names),
        "then": [split_of(move.cut, names) for move in reply.made],
        "sends": any(move.cache == "sent" for move in reply.made),
        "after_tokens": [move.token for move in reply.made],
        "seconds": {str(tokens): reply.at(tokens) for tokens in lengths},
    }


def planned(model: Path, tokens: int, lengths: list[int]) -> dict[str, Any]:
    """Measure the devices and return the plans."""
    file = ModelFile.open(model)
    survey = measure_workers(file, discover_workers(chosen_hosts(())), True, lambda _who, _what: None)
    for name, error in survey.left_out:
        print(f"{name}: {error}", file=sys.stderr)
    found: dict[str, Any] = {"phases": {}, "devices": {}}
    for name, speed in survey.speeds.items():
        found["devices"][name] = {"seconds": speed.figures.seconds, "disk": speed.figures.disk}
    for length in lengths:
        home = Workload(tokens, length, context=CONTEXT).home(file, survey.fleet())
        problem, began = PhaseProblem(home, sends_caches=True), perf_counter()
        task = problem.task
        cuts = [solve(task, further) for further in (0, home.further, WRITING)]
        if None in cuts:
            sys.exit("no placement fits the devices")
        wide, reply, narrow = (one.cut for one in cuts if one is not None)
        single = best_single(task)
        starts = [reply, wide, *([single] if single else [])]
        starts.sort(key=lambda cut: simulate(problem, cut).seconds)
        plan = plan_phases(problem, starts)
        shown = described(plan.reply, home.names, [length])
        found["phases"][str(length)] = shown | {"planner_s": perf_counter() - began}
        rivals = {"stay wide": wide, "narrow from the start": narrow} | ({"best single": single} if single else {})
        found["rivals"] = {name: described(simulate(problem, cut), home.names, lengths) for name, cut in rivals.items()}
        if plan.reply.made:
            ends = plan.reply.start, plan.reply.made[-1].cut
            schedules = {"synchronous": synchronous(problem, *ends), "progressive": progressive(problem, *ends)}
            found["schedules"] = {name: described(one, home.names, lengths) for name, one in schedules.items()}
    return found


def written(
    model: Path, tokens: int, length: int, split: str, following: list[str], *, wait: bool, send: bool
) -> dict[str, Any]:
    """Write one reply, cold, and return its times. `wait` for every placement that takes over, and `send` it caches."""
    began = perf_counter()
    options = MeshOptions(split, context=CONTEXT, sessions=1, wide=True, following=tuple(following), sends_caches=send)
    with open_mesh(ModelFile.open(model), options, history=False) as opened:
        session, text = opened.verifier.open(GenerationState()), np.array(prompt_ids(tokens), np.int32)
        times, mesh = list[float](), opened.verifier.mesh
        for _ in range(length):
            text = np.append(text, session.submit(text, Chunk()).result().tokens).astype(np.int32)
            times.append(perf_counter() - opened.began)
            while wait and len(mesh.take_overs) < len(following) and ((one := mesh.coming()) is None or one.busy):
                sleep(0.002)
        session.close()
        moves = [
            {"after_token": one.tokens - tokens, "loaded_s": one.loaded - opened.began,
             "ready_s": one.ready - opened.began, "at_s": one.at - opened.began}
            for one in mesh.take_overs
        ]  # fmt: skip
        return {
            "seconds": times, "tokens": text[tokens:].tolist(), "moves": moves, "recoveries": mesh.recoveries,
            "opened_s": opened.began - began,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("what", choices=("plan", "write"))
    parser.add_argument("--tokens", type=int, required=True, help="of the prompt")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64])
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--split", default="")
    parser.add_argument("--then", nargs="*", default=[])
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--send", action="store_true")
    args = parser.parse_args()
    if args.what == "plan":
        found = planned(args.model, args.tokens, args.lengths)
    else:
        found = written(args.model, args.tokens, args.length, args.split, args.then, wait=args.wait, send=args.send)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
