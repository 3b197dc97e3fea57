"""A plan as a picture: one lane per device, from the request to the first token."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.coldstart.plan import Plan, Way

COLOURS = {"load": "#e8b04a", "wait": "#d9d9d9", "network": "#a45a92", "compute": "#479a63"}


def save(plan: Plan, name: str, path: Path) -> None:
    """Draw the plan, and below it the best single device and the even split, on one scale of time.

    Raises `InvalidOption` where matplotlib is missing, and `OSError` where the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidOption("Pictures need matplotlib.", "Install it with: pip install 'edgellm[plots]'") from None
    ways = [("this plan", plan.way), ("best single device", plan.best_single), ("even split", plan.even)]
    there = [(what, way) for what, way in ways if way is not None]
    if plan.way.alone:
        there = [each for each in there if each[0] != "best single device"]
    heights = [len(way.stages) + 1.2 for _, way in there]
    figure: Any = Figure(figsize=(8.0, 0.8 + 0.42 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(there), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (what, way) in zip(panels, there, strict=True):
        lanes(axes, way, f"{what}: first token after {way.ttft_s:.2f} s")
    panels[-1].set_xlim(0.0, 1.02 * max(way.ttft_s for _, way in there))
    panels[-1].set_xlabel("seconds from the request")
    figure.suptitle(name)
    key(figure)
    figure.savefig(path, dpi=130)


def lanes(axes: Any, way: Way, title: str) -> None:
    """Draw one way to hold the model on the given axes: loading above waiting, receiving and computing."""
    for lane, stage in enumerate(way.stages):
        begin = stage.finish_s - stage.compute_s
        sent = stage.received_s - stage.network_s
        _bar(axes, lane - 0.2, 0.0, stage.load_s, "load")
        _bar(axes, lane + 0.2, min(stage.load_s, begin), begin, "wait")
        _bar(axes, lane + 0.2, sent, stage.received_s, "network")
        _bar(axes, lane + 0.2, begin, stage.finish_s, "compute")
    labels = [f"{stage.device}\n{stage.layers}" for stage in way.stages]
    axes.set_yticks(range(len(labels)), labels, fontsize="small")
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.axvline(way.ttft_s, color="black", lw=1.0)
    axes.set_title(title, loc="left", fontsize="medium")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def key(figure: Any) -> None:
    """Add a legend of the colours."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")


def _bar(axes: Any, lane: float, begin: float, end: float, kind: str) -> None:
    if end > begin:
        axes.barh(lane, end - begin, left=begin, height=0.38, color=COLOURS[kind])
