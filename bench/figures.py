"""Pictures of the results, each beside a figure of a paper."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.coldstart_figures import FIGURES as COLDSTART
from bench.gantt import progressive

Figures = dict[str, Any]


def _axes(title: str, x: str, y: str, **more: Any) -> tuple[Any, Any] | None:
    """An empty figure; None where matplotlib is missing."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

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
    """Mean score against the share that was really verified, a line a gate (Fig. 14)."""
    made = _axes("What a budget buys", "share of chunks verified", "mean score of all families, %")
    if made is None:
        return None
    figure, axes = made
    budgets = sorted(found["budgets"], key=float)
    low, high = found["never"]["mean"], found["always"]["mean"]
    names = [name for name in found["budgets"][budgets[0]]["gates"] if name != "published"]
    for name in names:
        rows = [found["budgets"][budget]["gates"][name] for budget in budgets]
        shares = [row.get("share") or float(budget) for row, budget in zip(rows, budgets, strict=True)]
        style = {"auto": "-o", "oracle": ":"}.get(name, "--.")
        axes.plot([0.0, *shares, 1.0], [low, *(row["mean"] for row in rows), high], style, label=name)
    return _saved(figure, axes, path)


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


def speed(found: Figures, path: Path) -> Path | None:
    """Decoding speed of every method on every task (Table 3), a panel a model."""
    models = found["models"]
    return _bars(
        path,
        {
            model: {
                way: [tasks[task][way]["decoding_total"] for task in tasks if task != "curve_ms"]
                for way in ("llama-cpp-python", "PLD", "SAM", "ours", "oracle")
            }
            for model, tasks in models.items()
        },
        {model: [task for task in tasks if task != "curve_ms"] for model, tasks in models.items()},
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
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

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
    "progressive": progressive,
    "retrieval_speed": speed,
    "retrieval_acceptance": acceptance,
    **COLDSTART,
}
