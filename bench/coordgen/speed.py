"""Measure how much faster replies are with retrieved drafts, and that they are never slower (CoordGen, Table 3).

For each task, every case is written by every method in turn, in one process: plain decoding; llama-cpp-python's prompt
lookup, PLD and SAM, which always draft ten tokens; ours on top of those; ours, and ours with or without one of its
parts; and an oracle that knows the reply and drafts as much of it as pays. The text is that of the pair's verifier.
Every pass is computed in full, and the verdict is read off that reply. So weights may be random (the 0.5B shape), and
all methods write the same.

The past cases of a task are remembered from the first one on; one row is ours after `past` other conversations. The
task `none` has nothing to copy: replies of random words to prompts of other words.

Rows are decoding speed as a multiple of plain decoding, the prefill left out; it is timed alone, with calibration and
without. *With the prefill* includes every cost of ours. Then come the share of the oracle's gain, the ratio to
llama-cpp-python, and the time of a drafting step.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any, Literal

import numpy as np

from bench.coordgen.tasks import TASKS, Reply, recorded
from bench.coordgen.timed_methods import N_CTX, Run, all_methods, nothing_to_copy
from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.statistics import spread
from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.hardware import Hardware
from edgellm.engine.model import LoadSpec
from edgellm.llm.cost_curves import measure_curve
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.types import Expected, Ids
from edgellm.storage.model_files import HOME, resolve
from edgellm.verifier.in_process import report_expected
from testkit.forced_verifier import ForcedVerifier
from testkit.gguf import random_model

NONE = "none"


def measured(
    model: Model,
    tasks: Mapping[str, Sequence[Reply]],
    methods: Callable[[CostCurve, str], list[Run]],
    threads: int | None,
    repeats: int,
) -> dict[str, Any]:
    """Return the speed of every method on every task, against plain decoding, which is the first of `methods`: the
    methods on a task, for the cost curve of this model."""
    with Context(model, ContextSpec(n_ctx=N_CTX, threads=threads)) as context:
        curve, verifier = measure_curve(context), ForcedVerifier(model, context)
        found: dict[str, Any] = {"curve_ms": dict(zip(curve.rows, [1e3 * s for s in curve.seconds], strict=True))}
        for task, cases in track(tasks.items(), "tasks"):
            runs = methods(curve, task)
            calibrates = any(run.method.calibrates for run in runs)
            for repeat in range(repeats):
                for number, case in enumerate(cases):
                    expected: list[Expected] = []
                    plain = prefill(context, case.prompt, None)
                    calibrated = prefill(context, case.prompt, expected.append) if calibrates else plain
                    verifier.says(case.prompt, case.reply)
                    for run in runs if (number + repeat) % 2 else runs[::-1]:
                        run.write(verifier, model, case, expected, calibrated if run.method.calibrates else plain)
                for run in runs:
                    run.again()
            found[task] = {run.name: figures(run, runs[0], repeats) for run in runs}
    return found


@contextmanager
def draft_model(file: Path, threads: int | None, own: Hardware) -> Iterator[ModelDrafter]:
    """Yield a draft model, ready to draft for any target."""
    with Model.load(file, LoadSpec(own)) as model, Context(model, ContextSpec(n_ctx=N_CTX, threads=threads)) as context:
        yield ModelDrafter(model, context)


def prefill(context: Context, prompt: Ids, on_expected: Callable[[Expected], None] | None) -> float:
    """Return the seconds for all of `prompt` but its last token, with calibration if `on_expected` is given."""
    context.clear()
    began = perf_counter()
    if on_expected is not None:
        report_expected(context, prompt, 0, on_expected)
    else:
        context.decode(prompt[:-1])
    return perf_counter() - began


def figures(run: Run, plain: Run, repeats: int) -> dict[str, Any]:
    """Return a method's speed over plain decoding, and the time of a drafting step."""
    return {
        "decoding": spread([one / two for one, two in zip(plain.decoding, run.decoding, strict=True)]),
        "decoding_total": total(plain.decoding, repeats) / total(run.decoding, repeats),
        "whole_total": total(plain.whole, repeats) / total(run.whole, repeats),
        "drafting_us": 1e6 * median(run.drafting),
    }


