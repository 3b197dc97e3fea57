"""Compute T for every strategy and prompt length in CSGO's own setting (Table 1), beside the paper's claims.

The figures are exact, so nothing varies from run to run.

Columns: tokens of the prompt; seconds to the first token on the ideal single device, with an even split, with the
heuristic, and with the optimum; the devices and the layers of each in the optimum; its saving against the best of
the others; and T of the two timing models that overlap more.
"""

import statistics
from typing import Any

from bench.harness.results import Figures
from edgellm.coldstart import costs
from edgellm.coldstart.plan import Plan, plan
from edgellm.coldstart.problem import OVERLAPS, Home
from testkit.algorithm1 import algorithm1

CLAIMS = {"mean_over_best_baseline": 17.43, "least": 8.0, "most": 50.0}
"""Claims of the paper's section 5.2, in percent."""
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)  # tokens of the paper's prompts


def row(tokens: int) -> dict[str, Any]:
    """Return the results for one prompt length."""
    devices, model = costs.devices(), costs.model()
    plans = {overlap: plan(Home(devices, model, tokens, overlap=overlap)) for overlap in OVERLAPS}
    ours = plans["paper"]
    reference = algorithm1(Home(devices, model, tokens, overlap="paper").task())
    seconds = {"ideal_single": ours.ideal_single.ttft_s, "optimum": ours.option.ttft_s}
    seconds |= {name: option.ttft_s for name, option in (("even", ours.even), ("heuristic", ours.heuristic)) if option}
    saved = {name: 100 * (1 - seconds["optimum"] / seconds[name]) for name in seconds if name != "optimum"}
    return {
        "tokens": tokens, "seconds": seconds, "saved": saved, "algorithm_1": reference[0] if reference else None,
        "proved": ours.optimal, "overlaps": {overlap: found.option.ttft_s for overlap, found in plans.items()},
        "ways": _ways(ours),
    }  # fmt: skip


def _ways(found: Plan) -> dict[str, Any]:
    options = {"optimum": found.option, "even": found.even, "heuristic": found.heuristic}
    return {name: option.to_json() for name, option in options.items() if option is not None}


def table(found: dict[str, Any]) -> str:
    """Return a line for each prompt length, and the savings beside the paper's claims."""
    names, sizes = ("ideal single", "even", "heuristic", "optimum"), (14, 9, 11, 9)
    head = f"{'tokens':>6}" + "".join(f"{name:>{size}}" for name, size in zip(names, sizes, strict=True))
    lines = [f"{head}  {'devices (layers)':<24}{'saved':>7}{'receiving':>11}{'streamed':>10}"]
    for line in found["lengths"]:
        stages = line["ways"]["optimum"]["stages"]
        used = ",".join(stage["device"].removeprefix("Device ") for stage in stages)
        held = ",".join(str(stage["last_layer"] - stage["first_layer"] + 1) for stage in stages)
        seconds, best = line["seconds"], min(line["saved"].values())
        lines.append(
            f"{line['tokens']:>6}{seconds['ideal_single']:>14.3f}{seconds['even']:>9.3f}{seconds['heuristic']:>11.3f}"
            f"{seconds['optimum']:>9.3f}  {f'{used} ({held})':<24}{best:>6.1f}%"
            f"{line['overlaps']['receiving']:>11.3f}{line['overlaps']['streamed']:>10.3f}"
        )
    ours, theirs = found["ours"], found["claims"]
    lines.append(
        f"saved against the best baseline, mean: {ours['mean_over_best_baseline']:.2f} %"
        f" (the paper: {theirs['mean_over_best_baseline']} %)"
    )
    lines.append(
        f"saved against any baseline: {ours['least']:.1f} to {ours['most']:.1f} %"
        f" (the paper: {theirs['least']:.0f} to {theirs['most']:.0f} %)"
    )
    return "\n".join(lines) + "\n"


def measure() -> Figures:
    """Return the paper's table by our planner."""
    lengths = [row(tokens) for tokens in LENGTHS]
    every = [share for line in lengths for share in line["saved"].values()]
    best = [min(line["saved"].values()) for line in lengths]
    ours = {"mean_over_best_baseline": statistics.fmean(best), "least": min(every), "most": max(every)}
    return {"claims": CLAIMS, "ours": ours, "lengths": lengths}
