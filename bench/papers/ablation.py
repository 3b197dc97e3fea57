"""Measure what CoordGen's techniques add one after the other, in one process (CoordGen, 4.5, Table 3).

The replies are those of the pair's verifier to the paper's tasks; the code pair has four of its own. As in
`bench.coordgen.speed`, every case is written by every method in turn, every pass is computed in full, and the past
cases of a task are remembered from the first one on. The rows are plain decoding, then the paper's way: SAM, which
copies from the context and from past replies, with drafts of a fixed length; with calibration (3.3), by what the model
expects behind each token of the prompt; and with draft reuse (3.4), of what was rejected before. Then the same with
our drafts, which are as long as pays by the cost curve.

Cells are the speed of decoding as a multiple of plain decoding, and behind the slash that of whole replies, with the
prefill and its calibration. The last column has the paper's speeds on its summary task, for three models. The fourth
technique changes graphs while the prompt is read. A processor has none; `bench.papers.switching` does that on a mesh.
"""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from bench.coordgen.methods import Everything, Method, Ours, SuffixLookup
from bench.coordgen.speed import measured, rows_ms
from bench.coordgen.tasks import TASKS, recorded
from bench.coordgen.timed_methods import FIXED, Drafting, Plain, Run
from bench.harness.figures import bar_groups
from bench.harness.results import Figures
from bench.papers.claims import TABLE_3, speeds
from edgellm.engine import Model
from edgellm.engine.hardware import Hardware
from edgellm.engine.model import LoadSpec
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.storage.model_files import HOME, resolve

PAPERS: Mapping[str, tuple[str, ...]] = {
    "SAM": (), "SAM + calibration": ("calibration",), "SAM + calibration + reuse": ("calibration", "reuse"),
}  # fmt: skip
"""The sources beside SAM's own, in the paper's rows."""
OURS: Mapping[str, tuple[str, ...]] = {
    "our copies": ("context", "history"),
    "+ calibration": ("context", "history", "calibration"),
    "+ reuse": ("context", "history", "calibration", "reuse"),
}
"""All sources of drafts in ours."""
CLAIMED = {"plain": "NPU", "SAM": "+SD", "SAM + calibration + reuse": "Ours"}
"""The paper's column of Table 3 for a row; in its last one graphs are switched, too."""


def methods(model: Model, curve: CostCurve, _task: str) -> list[Run]:
    """Return plain decoding, the paper's techniques one after the other, and the same with our drafts."""

    def sam(beside: tuple[str, ...]) -> Callable[[], Drafting]:
        return lambda: Method(SuffixLookup(), beside, lambda copies: Everything(copies, FIXED), model, 0.45)

    def ours(sources: tuple[str, ...]) -> Callable[[], Drafting]:
        return lambda: Ours(sources, DraftPolicy(curve), model)

    return [
        Run("plain", Plain),
        *(Run(name, sam(beside)) for name, beside in PAPERS.items()),
        *(Run(name, ours(sources), curve) for name, sources in OURS.items()),
    ]


def table(found: dict[str, Any]) -> str:
    """Return a Markdown table: a line for each technique that is added, and the paper's numbers beside it."""
    tasks = found["tasks"]
    lines = [f"| | {' | '.join(tasks)} | the paper |", "|---|" + "---|" * (len(tasks) + 1)]
    for name in next(iter(tasks.values())):
        cells = [f"{rows[name]['decoding_total']:.2f} / {rows[name]['whole_total']:.2f}" for rows in tasks.values()]
        lines.append(f"| {name} | {' | '.join(cells)} | {speeds(CLAIMED[name]) if name in CLAIMED else ''} |")
    return "\n".join([*lines, "", rows_ms(found["curve_ms"]), f"{TABLE_3}; the last one with graph switching"]) + "\n"


def plot(found: dict[str, Any], path: Path) -> Path | None:
    """Draw the speed of decoding and that of whole replies with every technique."""
    tasks = found["tasks"]
    panels = {"decoding": "decoding_total", "whole replies": "whole_total"}
    return bar_groups(
        path,
        {
            title: {name: [rows[name][key] for rows in tasks.values()] for name in next(iter(tasks.values()))}
            for title, key in panels.items()
        },
        {title: list(tasks) for title in panels},
        "speed over plain decoding",
    )


def measure(
    hardware: Hardware, cases: Annotated[int, "of each task"] = 16, repeats: int = 2, threads: int | None = None
) -> Figures:
    """Return the speed of each technique on all tasks."""
    with Model.load(resolve(HOME.verifier), LoadSpec(hardware)) as model:
        tasks = {task: recorded(model, task, cases) for task in TASKS}
        found = measured(model, tasks, partial(methods, model), threads, repeats)
    return {
        "cases": cases, "repeats": repeats,
        "curve_ms": found.pop("curve_ms"), "tasks": found,
    }  # fmt: skip
