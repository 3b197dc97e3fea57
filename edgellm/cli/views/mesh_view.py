"""A plan on the screen and for a script, and the work of each device in a reply, planned and measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from edgellm.cli.views.console import emit_json, err, one_line, out, say, table
from edgellm.coldstart.plan import Plan, PlanOption, format_seconds
from edgellm.errors import size
from edgellm.layer_range import LayerRange
from edgellm.llm.mesh_timeline import MeshRecorder

if TYPE_CHECKING:
    from edgellm.coldstart.problem import Home
    from edgellm.llm.mesh_llm import OpenedMesh
    from edgellm.rpc_engine.plan import RpcHome, RpcOption, RpcPlacement
    from edgellm.spec.stats import Summary

MARKS = {
    "loading": ("░", "yellow"), "loading and computing": ("▓", "cyan"),
    "computing": ("█", "green"), "sending": ("▒", "magenta"), "idle": ("·", "dim"),
}  # fmt: skip
"""The mark and colour of each activity of a device in a Gantt chart."""
_WIDEST = 72  # characters of a chart
_OTHERS = 30  # columns of a chart's line beside its cells


def print_plan(plan: Plan, milliseconds: float, moves: Mapping[str, int] | None, units: Mapping[str, str]) -> None:
    """Print a plan, with the bytes of layers that each device still lacks, if known, and its graphics card, if any."""
    model, single, console = plan.home.model, plan.best_single, out()
    gap = "" if plan.optimal else f"within {plan.gap:.1%} of the best possible"
    rows = [("this plan", plan.advised, gap)]
    if plan.advised is not plan.option:
        rows = [("this plan", plan.advised, ""), ("fastest split", plan.option, gap)]
    ways = _ways(
        *rows,
        ("best single device", single, one_line(single.names) if single else ""),
        ("even split", plan.even, ""),
        ("split by device speed", plan.heuristic, ""),
    )
    about = f"{one_line(model.name)}: {model.shape.layers} layers, {size(int(model.bytes))}; {_goal(plan.home)}"
    chart = planned_chart(plan.advised, console.width)
    for part in (about, "", _stages(plan, units), "", *chart, "", ways, ""):
        console.print(part)
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
    for stage in plan.advised.stages:
        took = (stage.load_s, stage.wait_s, stage.network_s, stage.compute_s, stage.finish_s)
        layers = str(stage.layers)
        made.add_row(named(stage.device), layers, size(int(stage.size)), *map(format_seconds, took), stage.reason)
    for device, reason in plan.idle:
        made.add_row(named(device), "-", *("",) * 6, reason, style="dim")
    return made


def planned_chart(way: PlanOption, width: int) -> list[Text]:
    """Return a Gantt chart of a plan for a screen of `width` columns: a line for each device, then a legend."""
    return _chart([(stage.device, "", stage.to_json()) for stage in way.stages], 0.0, width)


def measured_chart(found: Mapping[str, Any], width: int) -> list[Text]:
    """Return a Gantt chart of a reply: the planned line of each device, if any, above the measured one."""
    bars: list[_Bar] = []
    for stage in found["stages"]:
        if stage["planned"] is not None:
            bars.append((stage["device"], "plan  ", stage["planned"]))
        bars.append(("" if stage["planned"] else stage["device"], "run   ", stage["measured"]))
    return _chart(bars, found["ttft_s"], width)


_Bar = tuple[str, str, Mapping[str, Any]]
"""A device's line of a chart: its name, what the line shows, and the times of its stage."""


