"""Gantt charts of graph switching: computations and loads by block, and each policy's distance from the optimum."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

Figures = dict[str, Any]

COLOURS = ("#3f74ad", "#dd8232", "#479a63", "#a45a92")
WHITE = 0.62  # share of white in a prefill graph's colour
LINES = {
    "synchronous": ("#888888", ":s"),
    "naive": ("#3f74ad", "--^"),
    "progressive": ("#c44e4e", "-o"),
    "unhurried": ("#dd8232", "-v"),
    "beam": ("#479a63", "-D"),
}
NAMES = {
    "synchronous": "synchronous",
    "naive": "naive asynchronous",
    "progressive": "progressive: the paper's greedy",
    "unhurried": "unhurried: the greedy, begun later",
    "beam": "beam",
}


def plot(found: Figures, path: Path) -> Path | None:
    """Draw the examples above, a column each, and below the distance from the optimum against the slowdown.

    None where matplotlib is missing.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure: Any = plt.figure(figsize=(12.5, 8.6), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=(1.15, 1.0), hspace=0.04)
    for part, example in zip(above.subfigures(1, len(found["examples"])), found["examples"], strict=True):
        _example(part, example)
    _key(above)
    mean, most = below.subplots(1, 2)
    _distance(mean, found["slowdowns"], "mean", "on average")
    _distance(most, found["slowdowns"], "max", "at worst")
    mean.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _example(figure: Any, example: Figures) -> None:
    rows = example["ways"]
    panels = figure.subplots(len(rows), 1, sharex=True)
    for axes, (name, way) in zip(panels, rows.items(), strict=True):
        best = " (the optimum)" if way["latency"] == example["optimum"] else ""
        gantt(axes, way, f"{NAMES[name]}: {way['latency']:g}{best}")
    panels[-1].set_xlim(0.0, 1.02 * max(way["latency"] for way in rows.values()))
    panels[-1].set_xlabel("time")
    figure.suptitle(example["title"], fontsize="large")


def gantt(axes: Any, timeline: Figures, title: str) -> None:
    """Draw a schedule: a lane of computations, pale with prefill graphs and full with decode graphs, and one of loads.

    `timeline` as `dataclasses.asdict` makes it of a `Timeline`, with its latency.
    """
    for bar in timeline["computes"]:
        _bar(axes, 1, bar, "full" if bar["switched"] else "pale")
    for bar in timeline["loads"]:
        _bar(axes, 0, bar, "hatched")
    for one, two in pairwise(timeline["computes"]):
        if one["chunk"] < two["chunk"]:
            axes.plot([one["end"]] * 2, [0.5, 1.5], color="black", lw=1.0)
    axes.axvline(timeline["latency"], color="black", lw=1.6)
    axes.set_yticks([1, 0], ["compute", "load"])
    axes.set_ylim(-0.5, 1.5)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize="medium")


def _bar(axes: Any, lane: int, bar: Figures, kind: str) -> None:
    length = bar["end"] - bar["start"]
    axes.barh(lane, length, left=bar["start"], height=0.78, **_look(COLOURS[bar["block"] % len(COLOURS)], kind))
    box = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"} if kind == "hatched" else None
    colour = "white" if kind == "full" else "black"
    place = {"ha": "center", "va": "center", "fontsize": "small"}
    axes.text(bar["start"] + length / 2, lane, str(bar["block"]), color=colour, bbox=box, **place)


def _look(colour: str, kind: str) -> Figures:
    from matplotlib.colors import to_rgb

    if kind == "hatched":
        return {"facecolor": "white", "edgecolor": colour, "hatch": "/////"}
    pale = tuple(WHITE + (1.0 - WHITE) * part for part in to_rgb(colour))
    return {"facecolor": colour if kind == "full" else pale, "edgecolor": "white"}


def _key(figure: Any) -> None:
    from matplotlib.patches import Patch

    kinds = {"pale": "prefill graph", "full": "decode graph", "hatched": "its load"}
    handles = [Patch(label=label, **_look("#555555", kind)) for kind, label in kinds.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize="small")


def _distance(axes: Any, rows: list[Figures], figure: str, what: str) -> None:
    slowdowns = [row["slowdown"] for row in rows]
    for name, (colour, style) in LINES.items():
        points = [100.0 * row["ways"][name][figure] for row in rows]
        axes.plot(slowdowns, points, style, color=colour, label=NAMES[name], markersize=5)
    axes.set(xlabel="a decode graph's time for a chunk, in times of the prefill graph's", ylabel="above the optimum, %")
    axes.set_title(f"Distance from the optimum, {what}", fontsize="large")
    axes.set_ylim(bottom=-0.02 * axes.get_ylim()[1])
    axes.grid(alpha=0.3)
