"""Measure cold replies in phases in homes of throttled machines, beside replies that stay where they begin.

    python -m bench.mesh.phases [--homes 20] [--lengths 16 64 256] [--disk 5] [--minutes 60] [--seed 0]

Homes are drawn as for `bench.csgo.cold_start`, with disks DISK times as fast: else a layer loads as long as a hundred
tokens take, which is slower than what people have. In each, the laptop measures the devices and plans replies of
LENGTHS tokens. Then it writes them cold, one after another: the split with the earliest first token, which stays; the
one that writes soonest, from the start; the best single device; and the planned phases, unless they stay where they
begin. Every machine has the whole model on its disk, already cut. The time counts from when the devices begin to load.
In homes with a move, it is also made by CoordGen's synchronous and progressive schedules, in replies of the greatest
length.

Columns: devices; for every length, the seconds to the last token of the planned reply with the prediction in brackets,
of staying wide, of narrow from the start and of the best single device; and the planned splits. Texts are compared with
that of the uncut model. Where layers are cut decides the last bits of a sum, and random weights often make two tokens
nearly equally good; so for a text that differs it is said by how much each of its tokens is worse, at the most, than
the uncut model's best after the same words. Linux, as root.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.csgo.cold_start import MODEL, fleet, plans, prepare, worker
from bench.harness import report
from bench.harness.statistics import spread
from bench.mesh.plain_rpc import prompt_ids
from edgellm.engine import Context, ContextSpec, Model
from edgellm.layer_range import read_split
from testkit.gguf.random_model import SHAPES, write
from testkit.network.home import Spec, Throttled, home, why_not

PROGRAM = "bench.mesh.phased_reply"
RIVALS = ("stay wide", "narrow from the start", "best single")


class Uncut:
    """The uncut model, its `text`, and the `spread` of its logits."""

    def __init__(self, model: Path, tokens: int, length: int) -> None:
        self._prompt, self._worst = np.array(prompt_ids(tokens), np.int32), dict[tuple[int, ...], float]()
        self._whole = Model.load(model)
        self._context = Context(self._whole, ContextSpec(n_ctx=tokens + length + 1, n_batch=tokens + length, threads=1))
        self.text, ids = list[int](), self._prompt
        for _ in range(length):
            self.text.append(int((logits := self._context.decode(ids)[0]).argmax()))
            ids = np.array(self.text[-1:], dtype=np.int32)
        self.spread = float(logits.std())

    def worst(self, text: Sequence[int]) -> float:
        """Return how much lower than the best logit that of a token is at the most, each after those before it."""
        if list(text) == self.text:
            return 0.0
        if (known := self._worst.get(tuple(text))) is None:
            self._context.rollback(0)
            ids = np.concatenate((self._prompt, np.array(text, np.int32)))[:-1]
            logits = self._context.decode(ids, outputs=len(text))
            known = float((logits.max(axis=1) - logits[np.arange(len(text)), list(text)]).max())
            self._worst[tuple(text)] = known
        return known

    def close(self) -> None:
        self._context.close()
        self._whole.close()


def reply(
    machines: Sequence[Throttled], one: dict[str, Any], tokens: int, length: int, *, wait: bool = False
) -> dict[str, Any]:
    """Write one reply, cold. `wait` for every placement that takes over."""
    laptop, *others = machines
    split, following = one["split"], one["then"]
    names = {share.name for part in (split, *following) for share in read_split(part)}
    with ExitStack() as running:
        for other in others:
            if other.spec.name in names:
                running.enter_context(worker(other, "-m", str(other.home / MODEL)))
        for machine in machines:
            machine.forget()
        command = [str(laptop.home / MODEL), "write", "--tokens", str(tokens), "--length", str(length)]
        command += ["--split", split, *(("--then", *following) if following else ())]
        command += ["--wait"] * wait + ["--send"] * one["sends"]
        out, err = laptop.start(*command, module=PROGRAM).communicate(timeout=600)
    if not out.strip():
        sys.exit(f"{split}, then {' and '.join(following) or 'no other'}, did not run:\n{err}")
    return dict(json.loads(out.splitlines()[-1]))


def one_home(specs: Sequence[Spec], folder: Path, model: Path, tokens: int, lengths: Sequence[int]) -> Any:
    """Plan and measure in one home."""
    with home(specs, folder) as machines:
        words = ("plan", "--tokens", str(tokens), "--lengths", *map(str, lengths))
        planned = plans(machines, model, PROGRAM, *words)
        by_schedule = planned.get("schedules", {})
        asked = [*planned["rivals"].values(), *planned["phases"].values(), *by_schedule.values()]
        prepare(machines, [split for one in asked for split in (one["split"], *one["then"])])
        measured: dict[str, Any] = {}
        for one in asked:
            waits = one is by_schedule.get("synchronous")
            if (key := way(one, waits=waits)) not in measured:
                measured[key] = reply(machines, one, tokens, max(lengths), wait=waits)
        return {"specs": [asdict(spec) for spec in specs], "planned": planned, "measured": measured}


def way(one: dict[str, Any], *, waits: bool = False) -> str:
    """Return the splits of a reply, one after the other, as text."""
    return f"{' waits' * waits}{' sends' * one['sends']} > ".join((one["split"], *one["then"]))


def took(found: dict[str, Any], one: dict[str, Any], length: int, *, waits: bool = False) -> float:
    """Return the measured seconds to a reply's token of this number."""
    return float(found["measured"][way(one, waits=waits)]["seconds"][length - 1])


