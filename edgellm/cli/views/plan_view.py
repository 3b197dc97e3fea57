"""A plan on the screen and for a script: layers and times by device with reasons, a chart, alternatives, advice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from edgellm.cli.views.console import one_line, size, table
from edgellm.coldstart.plan import Plan, PlannedStage, PlanOption, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from edgellm.coldstart.home import Home
    from edgellm.coldstart.rpc_plan import RpcHome, RpcOption
    from edgellm.mesh.ggml_rpc.placement import RpcPlacement

MARKS = {
    "loading": ("░", "yellow"),
    "loading and computing": ("▓", "cyan"),
    "computing": ("█", "green"),
    "sending": ("▒", "magenta"),
    "idle": ("·", "dim"),
}
"""The mark and colour of each activity of a device in a Gantt chart."""
WIDEST = 72  # characters of a chart


def print_plan(
    console: Console, plan: Plan, milliseconds: float, moves: Sequence[tuple[str, int]] | None,
    units: Mapping[str, str],
) -> None:  # fmt: skip
    """Print a plan. `moves`: bytes of layers that each device still lacks, if known; `units`: the graphics cards on
    which devices compute, if they do."""
    home, model = plan.home, plan.home.model
    console.print(f"{one_line(model.name)}: {model.shape.layers} layers, {size(int(model.bytes))}; {_goal(home)}")
    console.print()
    console.print(_stages(plan, units))
    console.print()
    for line in gantt(plan.option, min(WIDEST, console.width - 24)):
        console.print(line)
    console.print()
    console.print(_alternatives(plan))
    console.print()
    console.print(f"planned in {milliseconds:.0f} ms; {plan.reason}", style="dim")
    _moves(console, plan, moves)
    console.print(Text(plan.advice, style="bold"), soft_wrap=True)


def _goal(home: Home | RpcHome) -> str:
    goal = f"the end of a reply of {home.tokens_out} tokens" if home.objective == "reply" else "the first token"
    return f"least time to {goal} for a prompt of {home.tokens_in} tokens"


def _stages(plan: Plan, units: Mapping[str, str]) -> Table:
    def named(device: str) -> str:
        return one_line(f"{device} ({units[device]})" if units.get(device) else device)

    times = ("LOAD", "WAIT", "NETWORK", "COMPUTE", "FINISH")
    made = table("DEVICE", "LAYERS", "SIZE", *times, "WHY", right=("LAYERS", "SIZE", *times), fold="WHY")
    for stage in plan.option.stages:
        took = (stage.load_s, stage.wait_s, stage.network_s, stage.compute_s, stage.finish_s)
        layers = str(stage.layers)
        made.add_row(named(stage.device), layers, size(int(stage.size)), *map(format_seconds, took), stage.reason)
    for device, reason in plan.unused:
        made.add_row(named(device), "-", *("",) * 6, reason, style="dim")
    return made


def gantt(way: PlanOption, width: int) -> list[Text]:
    """Return a line of `width` characters for each device, then a legend."""
    width = max(20, width)
    end = max(stage.finish_s for stage in way.stages) or 1.0
    names = [one_line(stage.device)[:18] for stage in way.stages]
    column = max(map(len, names)) + 2
    lines = []
    activities = set()
    for name, stage in zip(names, way.stages, strict=True):
        cells = [activity_at(stage, (cell + 0.5) * end / width, end / width) for cell in range(width)]
        activities.update(cells)
        lines.append(chart_line(name.ljust(column), cells, stage.finish_s))
    return [*lines, legend(column, activities)]


def chart_line(head: str, cells: Sequence[str], end: float) -> Text:
    """Return a line of a chart: its head, a mark for the activity in each cell, and the time at which the last cell
    ends."""
    line = Text(head)
    for activity, run in groupby(cells):
        mark, style = MARKS.get(activity, (" ", ""))
        line.append(mark * len(list(run)), style)
    line.append(f" {format_seconds(end)}")
    return line


def legend(column: int, activities: Collection[str] = tuple(MARKS)) -> Text:
    """Return the line with the marks of activities, which begins in a column."""
    line = Text(" " * column)
    for activity, (mark, style) in MARKS.items():
        if activity in activities:
            line.append(mark, style)
            line.append(f" {activity}  ")
    return line


def activity_at(stage: PlannedStage, moment: float, cell: float) -> str:
    """Return the activity of a device at a moment. A transfer is returned even if it is shorter than a cell."""
    computing = stage.finish_s - stage.compute_s <= moment < stage.finish_s
    loading = moment < stage.load_s
    if stage.network_s > 0.0:
        begin = stage.received_s - stage.network_s
        if begin <= moment < stage.received_s or abs(begin - moment) < cell / 2.0:
            return "sending"
    if moment >= stage.finish_s:
        return ""
    if computing:
        return "loading and computing" if loading else "computing"
    return "loading" if loading else "idle"


def _alternatives(plan: Plan) -> Table:
    single = plan.best_single
    return _ways(
        ("this plan", plan.option, "" if plan.optimal else f"within {plan.gap:.1%} of the best possible"),
        ("best single device", single, one_line(single.names) if single else ""),
        ("even split", plan.even, ""),
        ("split by device speed", plan.heuristic, ""),
    )


def _ways(*rows: tuple[str, PlanOption | RpcOption | None, str]) -> Table:
    """Return a table of a plan and its alternatives, each with name, times and remark."""
    times = ("FIRST TOKEN", "PER TOKEN", "REPLY")
    made = table("PLAN", *times, "", right=times)
    for name, way, remark in rows:
        if way is None:
            made.add_row(name, "does not fit", "", "", "", style="dim")
        else:
            made.add_row(name, *map(format_seconds, (way.ttft_s, way.token_s, way.reply_s)), remark)
    return made


def _moves(console: Console, plan: Plan, moves: Sequence[tuple[str, int]] | None) -> None:
    """Print the layers that each device's disk needs before the first run."""
    if moves is None:
        what, lacking = "needed on the devices' disks first", [(s.device, int(s.size)) for s in plan.option.stages]
    else:
        what, lacking = "to deploy first", [(name, count) for name, count in moves if count]
    if not lacking:
        console.print("nothing has to be deployed first", style="dim")
        return
    parts = ", ".join(f"{one_line(name)} {size(count)}" for name, count in lacking)
    end = "" if moves is None else ": edgellm mesh deploy"
    console.print(f"{what}: {size(sum(n for _, n in lacking))} ({parts}){end}", style="dim", soft_wrap=True)


