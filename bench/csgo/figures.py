"""CSGO's Figures 3 to 5 with our numbers."""

from pathlib import Path
from typing import Any

from bench.harness.figures import pyplot

Figures = dict[str, Any]
COLOURS = {"load": "#e8b04a", "wait": "#d9d9d9", "network": "#a45a92", "compute": "#479a63"}
NAMES = {"ideal_single": "ideal single device", "even": "even", "heuristic": "heuristic", "optimum": "optimum"}
STYLES = {"ideal_single": ":^k", "even": "--s", "heuristic": "-.D", "optimum": "-o"}
PANELS = (("even", 256), ("even", 8192), ("heuristic", 256), ("heuristic", 8192), ("optimum", 256), ("optimum", 2048),
          ("optimum", 8192))  # fmt: skip
"""Figures 4a-d and 5a-c, in their order."""


def plot(found: Figures, path: Path) -> Path | None:
    """Draw Figures 3a and 3b above the Gantt charts of Figures 4 and 5; None where matplotlib is missing."""
    plt = pyplot()
    if plt is None:
        return None
    figure = plt.figure(figsize=(13.0, 14.0), layout="constrained")
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
        _lanes(axes, by_length[tokens]["ways"][name], f"{NAMES[name]}, {tokens} tokens")
    panels[-1].set_axis_off()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour, label=name) for name, colour in COLOURS.items()]
    below.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize="small")
    figure.savefig(path, dpi=110)
    return path


def _lanes(axes: Any, way: Figures, title: str) -> None:
    """Draw a plan in JSON on the given axes: loading above waiting, receiving and computing."""
    for lane, stage in enumerate(way["stages"]):
        load, begin, received = stage["load_s"], stage["finish_s"] - stage["compute_s"], stage["received_s"]
        spans = {
            "load": (0.0, load), "wait": (min(load, begin), begin), "compute": (begin, stage["finish_s"]),
            "network": (received - stage["network_s"], received),
        }  # fmt: skip
        for kind, (left, right) in spans.items():
            axes.barh(lane - 0.2 + 0.4 * (kind != "load"), right - left, 0.38, left, color=COLOURS[kind])
    axes.set_yticks(range(len(way["stages"])), [stage["device"] for stage in way["stages"]], fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0.0, 1.02 * way["ttft_s"])
    axes.set_title(f"{title}: {way['ttft_s']:.2f} s", loc="left", fontsize="medium")
