"""How much faster replies are with retrieved drafts, and that they are never slower (CoordGen, Table 3).

    python -m bench.retrieval_speed [--cases 40] [--models bundled 0.5b] [--threads N] [--repeats 3] [--name ...]

For each task every case is written by every method in turn, in one process: plain decoding; llama-cpp-python's prompt
lookup; PLD, SAM and ours with the same cost curve; an oracle that knows the reply and drafts as much of it as pays. The
text is the bundled verifier's reply, and every pass is computed in full; at the 0.5B shape (random weights) the verdict
is read off that reply, at the bundled verifier's too, so that all methods write the same. `none` is a task on which
nothing can be copied: replies of random words behind prompts of others. Decoding speed leaves the prefill out; whole
speed does not, and has calibration, indexing and all else of ours in it.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from bench import random_gguf
from bench.copying import SEED, TASKS, Method, Oracle, PromptLookup, Reply, SuffixLookup, recorded
from bench.forced import ForcedVerifier
from bench.report import spread, write
from edgellm.api.retrieval import measure_curve
from edgellm.engine import Context, Model
from edgellm.spec.curve import MOST, CostCurve, LengthRule
from edgellm.spec.gates import AlwaysGate
from edgellm.spec.loop import Limits, generate
from edgellm.spec.protocols import Drafter
from edgellm.spec.records import GREEDY, Chunk, Ids, Sampling
from edgellm.spec.retrieval.sources import Context as Seen
from edgellm.spec.stats import Stats
from edgellm.store import resolve

NONE = "none"
N_CTX = 1024
OURS = ("history", "analogy", "reuse")


class TheirLookup:
    """llama-cpp-python's drafter in our loop, as its `Llama` asks it: always, for ten tokens."""

    def __init__(self) -> None:
        self._lookup = LlamaPromptLookupDecoding()

    def draft(self, prefix: Ids, gamma: int, sampling: Sampling) -> Chunk:  # noqa: ARG002
        found = np.asarray(self._lookup(prefix.astype(np.intc)))[:gamma]
        return Chunk(found.astype(np.int32), retrieved=True)

    def close(self) -> None: ...


def nothing_to_copy(cases: int, vocabulary: int) -> list[Reply]:
    """Random prompts and replies of other random tokens."""
    rng = random.Random(SEED)
    middle = vocabulary // 2
    return [
        Reply(
            np.array([rng.randrange(300, middle) for _ in range(60)], dtype=np.int32),
            tuple(rng.randrange(middle, vocabulary) for _ in range(40)),
        )
        for _ in range(cases)
    ]


class Way:
    """A method on a stream of cases, and what it has taken."""

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name, self._make = name, make
        self.method = make()
        self.decoding: list[float] = []
        self.whole: list[float] = []
        self.drafting: list[float] = []

    def again(self) -> None:
        """Forgets past cases."""
        self.method = self._make()

    def write(self, verifier: ForcedVerifier, alphabet: Model, case: Reply) -> None:
        """Writes one case, and notes the seconds."""
        verifier.says(case.prompt, case.reply)
        stats, began = Stats(), perf_counter()
        drafter: Drafter | None = None
        if isinstance(self.method, Method):
            self.method.begin(case.prompt)
            drafter = self.method.drafter
        elif isinstance(self.method, Oracle):
            self.method.begin(case)
            drafter = self.method
        elif self.method is not None:
            drafter = self.method
        taken: list[float] = []
        for _ in generate(
            case.prompt,
            alphabet=alphabet,
            drafter=drafter,
            gate=AlwaysGate(),
            verifier=verifier,
            sampling=GREEDY,
            limits=Limits(len(case.reply), N_CTX, MOST),
            stats=stats,
            watch=lambda _chunk, _written, _verdict, drafting, _waiting: taken.append(drafting),
        ):
            pass
        self.whole.append(perf_counter() - began)
        self.decoding.append(stats.seconds)
        self.drafting += taken
        if isinstance(self.method, Method):
            self.method.end(case)


def ways(curve: CostCurve, model: Model) -> list[Way]:
    """All of them, plain decoding first."""
    return [
        Way("plain", lambda: None),
        Way("llama-cpp-python", TheirLookup),
        Way("PLD", lambda: Method(PromptLookup(), (), LengthRule(curve), model, 0.35)),
        Way("SAM", lambda: Method(SuffixLookup(), (), LengthRule(curve), model, 0.45)),
        Way("ours", lambda: Method(Seen(), OURS, LengthRule(curve), model, 0.35)),
        Way("oracle", lambda: Oracle(LengthRule(curve))),
    ]


