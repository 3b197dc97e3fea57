"""Measure what a budget buys on real weights: how near a reply is to the verifier's own, by gate and budget.

ASKED is Spec-Bench's file of questions, or a part of it. Of each category half is profiled and the other half asked,
greedily, with every gate at every budget. *agrees* is ROUGE-L with the verifier's own reply, *same* the share of that
reply before the first other token, *loss* the mean negative log-likelihood of the reply's tokens under the verifier, in
nats, and *closed* the share of the gap in *agrees* between the draft model alone and the verifier. *share* of the
chunks was verified. Intervals are of 95 % (bootstrap over questions).

The oracle knows the verifier's reply, drafts token by token, and has each token corrected that is another, from the
first one on, until its budget is spent: how much a gate can close at all with this draft model.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import of_each, questions
from bench.harness.statistics import bootstrap
from bench.real.same_text import first_difference
from edgellm.engine import Context, ContextSpec, Ids, Message, Model
from edgellm.engine.hardware import Hardware
from edgellm.llm import LLM
from edgellm.spec.types import Token
from edgellm.storage.model_files import resolve
from testkit.questions import rouge

N_CTX = 2_560
GATES = ("auto", "synera", "random")
ENDS = ("never", "always")
COLUMNS = ("share", "agrees", "same", "loss")


def loss(verifier: Context, prompt: Ids, reply: Sequence[int]) -> float:
    """Return the mean negative log-likelihood of a reply's tokens, in nats."""
    verifier.clear()
    ids = np.array(reply, dtype=np.int32)
    rows = verifier.decode(np.concatenate((prompt, ids[:-1])), outputs=len(ids)).astype(np.float64)
    top = rows.max(1)
    return float(np.mean(top + np.log(np.exp(rows - top[:, None]).sum(1)) - rows[np.arange(len(ids)), ids]))


def words_of(model: Model, ids: Sequence[int]) -> str:
    return model.detokenize(ids).decode(errors="replace")


def by_oracle(draft: Context, prompt: Ids, own: Ids, budget: float) -> list[int]:
    """Return the verifier's own reply up to where the budget is spent, continued by the draft model."""
    draft.clear()
    rows = draft.decode(np.concatenate((prompt, own[:-1])), outputs=len(own))
    corrected = round(budget * len(own))
    wrong = np.flatnonzero(rows.argmax(1) != own)
    known = own if corrected > len(wrong) else own[: wrong[corrected - 1] + 1] if corrected else own[:0]
    draft.rollback(len(prompt) - 1)
    last, reply = np.concatenate((prompt[-1:], known)), list(map(int, known))
    while len(reply) < len(own) and not (reply and draft.model.is_eog(reply[-1])):
        last = draft.decode(last, outputs=1).argmax(1).astype(np.int32)
        reply += last.tolist()
    return reply


def closed(rows: Sequence[Mapping[str, Any]], way: str) -> tuple[float, float, float]:
    """Return the share of the gap in agreement between the ends that a way closes, with an interval of 95 %."""
    found = np.array([[row[one]["agrees"] for one in (*ENDS, way)] for row in rows])
    return bootstrap(found, lambda means: (means[:, 2] - means[:, 0]) / (means[:, 1] - means[:, 0]))


def table(figures: Mapping[str, Any]) -> str:
    """Return a line for each gate and budget, between the draft model and the verifier."""
    rows = figures["rows"]
    never, *between, always = figures["ways"]
    lines = [f"{'gate, budget':18}" + "".join(f"{name:>8}" for name in COLUMNS) + "  closed\n"]
    for way in (never, *between, always):
        means = (np.mean([row[way][name] for row in rows]) for name in COLUMNS)
        lines.append(f"{way:18}" + "".join(f"{mean:8.2f}" for mean in means))
        share, low, high = closed(rows, way)
        lines[-1] += f"{share:8.0%} ({low:.0%} to {high:.0%})\n" if way in between else "\n"
    return "".join(lines) + f"{len(rows)} questions, {figures['profiled']} profiled\n"


def measure(
    asked: Annotated[Path, "Spec-Bench's questions, or a part of them"],
    verifier: str = "smollm2:135m",
    draft: str = "smollm2:draft",
    per: Annotated[int, "questions of each category that are asked, at most"] = 3,
    profiled: Annotated[int, "questions of each category that are profiled, at most"] = 8,
    budgets: Sequence[float] = (0.05, 0.1, 0.2),
    tokens: Annotated[int, "of a reply, at most"] = 96,
    threads: int = 1,
) -> Iterator[Figures]:
    """Yield the figures after each question."""
    found = questions(asked)
    prompts = [[Message("user", one.text)] for one in of_each(found[::2], profiled)]
    some = of_each(found[1::2], per)
    ways = {"never": {"gate": "never"}, "always": {"gate": "always"}}
    oracle = {f"oracle {budget}": budget for budget in budgets}
    between = {f"{gate} {budget}": {"gate": gate, "budget": budget} for budget in budgets for gate in GATES}
    rows: list[dict[str, Any]] = []
    hardware = Hardware(threads=threads)
    with (
        LLM.open(draft, verifier, history=False, n_ctx=N_CTX, hardware=hardware) as pair,
        Model.load(resolve(verifier)) as big,
        Model.load(resolve(draft)) as small,
        Context(big, ContextSpec(n_ctx=N_CTX, threads=threads)) as verifying,
        Context(small, ContextSpec(n_ctx=N_CTX, threads=threads)) as drafting,
    ):
        pair.profile(prompts)
        for question in track(some, "questions"):
            prompt = pair.prompt_writer.ids([Message("user", question.text)])
            replies, shares = {}, {}
            for way, options in (ways | between).items():
                reply = pair.reply(
                    [Message("user", question.text)], max_tokens=tokens, temperature=0.0, retrieval="off", **options
                )
                replies[way] = [event.id for event in reply if isinstance(event, Token)]
                shares[way] = {"never": 0.0, "always": 1.0}.get(way, reply.summary.share_offloaded or 0.0)
            own = replies["always"]
            for way, budget in oracle.items():
                replies[way] = by_oracle(drafting, prompt, np.array(own, dtype=np.int32), budget)
                shares[way] = budget
            rows.append({
                way: {
                    "share": shares[way], "loss": loss(verifying, prompt, ids),
                    "same": first_difference(ids, own) / len(own),
                    "agrees": rouge(words_of(big, own), words_of(big, ids), "rougeL"),
                } for way, ids in replies.items()
            })  # fmt: skip
            yield {"profiled": len(prompts), "ways": ["never", *between, *oracle, "always"], "rows": rows}
