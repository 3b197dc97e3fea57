"""Pictures of the results, each beside a figure of a paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.coldstart_figures import FIGURES as COLDSTART
from bench.gantt import progressive

Figures = dict[str, Any]


_OF_OTHER_CHUNKS = ("hybrid_even", "auto_1", "auto_4", "synera_4", "published")
"""Gates whose shares are of other chunks than `auto`'s: they are compared by what they cost."""


def _pyplot() -> Any | None:
    """Matplotlib, for files; None where it is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _axes(title: str, x: str, y: str, **more: Any) -> tuple[Any, Any] | None:
    """An empty figure; None where matplotlib is missing."""
    plt = _pyplot()
    if plt is None:
        return None
    figure, axes = plt.subplots(figsize=(6.4, 4.2))
    axes.set(title=title, xlabel=x, ylabel=y, **more)
    axes.grid(alpha=0.3)
    return figure, axes


def _saved(figure: Any, axes: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=130)
    plt.close(figure)
    return path


def quality(found: Figures, path: Path) -> Path | None:
    """Mean score against the share that was really verified, and against what that costs, a line a gate (Fig. 14)."""
    plt = _pyplot()
    if plt is None:
        return None
    budgets = sorted(found["budgets"], key=float)
    gates = found["budgets"][budgets[0]]["gates"]
    figure, panels = plt.subplots(1, 2, figsize=(12.8, 4.6), sharey=True)
    for axes, title, kind, label in (
        (panels[0], "What a budget buys", "share", "share of chunks verified"),
        (panels[1], "What that costs", "passes_per_token", "verifier passes a token"),
    ):
        axes.set_prop_cycle(color=[*plt.get_cmap("tab20").colors[::2], "black", "gold"])
        ends = [found["never"], found["always"]] if kind == "share" else [found["never"]]
        for name in gates:
            rows = [found["budgets"][budget]["gates"][name] for budget in budgets]
            if kind not in rows[0] or name == "hybrid_even" or (kind == "share" and name in _OF_OTHER_CHUNKS):
                continue
            points = sorted((row[kind] or 0.0, row["mean"]) for row in [*rows, *ends])
            label_of = name.replace("_unheeded", ", context not heeded").replace("_", ", chunks of ")
            axes.plot(*zip(*points, strict=True), {"auto": "-o"}.get(name, "--."), label=label_of)
        axes.set(xlabel=label, ylabel="mean score of all families, %", title=title)
        axes.grid(alpha=0.3)
    for name, style in (("oracle", ":k"), ("oracle_heeded", "-.k")):
        best = [found["budgets"][budget]["gates"][name]["mean"] for budget in budgets]
        panels[0].plot([float(budget) for budget in budgets], best, style, label=name.replace("_", ", context "))
    for axes in panels:
        axes.legend(fontsize="small", loc="lower right")
    figure.savefig(path, bbox_inches="tight", dpi=130)
    plt.close(figure)
    return path


def stalls(found: Figures, path: Path) -> Path | None:
    """Time between tokens of every way."""
    made = _axes("A device's pace: 30 ms a token, 60 ms a verification", "time between tokens, ms", "")
    if made is None:
        return None
    figure, axes = made
    ways = found["ways"]
    axes.barh(list(ways), [row["time_between_tokens_ms"] for row in ways.values()], label="mean")
    axes.axvline(ways["draft model alone"]["time_between_tokens_ms"], color="k", ls=":", label="draft model alone")
    axes.invert_yaxis()
    return _saved(figure, axes, path)


def bandwidth(found: Figures, path: Path) -> Path | None:
    """Time between tokens against bandwidth (Fig. 13)."""
    made = _axes(
        "Slower and slower networks", "bandwidth, Mbit/s", "time between tokens, ms", xscale="log", yscale="log"
    )
    if made is None:
        return None
    figure, axes = made
    rows = found["networks"]
    for name, style in (("alone", ":k"), ("compressed", "-o"), ("whole", "--s")):
        points = [row[name]["time_between_tokens_ms"] for row in rows]
        axes.plot([row["megabits"] for row in rows], points, style, label=name)
    return _saved(figure, axes, path)


def exits(found: Figures, path: Path) -> Path | None:
    """Score and share of tokens that leave early, against the threshold (Fig. 17)."""
    made = _axes("The early exit's threshold", "threshold of the margin", "%")
    if made is None:
        return None
    figure, axes = made
    rows = found["thresholds"]
    for name, style in (("score", "-o"), ("left", "--s"), ("agreement", ":^")):
        scale = 1.0 if name == "score" else 100.0
        axes.plot([row["threshold"] for row in rows], [scale * row[name] for row in rows], style, label=name)
    return _saved(figure, axes, path)


def load(found: Figures, path: Path) -> Path | None:
    """Memory, descriptors and open sessions over time, of a verifier whose devices come and go."""
    plt = _pyplot()
    if plt is None:
        return None
    figure, (memory, counts) = plt.subplots(1, 2, figsize=(12.8, 4.2))
    minutes = [one["at"] / 60 for one in found["samples"]]
    for key, name in (("rss", "verifier"), ("device_rss", f"{found['devices'] // 4} devices")):
        memory.plot(minutes, [one[key] / 2**20 for one in found["samples"]], label=name)
    for key, style, name in (("fds", "-", "descriptors"), ("sessions", ":", "sessions"), ("threads", "--", "threads")):
        counts.plot(minutes, [one[key] for one in found["samples"]], style, label=name)
    memory.set(title=f"{found['devices']} devices come and go", xlabel="minutes", ylabel="memory, MiB", ylim=(0, None))
    counts.set(title="The verifier's process", xlabel="minutes", ylabel="open", ylim=(0, None))
    for axes in (memory, counts):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, bbox_inches="tight", dpi=130)
    plt.close(figure)
    return path


def speed(found: Figures, path: Path) -> Path | None:
    """Decoding speed of every method on every task (Table 3), a panel a model."""
    models = found["models"]
    return _bars(
        path,
        {
            model: {
                way: [tasks[task][way]["decoding_total"] for task in tasks if not task.endswith("_ms")]
                for way in ("llama-cpp-python", "PLD", "SAM", "ours", "oracle")
                if all(way in tasks[task] for task in tasks if not task.endswith("_ms"))
            }
            for model, tasks in models.items()
        },
        {model: [task for task in tasks if not task.endswith("_ms")] for model, tasks in models.items()},
        "speed over plain decoding",
    )


def acceptance(found: Figures, path: Path) -> Path | None:
    """Tokens a verification brings (Table 4), a panel a model."""
    models = found["models"]
    wanted = ("PLD", "PLD + ours", "SAM", "SAM + ours", "automaton with counts + ours")
    return _bars(
        path,
        {model: {way: [row[way] for row in tasks.values()] for way in wanted} for model, tasks in models.items()},
        {model: list(tasks) for model, tasks in models.items()},
        "tokens a verification",
    )


def _bars(path: Path, panels: dict[str, dict[str, list[float]]], groups: dict[str, list[str]], y: str) -> Path | None:
    """Groups of bars, one bar for each name of a panel; a line at 1."""
    plt = _pyplot()
    if plt is None:
        return None
    figure, all_axes = plt.subplots(1, len(panels), figsize=(6.4 * len(panels), 4.2), squeeze=False)
    for axes, (title, rows) in zip(all_axes[0], panels.items(), strict=True):
        width = 0.8 / len(rows)
        for number, (name, values) in enumerate(rows.items()):
            places = [at + (number - (len(rows) - 1) / 2) * width for at in range(len(values))]
            axes.bar(places, values, width, label=name)
        axes.set(title=title, ylabel=y)
        axes.set_xticks(range(len(groups[title])), groups[title])
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    figure.savefig(path, bbox_inches="tight", dpi=130)
    plt.close(figure)
    return path


FIGURES: dict[str, Callable[[Figures, Path], Path | None]] = {
    "synera_quality": quality,
    "stalls": stalls,
    "bandwidth": bandwidth,
    "exits": exits,
    "load": load,
    "progressive": progressive,
    "retrieval_speed": speed,
    "retrieval_acceptance": acceptance,
    **COLDSTART,
}
