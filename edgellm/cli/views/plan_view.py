"""A plan on the screen: which device holds which layers and why, when it does what, other ways, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgellm.cli.views.console import one_line, size
from edgellm.coldstart.cost_model import ModelCosts
from edgellm.coldstart.plan import Plan, PlannedStage, PlanOption, told

LOOKS = {
    "loading": ("░", "yellow"),
    "loading and computing": ("▓", "cyan"),
    "computing": ("█", "green"),
    "sending": ("▒", "magenta"),
    "idle": ("·", "dim"),
}
"""The look of what a device does at a moment, with colours and without."""
WIDEST = 72


def show(
    console: Console, plan: Plan, model: ModelCosts, tokens_in: int, tokens_out: int, milliseconds: float,
    moves: Sequence[tuple[str, int]] | None = None,
) -> None:  # fmt: skip
    """Print the plan. `moves`: bytes that each device still lacks, where that is known."""
    reply = plan.objective == "reply"
    goal = f"the end of a reply of {tokens_out} tokens" if reply else "the first token"
    console.print(
        f"{one_line(model.name)}: {model.shape.layers} layers, {size(int(model.bytes))}; soonest {goal}, for a prompt"
        f" of {tokens_in} tokens"
    )
    console.print()
    console.print(_holders(plan))
    console.print()
    for line in gantt(plan.way, min(WIDEST, console.width - 24)):
        console.print(line)
    console.print()
    console.print(_ways(plan))
    console.print()
    console.print(f"planned in {milliseconds:.0f} ms; {plan.reason}", style="dim")
    _moves(console, plan, moves)
    console.print(Text(plan.advice, style="bold"), soft_wrap=True)


def _holders(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("DEVICE", "LAYERS", "SIZE", "LOAD", "WAIT", "NETWORK", "COMPUTE", "FINISH", "WHY"):
        left = name in ("DEVICE", "WHY")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left)
    for stage in plan.way.stages:
        times = (stage.load_s, stage.wait_s, stage.network_s, stage.compute_s, stage.finish_s)
        layers = str(stage.layers)
        table.add_row(one_line(stage.device), layers, size(int(stage.size)), *map(told, times), stage.reason)
    for device, reason in plan.unused:
        table.add_row(one_line(device), "-", *("",) * 6, reason, style="dim")
    return table


def gantt(way: PlanOption, width: int) -> list[Text]:
    """Return a line for each device, `width` characters long, then a legend of the characters."""
    width = max(20, width)
    end = max(stage.finish_s for stage in way.stages) or 1.0
    names = [one_line(stage.device)[:18] for stage in way.stages]
    column = max(map(len, names)) + 2
    lines = []
    seen = set()
    for name, stage in zip(names, way.stages, strict=True):
        line = Text(name.ljust(column))
        cells = [at_moment(stage, (cell + 0.5) * end / width, end / width) for cell in range(width)]
        seen.update(cells)
        for doing, run in groupby(cells):
            mark, style = LOOKS.get(doing, (" ", ""))
            line.append(mark * len(list(run)), style)
        line.append(f" {told(stage.finish_s)}")
        lines.append(line)
    legend = Text(" " * column)
    for what, (mark, style) in LOOKS.items():
        if what in seen:
            legend.append(mark, style)
            legend.append(f" {what}  ")
    return [*lines, legend]


def at_moment(stage: PlannedStage, moment: float, cell: float) -> str:
    """Return what the device does at a moment; a transfer is shown even if it is shorter than a cell."""
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


def _ways(plan: Plan) -> Table:
    """Return a table of the plan beside the other ways."""
    table = Table(box=None, pad_edge=False)
    for name in ("WAY", "FIRST TOKEN", "A TOKEN", "REPLY", ""):
        table.add_column(name, justify="left" if name in ("WAY", "") else "right", no_wrap=True)
    single = plan.best_single
    rows = (
        ("this plan", plan.way, "" if plan.optimal else f"within {plan.gap:.1%} of the best there is"),
        ("best single device", single, one_line(single.stages[0].device) if single else ""),
        ("even split", plan.even, ""),
        ("split by strength", plan.heuristic, ""),
    )
    for name, way, more in rows:
        if way is None:
            table.add_row(name, "does not fit", "", "", "", style="dim")
        else:
            table.add_row(name, told(way.ttft_s), told(way.token_s), told(way.reply_s), more)
    return table


def _moves(console: Console, plan: Plan, moves: Sequence[tuple[str, int]] | None) -> None:
    """Print what must be on each device's disk before the first run."""
    if moves is None:
        what, lacking = "to be on the devices' disks first", [(s.device, int(s.size)) for s in plan.way.stages]
    else:
        what, lacking = "to be moved first", [(name, count) for name, count in moves if count]
    if not lacking:
        console.print("nothing has to be moved first", style="dim")
        return
    parts = ", ".join(f"{one_line(name)} {size(count)}" for name, count in lacking)
    end = "" if moves is None else ": edgellm mesh deploy"
    console.print(f"{what}: {size(sum(n for _, n in lacking))} ({parts}){end}", style="dim", soft_wrap=True)
