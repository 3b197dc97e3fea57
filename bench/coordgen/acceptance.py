"""Measure tokens for each verification: by PLD, by SAM, and with each of our techniques on top (CoordGen, Table 4).

Mean acceptance length is the tokens of the replies over the verifications. The verifier's own token counts, so 1 is
plain decoding; the token of the prefill does not. Every method drafts all it finds, up to the same length.
`calibration + reuse` are the paper's two techniques; `ours` adds past conversations.
Replies are greedy and of f32 copies of the models; each method must write the recorded reply.

Columns: a task each, and the mean ratio to the method's base.
"""

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from bench.coordgen.methods import MOST, Everything, Method, PromptLookup, SuffixLookup
from bench.coordgen.tasks import TASKS, Reply, recorded
from bench.harness.results import Figures
from edgellm.engine import ContextSpec, Model
from edgellm.spec.ngram.sources import ContextIndex as Seen
from edgellm.spec.ngram.sources import DraftSource
from edgellm.spec.protocols import GenerationState, VerdictTerms
from edgellm.spec.types import Chunk, Decision, Round
from edgellm.storage.model_files import resolve
from edgellm.verifier.in_process import LocalVerifier
from testkit.gguf.changed import to_f32

_EMPTY = Chunk()
PAPERS = ("calibration", "reuse")
OURS = ("history", *PAPERS)
BASES: dict[str, tuple[Callable[[], DraftSource], float]] = {
    "PLD": (PromptLookup, 0.35),
    "SAM": (SuffixLookup, 0.45),
    "automaton with counts": (Seen, 0.35),
}
TOPPINGS: dict[str, tuple[str, ...]] = {
    "": (), " + calibration": ("calibration",), " + reuse": ("reuse",), " + calibration + reuse": PAPERS,
    " + history": ("history",), " + ours": OURS,
}  # fmt: skip


def length(model: Model, verifier: LocalVerifier, method: Method, cases: list[Reply]) -> float:
    """Return the tokens for each verification over `cases`, one after another."""
    tokens = rounds = 0
    for case in cases:
        method.begin(case)
        state = GenerationState(case.prompt, terms=VerdictTerms(expect=method.retriever.expect))
        method.drafter.begin(state)
        session = verifier.open(state)
        try:
            text = case.prompt
            first = session.submit(text, _EMPTY).result()
            text = np.append(text, first.tokens).astype(np.int32)
            end = len(case.prompt) + len(case.reply)
            while len(text) < end:
                chunk = method.drafter.propose(GenerationState(text), min(MOST, end - len(text)))
                verdict = session.submit(text, chunk).result()
                method.drafter.observe(state, Round(rounds, chunk, Decision(True, ""), verdict, 0.0, 0.0, 0.0))
                new = np.append(chunk.ids[: verdict.accepted], verdict.tokens)[: end - len(text)]
                text = np.append(text, new).astype(np.int32)
                tokens, rounds = tokens + len(new), rounds + 1
        finally:
            session.close()
        if tuple(text[len(case.prompt) :].tolist()) != case.reply:
            sys.exit(f"the reply is not the recorded one: {model.detokenize(text).decode()!r}")
        method.end(case)
    return tokens / max(1, rounds)


def measured(model: Model, cases: int) -> dict[str, dict[str, float]]:
    """Return the acceptance lengths of every method, by the tasks."""
    found: dict[str, dict[str, float]] = {}
    verifier = LocalVerifier(model, ContextSpec(model.n_ctx_train))
    for task in TASKS:
        replies = recorded(model, task, cases)
        found[task] = {}
        for base, (make, prior) in BASES.items():
            for topping, others in TOPPINGS.items():
                method = Method(make(), others, Everything, model, prior)
                found[task][base + topping] = length(model, verifier, method, replies)
    verifier.close()
    return found


def table(results: Mapping[str, Any]) -> str:
    """Return a Markdown table for each model: a row for each method, a column for each task, the ratio to its base."""
    lines = []
    for model, found in results["models"].items():
        lines += [
            f"{model}:",
            "",
            f"| method | {' | '.join(found)} | to its base |",
            "|---|" + "---|" * (len(found) + 1),
        ]
        for method in next(iter(found.values())):
            base = next(name for name in BASES if method.startswith(name))
            ratio = float(np.mean([row[method] / row[base] for row in found.values()]))
            lines.append(f"| {method} | {' | '.join(f'{row[method]:.2f}' for row in found.values())} | {ratio:.2f} |")
        lines.append("")
    return "\n".join(lines)


def measure(
    cases: Annotated[int, "of each task"] = 24, models: Sequence[Literal["verifier", "draft"]] = ("verifier", "draft")
) -> Figures:
    """Return the figures of these models of the bundled pair, in float32."""
    found = {}
    for name in (f"edgellm-{one}" for one in models):
        with tempfile.TemporaryDirectory() as folder:
            to_f32(resolve(name), Path(folder) / "exact.gguf")
            with Model.load(Path(folder) / "exact.gguf") as model:
                found[name] = measured(model, cases)
    return {"cases": cases, "most": MOST, "models": found}