def row(found: dict[str, Any], lengths: Sequence[int]) -> list[str]:
    """Return the cells of a home."""
    rivals, words = found["planned"]["rivals"], [str(len(found["specs"]))]
    for length in lengths:
        one = found["planned"]["phases"][str(length)]
        words.append(f"{took(found, one, length):.2f} ({one['seconds'][str(length)]:.2f})")
        words += [f"{took(found, rivals[name], length):.2f}" if name in rivals else "" for name in RIVALS]
    return [*words, "; ".join(dict.fromkeys(way(one) for one in found["planned"]["phases"].values()))]


def table(found: dict[str, Any]) -> str:
    """Return a line for each home, and a summary."""
    lengths = found["lengths"]
    head = ["devices"]
    for length in lengths:
        head += [f"{length} TOKENS", "WIDE", "NARROW", "SINGLE"]
    rows = [[*head, "PLAN"], *(row(one, lengths) for one in found["each"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in rows]
    lines.append(
        f"seconds from cold to the last token, measured (predicted): prompts of {found['tokens']} tokens,"
        f" {found['shape']} with {found['layers']} layers"
    )
    for length in lengths:
        some = found["of_best"][str(length)]
        lines.append(
            f"{length} tokens: {some['median']:.0%} of the best of the three in the median, {some['min']:.0%} to"
            f" {some['max']:.0%}; at most 2% behind it in {found['not_behind'][str(length)]} of {found['homes']} homes;"
            f" phases in {found['moved'][str(length)]}"
        )
    for name, some in found["of_schedule"].items():
        lines.append(
            f"{max(lengths)} tokens with a move: {some['median']:.0%} of the {name} schedule in the median,"
            f" {some['min']:.0%} to {some['max']:.0%}"
        )
    off = found["prediction"]
    lines.append(
        f"predicted within 15%: {found['within_15']:.0%}; {off['min']:+.0%} to {off['max']:+.0%}, in the median"
        f" {off['median']:+.0%}"
    )
    lines.append(
        f"text of the uncut model: {found['same_text']} of {found['replies']} replies; tokens of the others are up to"
        f" {found['worst']:.2f} below its best, whose logits have a standard deviation of {found['logits']:.2f}"
    )
    return "\n".join(lines)


def figures(homes: Sequence[dict[str, Any]], lengths: Sequence[int]) -> dict[str, Any]:
    """Return over all homes how the planned replies compare with the best of the three, and the plans' errors."""
    of_best: dict[str, Any] = {}
    off = []
    for length in lengths:
        ratios = []
        for found in homes:
            one = found["planned"]["phases"][str(length)]
            best = min(took(found, rival, length) for rival in found["planned"]["rivals"].values())
            ratios.append(took(found, one, length) / best)
            off.append(one["seconds"][str(length)] / took(found, one, length) - 1.0)
        of_best[str(length)] = ratios
    of_schedule: dict[str, list[float]] = {}
    longest = max(lengths)
    for found in homes:
        mine = took(found, found["planned"]["phases"][str(longest)], longest)
        for name, one in found["planned"].get("schedules", {}).items():
            seconds = took(found, one, longest, waits=name == "synchronous")
            of_schedule.setdefault(name, []).append(mine / seconds)
    measured = [run for found in homes for run in found["measured"].values()]
    return {
        "homes": len(homes), "lengths": list(lengths), "replies": len(measured),
        "of_best": {length: spread(ratios) for length, ratios in of_best.items()},
        "not_behind": {length: sum(ratio <= 1.02 for ratio in ratios) for length, ratios in of_best.items()},
        "moved": {str(length): sum(bool(found["planned"]["phases"][str(length)]["then"]) for found in homes)
                  for length in lengths},
        "median_of_best": {length: statistics.median(ratios) for length, ratios in of_best.items()},
        "of_schedule": {name: spread(ratios) for name, ratios in of_schedule.items()},
        "prediction": spread(off), "within_15": sum(abs(one) <= 0.15 for one in off) / len(off),
        "same_text": sum(run["worst"] == 0.0 for run in measured), "worst": max(run["worst"] for run in measured),
        "load_average": os.getloadavg()[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--homes", type=int, default=20)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--disk", type=float, default=5.0, help="times the speeds of cold_start's disks")
    parser.add_argument("--minutes", type=float, default=1e9, help="no further home is begun after them")
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=48, help="of the prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", default="phases", help="of the result file")
    args = parser.parse_args()
    if reason := why_not():
        sys.exit(f"no home can be made here: {reason}")
    rng, began = random.Random(args.seed), time.monotonic()
    homes, found = list[dict[str, Any]](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / MODEL
        write(model, replace(SHAPES[args.shape], n_layer=args.layers, n_vocab=8192), "Q4_0", args.seed)
        with closing(Uncut(model, args.tokens, max(args.lengths))) as own:
            for _ in range(args.homes):
                if time.monotonic() - began > 60.0 * args.minutes:
                    break
                drawn = fleet(rng, os.cpu_count() or 1)
                specs = [replace(spec, disk=round(spec.disk * args.disk, 1)) for spec in drawn]
                one = one_home(specs, folder, model, args.tokens, args.lengths)
                for run in one["measured"].values():
                    run["worst"] = own.worst(run.pop("tokens"))
                homes.append(one)
                print("  ".join(row(one, args.lengths)), flush=True)
                found = {"shape": args.shape, "layers": args.layers, "tokens": args.tokens, "logits": own.spread}
                found |= figures(homes, args.lengths) | {"each": homes}
                report.write(args.name, "bench.mesh.phases", found, args.seed)
    print(table(found))


if __name__ == "__main__":
    main()
