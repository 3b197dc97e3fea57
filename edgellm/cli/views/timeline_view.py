"""A reply over several devices on the screen: the planned work of each device, and below it the measured work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgellm.cli.views.console import emit, err, one_line, say, table
from edgellm.cli.views.plan_view import WIDEST, activity_at, chart_line, legend
from edgellm.coldstart.plan import PlannedStage, PlanOption, format_seconds
from edgellm.llm.mesh_timeline import Replies, comparison, planned_for

if TYPE_CHECKING:
    from edgellm.llm.mesh_llm import OpenedMesh
    from edgellm.llm.mesh_timeline import DeviceTimeline, Measured
    from edgellm.spec.types import Summary


Spans = Sequence[tuple[float, float]]


def print_timeline(console: Console, found: Measured, plan: PlanOption | None) -> None:
    """Print the reply's figures, then a Gantt chart up to the first token, or the moves of a reply in phases."""
    if found.moves:
        print_moves(console, found, plan)
        return
    console.print(figures(found.option, plan))
    console.print()
    for line in gantt(found, plan, min(WIDEST, console.width - 32)):
        console.print(line)


def print_moves(console: Console, found: Measured, plan: PlanOption | None) -> None:
    """Print the token and the time at which each placement took over."""
    right = ("FROM TOKEN", "LOADED", "HAD READ THE TEXT", "TOOK OVER")
    made = table(right[0], "ON", *right[1:], right=right, fold="ON")
    for move in found.moves:
        planned = move.planned
        token = f"{move.token + 1}" if planned is None else f"{move.token + 1} ({planned.token + 1})"
        expected = (None, None, None) if planned is None else (planned.loaded, planned.ready, planned.seconds)
        times = zip((move.loaded, move.ready, move.at), expected, strict=True)
        where = ", ".join(f"{one_line(share.name)} {share.layers}" for share in move.shares)
        made.add_row(token, where, *(_both(*one) for one in times))
    ends = (("first token", "ttft_s"), ("last token", "reply_s"))
    for name, key in ends:
        both = _both(getattr(found.option, key), None if plan is None else getattr(plan, key))
        made.add_row("", name, "", "", both)
    made.caption = None if plan is None else "measured (planned)"
    console.print(made)


def figures(way: PlanOption, plan: PlanOption | None) -> Table:
    """Return a table of the stages with measured and planned figures."""
    times = ("LOADED", "RECEIVED", "COMPUTED FOR", "DONE")
    made = table("DEVICE", "LAYERS", *times, right=times)
    for stage in way.stages:
        before = planned_for(stage, plan)
        both = [
            _both(getattr(stage, key), None if before is None else getattr(before, key))
            for key in ("load_s", "received_s", "compute_s", "finish_s")
        ]
        made.add_row(one_line(stage.device), str(stage.layers), *both)
    ttft = _both(way.ttft_s, None if plan is None else plan.ttft_s)
    token = _both(way.token_s, None if plan is None else plan.token_s)
    made.add_row("first token", "", "", "", "", ttft)
    made.add_row("per token", "", "", "", "", token)
    made.caption = None if plan is None else "measured (planned)"
    return made


def _both(measured: float, planned: float | None) -> str:
    return format_seconds(measured) if planned is None else f"{format_seconds(measured)} ({format_seconds(planned)})"


def gantt(found: Measured, plan: PlanOption | None, width: int) -> list[Text]:
    """Return two lines for each device, planned and measured, on one scale; without a plan only the latter."""
    width = max(20, width)
    ends = [found.option.ttft_s, *(stage.finish_s for stage in (plan.stages if plan is not None else ()))]
    cell = (max(ends) or 1.0) / width
    moments = [(at + 0.5) * cell for at in range(width)]
    names = [one_line(one.device)[:18] for one in found.timelines]
    column = max(map(len, names), default=0) + 2
    lines = []
    for name, did, stage in zip(names, found.timelines, found.option.stages, strict=True):
        before = planned_for(stage, plan)
        if before is not None:
            cells = [activity_at(before, moment, cell) for moment in moments]
            lines.append(chart_line(name.ljust(column) + "plan  ", cells, before.finish_s))
            name = ""  # noqa: PLW2901  the second line of a device
        cells = [_measured_activity(did, stage, moment, cell, found.option.ttft_s) for moment in moments]
        lines.append(chart_line(name.ljust(column) + "run   ", cells, stage.finish_s))
    return [*lines, legend(column + len("plan  "))]


def _measured_activity(did: DeviceTimeline, stage: PlannedStage, moment: float, cell: float, until: float) -> str:
    """Return the activity of a device at a moment, even one shorter than a cell."""
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
    """Prints reports on the replies of one mesh."""

    def __init__(self, opened: OpenedMesh, *, as_json: bool) -> None:
        self._replies, self._as_json = Replies(opened), as_json

    def reply_started(self) -> None:
        """Note that a reply begins."""
        self._replies.on_request()

    def reply_finished(self, summary: Summary) -> None:
        """Print each device's work for the reply that has ended."""
        found = self._replies.on_reply(summary)
        if found is None:
            return
        did, plan = found
        if self._as_json:
            emit(json.dumps({"mesh": comparison(did.option, plan, did.disproved, did.moves)}))
        else:
            print_timeline(err(), did, plan)
            for sentence in did.disproved:
                say(sentence, style="yellow")
