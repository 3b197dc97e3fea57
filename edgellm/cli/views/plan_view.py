"""A plan on the screen: the layers and times of each device with reasons, a Gantt chart, alternatives, advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgellm.cli.views.console import one_line, size
from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.plan import Plan, PlannedStage, PlanOption, format_seconds

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
    console: Console, plan: Plan, model: ModelCosts, tokens_in: int, tokens_out: int, milliseconds: float,
    moves: Sequence[tuple[str, int]] | None = None, units: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Print a plan. `moves`: bytes of layers that each device still lacks, if known; `units`: the graphics cards of
    those devices that compute on some."""
    reply = plan.objective == "reply"
    goal = f"the end of a reply of {tokens_out} tokens" if reply else "the first token"
    console.print(
        f"{one_line(model.name)}: {model.shape.layers} layers, {size(int(model.bytes))}; least time to {goal} for a"
        f" prompt of {tokens_in} tokens"
    )
    console.print()
    console.print(_stages(plan, units or {}))
    console.print()
    for line in gantt(plan.option, min(WIDEST, console.width - 24)):
        console.print(line)
    console.print()
    console.print(_alternatives(plan))
    console.print()
    console.print(f"planned in {milliseconds:.0f} ms; {plan.reason}", style="dim")
    _moves(console, plan, moves)
    console.print(Text(plan.advice, style="bold"), soft_wrap=True)


def _stages(plan: Plan, units: Mapping[str, str]) -> Table:
    def named(device: str) -> str:
        return one_line(f"{device} ({units[device]})" if device in units else device)

    table = Table(box=None, pad_edge=False)
    for name in ("DEVICE", "LAYERS", "SIZE", "LOAD", "WAIT", "NETWORK", "COMPUTE", "FINISH", "WHY"):
        left = name in ("DEVICE", "WHY")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    for stage in plan.option.stages:
        times = (stage.load_s, stage.wait_s, stage.network_s, stage.compute_s, stage.finish_s)
        layers = str(stage.layers)
        table.add_row(named(stage.device), layers, size(int(stage.size)), *map(format_seconds, times), stage.reason)
    for device, reason in plan.unused:
        table.add_row(named(device), "-", *("",) * 6, reason, style="dim")
    return table


def gantt(way: PlanOption, width: int) -> list[Text]:
    """Return a line of `width` characters for each device, then a legend."""
    width = max(20, width)
    end = max(stage.finish_s for stage in way.stages) or 1.0
    names = [one_line(stage.device)[:18] for stage in way.stages]
    column = max(map(len, names)) + 2
    lines = []
    activities = set()
    for name, stage in zip(names, way.stages, strict=True):
        line = Text(name.ljust(column))
        cells = [activity_at(stage, (cell + 0.5) * end / width, end / width) for cell in range(width)]
        activities.update(cells)
        for activity, run in groupby(cells):
            mark, style = MARKS.get(activity, (" ", ""))
            line.append(mark * len(list(run)), style)
        line.append(f" {format_seconds(stage.finish_s)}")
        lines.append(line)
    legend = Text(" " * column)
    for activity, (mark, style) in MARKS.items():
        if activity in activities:
            legend.append(mark, style)
            legend.append(f" {activity}  ")
    return [*lines, legend]


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
    """Return a table of the plan beside its alternatives."""
    table = Table(box=None, pad_edge=False)
    for name in ("PLAN", "FIRST TOKEN", "PER TOKEN", "REPLY", ""):
        table.add_column(name, justify="left" if name in ("PLAN", "") else "right", no_wrap=True)
    single = plan.best_single
    rows = (
        ("this plan", plan.option, "" if plan.optimal else f"within {plan.gap:.1%} of the best possible"),
        ("best single device", single, one_line(single.stages[0].device) if single else ""),
        ("even split", plan.even, ""),
        ("split by device speed", plan.heuristic, ""),
    )
    for name, way, more in rows:
        if way is None:
            table.add_row(name, "does not fit", "", "", "", style="dim")
        else:
            table.add_row(
                name, format_seconds(way.ttft_s), format_seconds(way.token_s), format_seconds(way.reply_s), more
            )
    return table


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