def _chart(bars: Sequence[_Bar], end: float, width: int) -> list[Text]:
    """Return a line for each bar, from the request to the last one's end, at least `end`; then a legend."""
    names = [one_line(name)[:18] for name, *_ in bars]
    column, seen = max(map(len, names), default=0) + 2, set[str]()
    cells = max(20, min(_WIDEST, width - _OTHERS))
    cell, lines = (max([end, *(times["finish_s"] for *_, times in bars)]) or 1.0) / cells, []
    for name, (_, kind, times) in zip(names, bars, strict=True):
        line = Text(name.ljust(column) + kind)
        row = [_activity(times, at * cell, (at + 1) * cell) for at in range(cells)]
        for doing, run in groupby(row):
            mark, style = MARKS.get(doing, (" ", ""))
            line.append(mark * len(list(run)), style)
        lines.append(line.append(f" {format_seconds(times['finish_s'])}"))
        seen.update(row)
    legend = Text(" " * (column + max((len(kind) for _, kind, _ in bars), default=0)))
    for doing, (mark, style) in MARKS.items():
        if doing in seen:
            legend.append(mark, style).append(f" {doing}  ")
    return [*lines, legend]


def _activity(times: Mapping[str, Any], begin: float, end: float) -> str:
    """Return the activity of a stage within a cell, even a shorter one; "" behind the last."""
    spans = {
        "sending": (times["received_s"] - times["network_s"], times["received_s"]),
        "computing": (times["finish_s"] - times["compute_s"], times["finish_s"]), "loading": (0.0, times["load_s"]),
    }  # fmt: skip
    found = [doing for doing, (one, other) in spans.items() if one < end and begin < other]
    if {"loading", "computing"} <= set(found):
        return "loading and computing"
    return found[0] if found else "" if times["finish_s"] <= begin else "idle"


def _ways(*rows: tuple[str, PlanOption | RpcOption | None, str]) -> Table:
    times = ("FIRST TOKEN", "PER TOKEN", "REPLY")
    made = table("PLAN", *times, "", right=times)
    for name, way, remark in rows:
        if way is None:
            made.add_row(name, "does not fit", "", "", "", style="dim")
        else:
            made.add_row(name, *map(format_seconds, (way.ttft_s, way.token_s, way.reply_s)), remark)
    return made


def _moves(plan: Plan, moves: Mapping[str, int] | None) -> str:
    """Return the layers that each device's disk needs before the first run."""
    needed = [(stage.device, int(stage.size)) for stage in plan.advised.stages]
    lacking = needed if moves is None else [(name, count) for name, count in moves.items() if count]
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
    return {
        **found.advised.to_json(), "objective": found.home.objective, "overlap": found.home.overlap,
        "planner_ms": milliseconds, "optimal": found.optimal, "gap": found.gap, "reason": found.reason,
        "advice": found.advice,
        "unused": [{"device": device, "reason": reason} for device, reason in found.idle],
        "warm_single_s": seconds.pop("warm_single"), "baselines": seconds,
    }  # fmt: skip


def print_rpc_plan(placed: RpcPlacement, model: str) -> None:
    """Print which device holds which layers, the times beside those of other ways, and the advice."""
    costs, console = placed.home.model, out()
    all_bytes = size(sum(costs.layer_bytes) + costs.head)
    about = f"{one_line(costs.name)}: {costs.layers} layers, {all_bytes}, over llama.cpp's RPC; {_goal(placed.home)}"
    layers = table("DEVICE", "LAYERS", "SIZE", right=("LAYERS", "SIZE"))
    for share in placed.option.shares:
        layers.add_row(one_line(share.name), str(share.layers), size(costs.weights(share.layers)))
    for name, why in placed.left_out:
        layers.add_row(one_line(name), "-", one_line(why), style="dim")
    elsewhere = placed.elsewhere
    ways = _ways(
        ("this plan", placed.option, ""),
        ("this device alone", placed.alone, ""),
        ("one model each", elsewhere, f"whole on {one_line(elsewhere.shares[0].name)}" if elsewhere else ""),
    )
    for part in (about, "", layers, "", ways, ""):
        console.print(part)
    console.print(Text(placed.advice, style="bold"), soft_wrap=True)
    if (better := placed.one_model_each(model)) is not None:
        console.print(Text(better), soft_wrap=True)


