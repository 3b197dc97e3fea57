"""A reply over several devices on the screen: the plan of every device, and below it what it did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgellm.cli.views.console import emit, err, one_line, say
from edgellm.cli.views.plan_view import LOOKS, WIDEST, at_moment
from edgellm.coldstart.plan import PlannedStage, PlanOption, told
from edgellm.llm.mesh_timeline import Replies, beside, planned_for

if TYPE_CHECKING:
    from edgellm.llm.mesh_llm import OpenedMesh
    from edgellm.llm.mesh_timeline import DeviceTimeline, Measured
    from edgellm.spec.types import Summary


Spans = Sequence[tuple[float, float]]


def show(console: Console, found: Measured, plan: PlanOption | None) -> None:
    """Print the reply's figures, then a Gantt chart up to the first token."""
    console.print(figures(found.way, plan))
    console.print()
    for line in gantt(found, plan, min(WIDEST, console.width - 32)):
        console.print(line)


def figures(way: PlanOption, plan: PlanOption | None) -> Table:
    """Return a table of the stages, measured beside planned."""
    table = Table(box=None, pad_edge=False)
    for name in ("DEVICE", "LAYERS", "LOADED", "GOT ITS INPUT", "COMPUTED FOR", "DONE"):
        left = name in ("DEVICE", "LAYERS")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for stage in way.stages:
        before = planned_for(stage, plan)
        both = [
            _both(getattr(stage, key), None if before is None else getattr(before, key))
            for key in ("load_s", "received_s", "compute_s", "finish_s")
        ]
        table.add_row(one_line(stage.device), str(stage.layers), *both)
    ttft = _both(way.ttft_s, None if plan is None else plan.ttft_s)
    token = _both(way.token_s, None if plan is None else plan.token_s)
    table.add_row("first token", "", "", "", "", ttft)
    table.add_row("a token", "", "", "", "", token)
    table.caption = None if plan is None else "measured (planned)"
    return table


def _both(measured: float, planned: float | None) -> str:
    return told(measured) if planned is None else f"{told(measured)} ({told(planned)})"


def gantt(found: Measured, plan: PlanOption | None, width: int) -> list[Text]:
    """Return two lines for each device, planned and measured, on one scale of time; only the latter without a plan."""
    width = max(20, width)
    ends = [found.way.ttft_s, *(stage.finish_s for stage in (plan.stages if plan is not None else ()))]
    cell = (max(ends) or 1.0) / width
    moments = [(at + 0.5) * cell for at in range(width)]
    names = [one_line(one.device)[:18] for one in found.did]
    column = max(map(len, names), default=0) + 2
    lines = []
    for name, did, stage in zip(names, found.did, found.way.stages, strict=True):
        before = planned_for(stage, plan)
        if before is not None:
            cells = [at_moment(before, moment, cell) for moment in moments]
            lines.append(_line(name.ljust(column) + "plan  ", cells, before.finish_s))
            name = ""  # noqa: PLW2901  the second line of a device
        cells = [_did(did, stage, moment, cell, found.way.ttft_s) for moment in moments]
        lines.append(_line(name.ljust(column) + "run   ", cells, stage.finish_s))
    legend = Text(" " * (column + 6))
    for what, (mark, style) in LOOKS.items():
        legend.append(mark, style)
        legend.append(f" {what}  ")
    return [*lines, legend]


def _line(head: str, cells: Sequence[str], end: float) -> Text:
    line = Text(head)
    for what, run in groupby(cells):
        mark, style = LOOKS.get(what, (" ", ""))
        line.append(mark * len(list(run)), style)
    line.append(f" {told(end)}")
    return line


def _did(did: DeviceTimeline, stage: PlannedStage, moment: float, cell: float, until: float) -> str:
    """Return what a device did at a moment; even what took less than a cell is shown."""
    if moment - cell / 2.0 > max(stage.finish_s, stage.load_s) or moment > until + cell:
        return ""
    loading, computing = _within(did.loading, moment, cell), _within(did.computing, moment, cell)
    if computing:
        return "loading and computing" if loading else "computing"
    if loading:
        return "loading"
    sent = stage.received_s - stage.network_s
    return "sending" if stage.network_s and sent <= moment <= stage.received_s + cell else "idle"


def _within(spans: Spans, moment: float, cell: float) -> bool:
    return any(begin - cell / 2.0 <= moment <= end + cell / 2.0 for begin, end in spans)


class Reports:
    """The reports of one mesh; see `Replies`."""

    def __init__(self, opened: OpenedMesh, *, as_json: bool) -> None:
        self._replies, self._as_json = Replies(opened), as_json

    def asked(self) -> None:
        """Note that a reply begins."""
        self._replies.asked()

    def heard(self, summary: Summary) -> None:
        """Print what was done for the reply, which is over."""
        found = self._replies.heard(summary)
        if found is None:
            return
        did, plan = found
        if self._as_json:
            emit(json.dumps({"mesh": beside(did.way, plan, did.disproved)}))
        else:
            show(err(), did, plan)
            for sentence in did.disproved:
                say(sentence, style="yellow")