def measured(model: Model, tasks: Mapping[str, Sequence[Reply]], threads: int | None, repeats: int) -> dict[str, Any]:
    """Speed of every way on every task, against plain decoding."""
    with Context(model, n_ctx=N_CTX, threads=threads) as context:
        curve = measure_curve(context)
        verifier = ForcedVerifier(model, context)
        found: dict[str, Any] = {"curve_ms": dict(zip(curve.rows, [1e3 * s for s in curve.seconds], strict=True))}
        for task, cases in tasks.items():
            all_ways = ways(curve, model)
            for repeat in range(repeats):
                for number, case in enumerate(cases):
                    turn = all_ways if (number + repeat) % 2 else all_ways[::-1]
                    for way in turn:
                        way.write(verifier, model, case)
                for way in all_ways:
                    way.again()
            plain = all_ways[0]
            found[task] = {
                way.name: {
                    "decoding": spread(ratios(plain.decoding, way.decoding)),
                    "decoding_total": sum(plain.decoding) / sum(way.decoding),
                    "whole_total": sum(plain.whole) / sum(way.whole),
                    "drafting_us": 1e6 * median(way.drafting),
                }
                for way in all_ways
            }
            sys.stdout.write(f"{task}: " + ", ".join(
                f"{name} {row['decoding_total']:.2f}" for name, row in found[task].items()
            ) + "\n")  # fmt: skip
            sys.stdout.flush()
    return found


def ratios(plain: Sequence[float], other: Sequence[float]) -> list[float]:
    return [one / two for one, two in zip(plain, other, strict=True) if two]


def table(models: dict[str, Any]) -> str:
    """Markdown: decoding speed against plain decoding; ours as a share of the oracle's gain, and against theirs."""
    lines = []
    for model, found in models.items():
        tasks = [task for task in found if task != "curve_ms"]
        rows: dict[str, list[str]] = {}
        for task in tasks:
            ways, ours = found[task], found[task]["ours"]
            share = gain(ways)
            for way, row in ways.items():
                rows.setdefault(way, []).append(f"{row['decoding_total']:.2f}")
            theirs = ours["decoding_total"] / ways["llama-cpp-python"]["decoding_total"]
            rows.setdefault("ours, with the prefill", []).append(f"{ours['whole_total']:.2f}")
            rows.setdefault("ours, share of the oracle's gain", []).append("" if share is None else f"{share:.0%}")
            rows.setdefault("ours / llama-cpp-python", []).append(f"{theirs:.2f}")
            rows.setdefault("a drafting step of ours, µs", []).append(f"{ours['drafting_us']:.0f}")
        lines += [f"{model}:", "", f"| method | {' | '.join(tasks)} |", "|---|" + "---|" * len(tasks)]
        lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
        lines.append("")
    return "\n".join(lines)


def gain(row: dict[str, Any]) -> float | None:
    """Ours as a share of what the oracle gains; None where it gains nothing to speak of."""
    most = row["oracle"]["decoding_total"] - 1.0
    return (row["ours"]["decoding_total"] - 1.0) / most if most > 0.02 and "ours" in row else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=40, help="of each task; a fourth of them at the 0.5B shape")
    parser.add_argument("--models", nargs="+", choices=("bundled", "0.5b"), default=["bundled", "0.5b"])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="retrieval_speed", help="of the result file")
    arguments = parser.parse_args()
    models = {}
    with ExitStack() as stack, Model.load(resolve("edgellm-verifier")) as bundled:
        tasks = {task: recorded(bundled, task, arguments.cases) for task in TASKS}
        tasks[NONE] = nothing_to_copy(arguments.cases, bundled.n_vocab)
        if "bundled" in arguments.models:
            models["edgellm-verifier"] = measured(bundled, tasks, arguments.threads, arguments.repeats)
        if "0.5b" in arguments.models:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "half.gguf"
            random_gguf.write(path, random_gguf.SHAPES["qwen2.5-0.5b"], "Q4_0", 0)
            few = {task: cases[: max(2, arguments.cases // 4)] for task, cases in tasks.items()}
            half = stack.enter_context(Model.load(path))
            models["Qwen2.5-0.5B shape, Q4_0"] = measured(half, few, arguments.threads, 1)
    sys.stdout.write(table(models) + "\n")
    figures = {"cases": arguments.cases, "repeats": arguments.repeats, "models": models}
    sys.stdout.write(f"written: {write(arguments.name, 'bench.retrieval_speed', figures, SEED)}\n")


if __name__ == "__main__":
    main()