def total(seconds: Sequence[float], repeats: int) -> float:
    """Return the seconds of all cases, the median of the repeats for each: other programs use this processor, too."""
    return float(np.median(np.reshape(seconds, (repeats, -1)), axis=0).sum())


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table for each model: speed over plain decoding, and ours against the others."""
    lines = []
    for model, found in results["models"].items():
        tasks = [task for task in found if not task.endswith("_ms")]
        rows: dict[str, dict[str, str]] = {}
        for task in tasks:
            by_method, ours = found[task], found[task]["ours"]
            share = gain(by_method)
            theirs = ours["decoding_total"] / by_method["llama-cpp-python"]["decoding_total"]
            cells = {name: f"{row['decoding_total']:.2f}" for name, row in by_method.items()} | {
                "ours, with the prefill": f"{ours['whole_total']:.2f}",
                "ours, share of the oracle's gain": "" if share is None else f"{share:.0%}",
                "ours / llama-cpp-python": f"{theirs:.2f}",
                "a drafting step of ours, µs": f"{ours['drafting_us']:.0f}",
            }
            for name, cell in cells.items():
                rows.setdefault(name, {})[task] = cell
        lines += [f"{model}:", "", f"| method | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
        lines += [f"| {name} | {' | '.join(row.get(task, '') for task in tasks)} |" for name, row in rows.items()]
        lines += ["", rows_ms(found["curve_ms"]), ""]
    return "\n".join(lines)


def rows_ms(curve: Mapping[str, float]) -> str:
    """Return how long decodes of some numbers of rows take."""
    return "decodes of 1 / 4 / 8 / 16 rows: " + " / ".join(f"{curve[n]:.1f}" for n in ("1", "4", "8", "16")) + " ms"


def gain(row: dict[str, Any]) -> float | None:
    """Return our share of the oracle's gain; None where that gain is negligible."""
    most = row["oracle"]["decoding_total"] - 1.0
    return (row["ours"]["decoding_total"] - 1.0) / most if most > 0.02 and "ours" in row else None


def measure(
    hardware: Hardware,
    cases: Annotated[int, "of each task; half of them at the 0.5B shape"] = 16,
    past: Annotated[int, "earlier conversations, for the row that has them"] = 200,
    models: Sequence[Literal["own", "0.5b"]] = ("own", "0.5b"),
    threads: int | None = None,
    repeats: int = 2,
) -> Figures:
    """Return the speed of all methods on these models."""
    found = {}
    big, small = resolve(HOME.verifier), resolve(HOME.draft)
    with ExitStack() as stack, Model.load(big, LoadSpec(hardware)) as verifier:
        both = {task: recorded(verifier, task, cases + past) for task in TASKS}
        tasks = {task: replies[:cases] for task, replies in both.items()}
        earlier = {task: replies[cases:] for task, replies in both.items()}
        tasks[NONE] = nothing_to_copy(cases, verifier.n_vocab)
        drafter = stack.enter_context(draft_model(small, threads, hardware))

        def methods(model: Model, *, few: bool) -> Callable[[CostCurve, str], list[Run]]:
            return lambda curve, task: all_methods(curve, model, earlier.get(task, ()), few, drafter)

        if "own" in models:
            found[HOME.verifier] = measured(verifier, tasks, methods(verifier, few=False), threads, repeats)
        if "0.5b" in models:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "half.gguf"
            random_model.write(path, random_model.SHAPES["qwen2.5-0.5b"], "Q4_0", 0)
            half_of = {task: replies[: max(2, cases // 2)] for task, replies in tasks.items()}
            half = stack.enter_context(Model.load(path, LoadSpec(hardware)))
            found["Qwen2.5-0.5B shape, Q4_0"] = measured(half, half_of, methods(half, few=True), threads, 1)
    return {"cases": cases, "past": past, "repeats": repeats, "models": found}