def rpc_figures(placed: RpcPlacement) -> dict[str, Any]:
    """Return the plan for a script; layers are counted from 1, both ends included."""

    def times(way: RpcOption | None) -> dict[str, Any] | None:
        return None if way is None else {
            "load_s": way.load_s, "ttft_s": way.ttft_s, "token_s": way.token_s, "reply_s": way.reply_s,
            "shares": [share.to_json() for share in way.shares],
        }  # fmt: skip

    return {
        "plan": times(placed.option), "alone": times(placed.alone), "one_model_each": times(placed.elsewhere),
        "objective": placed.home.objective, "advice": placed.advice,
        "left_out": [{"device": name, "reason": why} for name, why in placed.left_out],
    }  # fmt: skip


def say_context(positions: int | None) -> None:
    """Print the context for which a plan counts memory, if it is known."""
    if positions is not None:
        say(f"Memory is counted for a context of {positions:,} tokens; change it with --ctx-size.", style="dim")


class Reports(MeshRecorder):
    """Prints reports on the replies of one mesh, one at a time."""

    def __init__(self, opened: OpenedMesh, *, asked: bool, as_json: bool) -> None:
        super().__init__(opened, asked=asked)
        self._as_json = as_json

    def reply_started(self) -> None:
        """Note that a reply starts; one before it that has failed is over."""
        self._running = 0
        super().reply_started()

    def reply_finished(self, summary: Summary | None) -> dict[str, Any] | None:
        """Print each device's work for the reply that has ended, and return it."""
        found = super().reply_finished(summary)
        if found is not None and self._as_json:
            emit_json({"mesh": found}, indent=None)
        elif found is not None:
            print_timeline(err(), found)
        return found


def print_timeline(console: Console, found: Mapping[str, Any]) -> None:
    """Print the reply's figures, then a Gantt chart up to the first token, or the moves of a reply in phases."""
    made = _taken_over(found) if "moves" in found else _measured_stages(found)
    made.caption = None if found["planned_ttft_s"] is None else "measured (planned)"
    console.print(made)
    if "moves" not in found:
        for line in ("", *measured_chart(found, console.width)):
            console.print(line)


def _taken_over(found: Mapping[str, Any]) -> Table:
    right = ("FROM TOKEN", "LOADED", "HAD READ THE TEXT", "TOOK OVER")
    made = table(right[0], "ON", *right[1:], right=right, fold="ON")
    for move in found["moves"]:
        token = f"{move['after_token'] + 1}"
        if move["planned"] is not None:
            token += f" ({move['planned']['after_token'] + 1})"
        where = ", ".join(f"{one_line(stage['device'])} {_layers(stage)}" for stage in move["stages"])
        made.add_row(token, where, *(_both(move, move["planned"], key) for key in ("loaded_s", "ready_s", "at_s")))
    for name, key in (("first token", "ttft_s"), ("last token", "reply_s")):
        made.add_row("", name, "", "", _beside_plan(found, key))
    return made


def _measured_stages(found: Mapping[str, Any]) -> Table:
    times = ("LOADED", "RECEIVED", "COMPUTED FOR", "DONE")
    made = table("DEVICE", "LAYERS", *times, right=times)
    for stage in found["stages"]:
        keys = ("load_s", "received_s", "compute_s", "finish_s")
        both = (_both(stage["measured"], stage["planned"], key) for key in keys)
        made.add_row(one_line(stage["device"]), _layers(stage), *both)
    for name, key in (("first token", "ttft_s"), ("per token", "token_s")):
        made.add_row(name, "", "", "", "", _beside_plan(found, key))
    return made


def _layers(share: Mapping[str, Any]) -> str:
    return str(LayerRange(share["first_layer"] - 1, share["last_layer"]))


def _beside_plan(found: Mapping[str, Any], key: str) -> str:
    planned = found[f"planned_{key}"]
    return _both(found, None if planned is None else {key: planned}, key)


def _both(measured: Mapping[str, Any], planned: Mapping[str, Any] | None, key: str) -> str:
    time = format_seconds(measured[key])
    return time if planned is None else f"{time} ({format_seconds(planned[key])})"