def figures(found: Plan, milliseconds: float) -> dict[str, Any]:
    """Return the plan for a script. Layers are counted from 1, both ends included; a plan that does not fit is None."""

    def seconds(way: PlanOption | None) -> float | None:
        return None if way is None else found.seconds(way)

    keys = ("device", "first_layer", "last_layer", "load_s", "wait_s", "network_s", "compute_s", "finish_s")
    return {
        "ttft_s": found.option.ttft_s, "token_s": found.option.token_s, "reply_s": found.option.reply_s,
        "objective": found.home.objective, "overlap": found.home.overlap, "planner_ms": milliseconds,
        "optimal": found.optimal, "gap": found.gap, "reason": found.reason, "advice": found.advice,
        "stages": [
            {**{key: row[key] for key in keys}, "bytes": int(stage.size), "reason": stage.reason}
            for stage in found.option.stages
            for row in (stage.to_json(),)
        ],
        "unused": [{"device": device, "reason": reason} for device, reason in found.unused],
        "baselines": {
            "even": seconds(found.even), "heuristic": seconds(found.heuristic),
            "best_single": seconds(found.best_single), "ideal_single": seconds(found.ideal_single),
        },
        "warm_single_s": seconds(found.warm_single),
    }  # fmt: skip


def print_rpc_plan(console: Console, placed: RpcPlacement, model: str) -> None:
    """Print which device holds which layers, the times beside those of other ways, and the advice."""
    plan, costs = placed.plan, placed.plan.home.model
    console.print(
        f"{one_line(costs.name)}: {costs.layers} layers, {size(sum(costs.layer_bytes) + costs.head)}, over llama.cpp's"
        f" RPC; {_goal(plan.home)}"
    )
    console.print()
    layers = table("DEVICE", "LAYERS", "SIZE", right=("LAYERS", "SIZE"))
    for share in placed.shares:
        layers.add_row(one_line(share.name), str(share.layers), size(costs.weights(share.layers)))
    for name, why in placed.left_out:
        layers.add_row(one_line(name), "-", one_line(why), style="dim")
    console.print(layers)
    console.print()
    elsewhere = plan.elsewhere
    console.print(
        _ways(
            ("this plan", plan.option, ""),
            ("this device alone", plan.alone, ""),
            ("one model each", elsewhere, f"whole on {one_line(elsewhere.shares[0].name)}" if elsewhere else ""),
        )
    )
    console.print()
    console.print(Text(plan.advice, style="bold"), soft_wrap=True)
    if (better := placed.one_model_each(model)) is not None:
        console.print(Text(better), soft_wrap=True)


def rpc_figures(placed: RpcPlacement) -> dict[str, Any]:
    """Return the plan for a script; layers are counted from 1, both ends included."""
    plan = placed.plan

    def times(way: RpcOption | None) -> dict[str, Any] | None:
        if way is None:
            return None
        return {
            "load_s": way.load_s, "ttft_s": way.ttft_s, "token_s": way.token_s, "reply_s": way.reply_s,
            "shares": [
                {"device": one.name, "first_layer": one.layers.start + 1, "last_layer": one.layers.stop}
                for one in way.shares
            ],
        }  # fmt: skip

    return {
        "plan": times(plan.option), "alone": times(plan.alone), "one_model_each": times(plan.elsewhere),
        "objective": plan.home.objective, "advice": plan.advice,
        "left_out": [{"device": name, "reason": why} for name, why in placed.left_out],
    }  # fmt: skip
