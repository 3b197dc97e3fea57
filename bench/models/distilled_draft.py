"""Measure SmolLM2's draft model by the categories of Spec-Bench: what is accepted, and what it brings.

ASKED is Spec-Bench's file of questions, or a part of it; only first turns are asked. *acceptance* is the share of
tokens of the verifier's greedy reply that are the draft model's likeliest ones behind the same text, and *length* the
mean acceptance length with chunks of `GAMMA`: accepted tokens and the verifier's own one. *cost* is the time of a token
of the draft model over that of the verifier. *alone* and *pair* are tokens a second of the greedy reply, by turns, with
retrieval off, over `timed` questions of each category: of the verifier alone, and of the pair where the draft model
drafts in each round, whether that pays or not (by itself a pair drops one that does not pay). *times* is the median of
their quotients, with quartiles.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import Question, greedy_reply, questions
from bench.harness.statistics import alternate, spread
from edgellm.engine import Context, ContextSpec, Message, Model
from edgellm.llm import LLM
from testkit import ROOT

GAMMA = 4
N_CTX = 2_560
"""Tokens of a context: Spec-Bench's longest question has 1,600."""
ALL = "all"
SPEEDS = ("alone", "pair")


def first_of_each(found: Sequence[Question], per: int) -> list[Question]:
    """Return at most `per` questions of each category."""
    groups: dict[str, list[Question]] = {}
    for question in found:
        groups.setdefault(question.category, []).append(question)
    return [each for group in groups.values() for each in group[:per]]


def agreement(draft: Context, prompt: npt.NDArray[np.int32], reply: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """Return for each token of the reply whether the draft model writes it behind what stands before, (n,)."""
    draft.clear()
    draft.decode(prompt[:-1])
    rows = draft.decode(np.concatenate((prompt[-1:], reply[:-1])), outputs=len(reply))
    found: npt.NDArray[np.bool_] = rows.argmax(1) == reply
    return found


def rounds_of(agree: npt.NDArray[np.bool_]) -> int:
    """Return how many passes of the verifier the reply takes, with chunks of `GAMMA` drafted tokens."""
    at = rounds = 0
    while at < len(agree):
        chunk = agree[at : at + GAMMA]
        at += (len(chunk) if chunk.all() else int(np.argmin(chunk))) + 1
        rounds += 1
    return rounds


def cost(draft: Context, verifier: Context, repeats: int = 40) -> float:
    """Return the time of a decode of one token over that of the verifier's, both behind 256 tokens, by turns."""
    ids = np.arange(1_000, 1_256, dtype=np.int32)
    for context in (draft, verifier):
        context.clear()
        context.decode(ids)

    def timed(context: Context) -> float:
        began = time.perf_counter()
        context.decode(ids[:1])
        return time.perf_counter() - began

    taken = alternate(repeats, lambda: timed(draft), lambda: timed(verifier))
    return float(np.median(taken[0]) / np.median(taken[1]))


def speeds(pair: LLM, alone: LLM, question: Question, tokens: int) -> list[float]:
    """Return the tokens a second of the verifier alone and with drafts in each round, by turns."""

    def speed(llm: LLM) -> float:
        reply = llm.reply(
            [Message("user", question.text)], max_tokens=tokens, temperature=0.0, retrieval="off", gate="always"
        )
        list(reply)
        return reply.summary.tokens_per_second or 0.0

    return [max(taken) for taken in alternate(2, lambda: speed(alone), lambda: speed(pair))]


def table(found: Mapping[str, Any]) -> str:
    """Return a line for each category, and one for all questions."""
    head = f"{'category':16}{'questions':>10}{'acceptance':>12}{'length':>8}"
    lines = [head + "".join(f"{name:>8}" for name in SPEEDS) + f"{'times':>7}"]
    categories = [*dict.fromkeys(row["category"] for row in found["rows"]), ALL]
    lines += [_line(one, [row for row in found["rows"] if one in (ALL, row["category"])]) for one in categories]
    lines.append(f"a drafted token takes {found['cost']:.3f} of the verifier's time (1/{1 / found['cost']:.1f})")
    return "\n".join(lines) + "\n"


def _line(category: str, rows: Sequence[Mapping[str, Any]]) -> str:
    tokens, accepted, rounds = (sum(row[name] for row in rows) for name in ("tokens", "accepted", "rounds"))
    line = f"{category:16}{len(rows):10}{accepted / tokens:12.2f}{tokens / rounds:8.2f}"
    if timed := [row for row in rows if "pair" in row]:
        speed = (float(np.median([row[name] for row in timed])) for name in SPEEDS)
        times = spread([row["pair"] / row["alone"] for row in timed])
        line += "".join(f"{each:8.0f}" for each in speed)
        line += f"{times['median']:7.2f} ({times['q1']:.2f} to {times['q3']:.2f})"
    return line


def measure(
    asked: Annotated[Path, "Spec-Bench's questions, or a part of them"],
    verifier: Annotated[Path, "SmolLM2"],
    draft: Path = ROOT / "models" / "smollm2" / "draft.gguf",
    per: Annotated[int, "questions of each category, at most"] = 40,
    tokens: Annotated[int, "of a reply, at most"] = 96,
    timed: Annotated[int, "questions of each category that are timed"] = 5,
) -> Figures:
    """Return a row for each question, and the cost of a drafted token."""
    chosen = first_of_each(questions(asked), per)
    rows = []
    with Model.load(draft) as small, Model.load(verifier) as big:
        drafting, verifying = Context(small, ContextSpec(n_ctx=N_CTX)), Context(big, ContextSpec(n_ctx=N_CTX))
        for question in track(chosen, "questions"):
            prompt = big.chat_prompt([Message("user", question.text)])
            reply = greedy_reply(verifying, prompt, tokens)
            agree = agreement(drafting, prompt, reply)
            found = {"tokens": len(reply), "accepted": int(agree.sum()), "rounds": rounds_of(agree)}
            rows.append({"category": question.category, **found})
        share = cost(drafting, verifying)
    some = first_of_each(chosen, timed)
    with (
        LLM.open(draft, verifier, history=False, n_ctx=N_CTX) as pair,
        LLM.open(None, verifier, history=False, n_ctx=N_CTX) as alone,
    ):
        speeds(pair, alone, chosen[0], tokens)  # both have measured themselves after that
        for question, row in track(list(zip(chosen, rows, strict=True)), "timed questions"):
            if question in some:
                row.update(zip(SPEEDS, speeds(pair, alone, question, tokens), strict=True))
    return {"cost": share, "rows": rows}
