"""A plan on the screen and for a script: layers and times by device with reasons, a chart, alternatives, advice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.text import Text

from edgellm.cli.views.console import one_line, out, say, size, table
from edgellm.coldstart.plan import Plan, PlannedStage, PlanOption, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from edgellm.coldstart.home import Home
    from edgellm.rpc_engine.plan import RpcHome, RpcOption, RpcPlacement

MARKS = {
    "loading": ("░", "yellow"), "loading and computing": ("▓", "cyan"), "computing": ("█", "green"),
    "sending": ("▒", "magenta"), "idle": ("·", "dim"),
}  # fmt: skip
"""The mark and colour of each activity of a device in a Gantt chart."""
WIDEST = 72  # characters of a chart


def print_plan(
    plan: Plan, milliseconds: float, moves: Sequence[tuple[str, int]] | None, units: Mapping[str, str]
) -> None:
    """Print a plan. `moves`: bytes of layers that each device still lacks, if known; `units`: the graphics cards on
    which devices compute, if they do."""
    model, single, console = plan.home.model, plan.best_single, out()
    console.print(f"{one_line(model.name)}: {model.shape.layers} layers, {size(int(model.bytes))}; {_goal(plan.home)}")
    console.print()
    console.print(_stages(plan, units))
    console.print()
    for line in gantt(plan.option, min(WIDEST, console.width - 24)):
        console.print(line)
    console.print()
    console.print(
        _ways(
            ("this plan", plan.option, "" if plan.optimal else f"within {plan.gap:.1%} of the best possible"),
            ("best single device", single, one_line(single.names) if single else ""),
            ("even split", plan.even, ""),
            ("split by device speed", plan.heuristic, ""),
        )
    )
    console.print()
    console.print(f"planned in {milliseconds:.0f} ms; {plan.reason}", style="dim")
    console.print(_moves(plan, moves), style="dim", soft_wrap=True)
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
    cell = (max(stage.finish_s for stage in way.stages) or 1.0) / width
    names = [one_line(stage.device)[:18] for stage in way.stages]
    column = max(map(len, names)) + 2
    rows = [[activity_at(stage, (at + 0.5) * cell, cell) for at in range(width)] for stage in way.stages]
    lines = [
        chart_line(name.ljust(column), cells, stage.finish_s)
        for name, cells, stage in zip(names, rows, way.stages, strict=True)
    ]
    return [*lines, legend(column, {activity for cells in rows for activity in cells})]


def chart_line(head: str, cells: Sequence[str], end: float) -> Text:
    """Return a line of a chart: its head, a mark for the activity in each cell, and the time of the last one's end."""
    line = Text(head)
    for activity, run in groupby(cells):
        mark, style = MARKS.get(activity, (" ", ""))
        line.append(mark * len(list(run)), style)
    return line.append(f" {format_seconds(end)}")


def legend(column: int, activities: Collection[str] = tuple(MARKS)) -> Text:
    """Return the line with the marks of activities, which begins in a column."""
    line = Text(" " * column)
    for activity, (mark, style) in MARKS.items():
        if activity in activities:
            line.append(mark, style).append(f" {activity}  ")
    return line


def activity_at(stage: PlannedStage, moment: float, cell: float) -> str:
    """Return the activity of a device at a moment. A transfer is returned even if it is shorter than a cell."""
    loading, begin = moment < stage.load_s, stage.received_s - stage.network_s
    if stage.network_s > 0.0 and (begin <= moment < stage.received_s or abs(begin - moment) < cell / 2.0):
        return "sending"
    if moment >= stage.finish_s:
        return ""
    if moment >= stage.finish_s - stage.compute_s:
        return "loading and computing" if loading else "computing"
    return "loading" if loading else "idle"


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


def _moves(plan: Plan, moves: Sequence[tuple[str, int]] | None) -> str:
    """Return the layers that each device's disk needs before the first run."""
    needed = [(stage.device, int(stage.size)) for stage in plan.option.stages]
    lacking = needed if moves is None else [(name, count) for name, count in moves if count]
    if not lacking:
        return "nothing has to be deployed first"
    parts = f"{size(sum(n for _, n in lacking))} ({', '.join(f'{one_line(name)} {size(n)}' for name, n in lacking)})"
    if moves is None:
        return f"needed on the devices' disks first: {parts}"
    return f"to deploy first: {parts}: edgellm mesh deploy"


def figures(found: Plan, milliseconds: float) -> dict[str, Any]:
    """Return the plan for a script. Layers are counted from 1, both ends included; a plan that does not fit is None."""
    ways = {name: getattr(found, name) for name in ("even", "heuristic", "best_single", "ideal_single", "warm_single")}
    seconds = {name: None if way is None else found.seconds(way) for name, way in ways.items()}
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
        "warm_single_s": seconds.pop("warm_single"), "baselines": seconds,
    }  # fmt: skip


def print_rpc_plan(placed: RpcPlacement, model: str) -> None:
    """Print which device holds which layers, the times beside those of other ways, and the advice."""
    plan, costs, console = placed.plan, placed.plan.home.model, out()
    all_bytes = size(sum(costs.layer_bytes) + costs.head)
    about = f"{one_line(costs.name)}: {costs.layers} layers, {all_bytes}, over llama.cpp's RPC; {_goal(plan.home)}"
    layers = table("DEVICE", "LAYERS", "SIZE", right=("LAYERS", "SIZE"))
    for share in placed.shares:
        layers.add_row(one_line(share.name), str(share.layers), size(costs.weights(share.layers)))
    for name, why in placed.left_out:
        layers.add_row(one_line(name), "-", one_line(why), style="dim")
    elsewhere = plan.elsewhere
    ways = _ways(
        ("this plan", plan.option, ""),
        ("this device alone", plan.alone, ""),
        ("one model each", elsewhere, f"whole on {one_line(elsewhere.shares[0].name)}" if elsewhere else ""),
    )
    for part in (about, "", layers, "", ways, ""):
        console.print(part)
    console.print(Text(plan.advice, style="bold"), soft_wrap=True)
    if (better := placed.one_model_each(model)) is not None:
        console.print(Text(better), soft_wrap=True)


def rpc_figures(placed: RpcPlacement) -> dict[str, Any]:
    """Return the plan for a script; layers are counted from 1, both ends included."""
    plan = placed.plan

    def times(way: RpcOption | None) -> dict[str, Any] | None:
        return None if way is None else {
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


def say_context(positions: int | None) -> None:
    """Print the context for which a plan counts memory, if it is known."""
    if positions is not None:
        say(f"Memory is counted for a context of {positions:,} tokens; change it with --ctx-size.", style="dim")
