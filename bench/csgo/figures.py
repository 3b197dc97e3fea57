"""CSGO's Figures 3 to 5 with our numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from edgellm.coldstart.plan import PlannedStage, PlanOption
from edgellm.layer_range import LayerRange
from edgellm.llm.mesh_timeline import key, lanes

Figures = dict[str, Any]
NAMES = {"ideal_single": "ideal single device", "even": "even", "heuristic": "heuristic", "optimum": "optimum"}
STYLES = {"ideal_single": ":^k", "even": "--s", "heuristic": "-.D", "optimum": "-o"}
PANELS = (("even", 256), ("even", 8192), ("heuristic", 256), ("heuristic", 8192), ("optimum", 256), ("optimum", 2048),
          ("optimum", 8192))  # fmt: skip
"""Figures 4a-d and 5a-c, in their order."""


def _figure(**more: Any) -> Any | None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    return Figure(layout="constrained", **more)


def plot(found: Figures, path: Path) -> Path | None:
    """Draw Figures 3a and 3b above the Gantt charts of Figures 4 and 5; None where matplotlib is missing."""
    figure = _figure(figsize=(13.0, 14.0))
    if figure is None:
        return None
    above, below = figure.subfigures(2, 1, height_ratios=(1.0, 2.3))
    delay, saved = above.subplots(1, 2)
    lengths = [line["tokens"] for line in found["lengths"]]
    for name, style in STYLES.items():
        delay.plot(lengths, [line["seconds"][name] for line in found["lengths"]], style, label=NAMES[name])
    streamed = [line["overlaps"]["streamed"] for line in found["lengths"]]
    delay.plot(lengths, streamed, "-", color="0.6", label="optimum, layers streamed (not in the paper)")
    delay.set(title="Cold start delay (Fig. 3a)", ylabel="seconds", ylim=(0, None))
    for at, name in enumerate(("ideal_single", "even", "heuristic")):
        heights = [line["saved"][name] for line in found["lengths"]]
        saved.bar([x + 0.27 * (at - 1) for x in range(len(lengths))], heights, 0.25, label=f"against {NAMES[name]}")
    saved.axhspan(found["claims"]["least"], found["claims"]["most"], color="0.92", zorder=0, label="the paper's range")
    saved.set(title="What the optimum saves (Fig. 3b)", ylabel="%", xlabel="tokens of the prompt")
    saved.set_xticks(range(len(lengths)), lengths)
    delay.set_xscale("log", base=2)
    delay.set_xticks(lengths, lengths)
    delay.set_xlabel("tokens of the prompt")
    for axes in (delay, saved):
        axes.legend(fontsize="small", frameon=False)
        axes.grid(alpha=0.3, axis="y")
    panels = below.subplots(4, 2).reshape(-1)
    by_length = {line["tokens"]: line for line in found["lengths"]}
    for axes, (name, tokens) in zip(panels, PANELS, strict=False):
        way = _way(by_length[tokens]["ways"][name])
        lanes(axes, way, f"{NAMES[name]}, {tokens} tokens: {way.ttft_s:.2f} s")
        axes.set_xlim(0.0, 1.02 * way.ttft_s)
    panels[-1].set_axis_off()
    key(below)
    figure.savefig(path, dpi=110)
    return path


def _way(found: Figures) -> PlanOption:
    """Return the option that `PlanOption.to_json` returned as `found`."""
    stages = []
    for row in found["stages"]:
        times = {name: value for name, value in row.items() if name not in ("first_layer", "last_layer")}
        stages.append(PlannedStage(layers=LayerRange(row["first_layer"] - 1, row["last_layer"]), **times))
    return PlanOption(tuple(stages), found["ttft_s"], found["token_s"], found["reply_s"])
