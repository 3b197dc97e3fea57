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


def print_timeline(console: Console, found: Measured, plan: PlanOption | None) -> None:
    """Print the reply's figures, then a Gantt chart up to the first token, or the moves of a reply in phases."""
    made = _moves(found, plan) if found.moves else _figures(found.option, plan)
    made.caption = None if plan is None else "measured (planned)"
    console.print(made)
    if not found.moves:
        console.print()
        for line in gantt(found, plan, min(WIDEST, console.width - 32)):
            console.print(line)


def _moves(found: Measured, plan: PlanOption | None) -> Table:
    """Return a table of the token and the time at which each placement took over."""
    right = ("FROM TOKEN", "LOADED", "HAD READ THE TEXT", "TOOK OVER")
    made = table(right[0], "ON", *right[1:], right=right, fold="ON")
    for move in found.moves:
        planned = move.planned
        token = f"{move.token + 1}" if planned is None else f"{move.token + 1} ({planned.token + 1})"
        expected = (None, None, None) if planned is None else (planned.loaded, planned.ready, planned.seconds)
        times = zip((move.loaded, move.ready, move.at), expected, strict=True)
        where = ", ".join(f"{one_line(share.name)} {share.layers}" for share in move.shares)
        made.add_row(token, where, *(_both(*one) for one in times))
    for name, key in (("first token", "ttft_s"), ("last token", "reply_s")):
        made.add_row("", name, "", "", _compared(found.option, plan, key))
    return made


def _figures(way: PlanOption, plan: PlanOption | None) -> Table:
    """Return a table of the stages with measured and planned figures."""
    times = ("LOADED", "RECEIVED", "COMPUTED FOR", "DONE")
    made = table("DEVICE", "LAYERS", *times, right=times)
    for stage in way.stages:
        keys = ("load_s", "received_s", "compute_s", "finish_s")
        both = [_compared(stage, planned_for(stage, plan), key) for key in keys]
        made.add_row(one_line(stage.device), str(stage.layers), *both)
    for name, key in (("first token", "ttft_s"), ("per token", "token_s")):
        made.add_row(name, "", "", "", "", _compared(way, plan, key))
    return made


def _compared(measured: object, planned: object | None, key: str) -> str:
    return _both(getattr(measured, key), None if planned is None else getattr(planned, key))


def _both(measured: float, planned: float | None) -> str:
    return format_seconds(measured) if planned is None else f"{format_seconds(measured)} ({format_seconds(planned)})"


def gantt(found: Measured, plan: PlanOption | None, width: int) -> list[Text]:
    """Return two lines for each device, planned and measured, on one scale; without a plan only the latter."""
    width = max(20, width)
    ends = [found.option.ttft_s, *(stage.finish_s for stage in (plan.stages if plan is not None else ()))]
    cell = (max(ends) or 1.0) / width
    moments = [(at + 0.5) * cell for at in range(width)]
    names = [one_line(one.device)[:18] for one in found.timelines]
    column, lines = max(map(len, names), default=0) + 2, []
    for device, did, stage in zip(names, found.timelines, found.option.stages, strict=True):
        head, before = device.ljust(column), planned_for(stage, plan)
        if before is not None:
            cells = [activity_at(before, moment, cell) for moment in moments]
            lines.append(chart_line(f"{head}plan  ", cells, before.finish_s))
            head = " " * column
        cells = [_measured_activity(did, stage, moment, cell, found.option.ttft_s) for moment in moments]
        lines.append(chart_line(f"{head}run   ", cells, stage.finish_s))
    return [*lines, legend(column + len("plan  "))]


def _measured_activity(did: DeviceTimeline, stage: PlannedStage, moment: float, cell: float, until: float) -> str:
    """Return the activity of a device at a moment, even one shorter than a cell."""

    def within(spans: Sequence[tuple[float, float]]) -> bool:
        return any(begin - cell / 2.0 <= moment <= end + cell / 2.0 for begin, end in spans)

    if moment - cell / 2.0 > max(stage.finish_s, stage.load_s) or moment > until + cell:
        return ""
    loading = within(did.loading)
    if within(did.computing):
        return "loading and computing" if loading else "computing"
    if loading:
        return "loading"
    sent = stage.received_s - stage.network_s
    return "sending" if stage.network_s and sent <= moment <= stage.received_s + cell else "idle"


class Reports:
    """Prints reports on the replies of one mesh."""

    def __init__(self, opened: OpenedMesh, *, as_json: bool) -> None:
        self._replies, self._as_json = Replies(opened), as_json

    def reply_started(self) -> None:
        """Note that a reply begins."""
        self._replies.on_request()

    def reply_finished(self, summary: Summary) -> None:
        """Print each device's work for the reply that has ended."""
        if (found := self._replies.on_reply(summary)) is None:
            return
        did, plan = found
        if self._as_json:
            emit(json.dumps({"mesh": comparison(did.option, plan, did.disproved, did.moves)}))
            return
        print_timeline(err(), did, plan)
        for sentence in did.disproved:
            say(sentence, style="yellow")
