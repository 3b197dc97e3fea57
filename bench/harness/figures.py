"""Pictures of results, where matplotlib is installed."""

from pathlib import Path
from typing import Any


def pyplot() -> Any | None:
    """Return matplotlib's pyplot for drawing into files; None where it is not installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        return None
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def bar_groups(
    path: Path,
    panels: dict[str, dict[str, list[float]]],
    groups: dict[str, list[str]],
    y: str,
    base: float | None = 1.0,
) -> Path | None:
    """Draw a panel for each of `panels` with groups of bars, a bar in each for every name, and a line at `base`."""
    plt = pyplot()
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
        if base is not None:
            axes.axhline(base, color="black", linewidth=0.8)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3)
    figure.savefig(path, bbox_inches="tight", dpi=130)
    plt.close(figure)
    return path
