"""Replay replies on real weights through the draft policy, each decode in the time that the cost curve says: what
copies bring, without the noise of decodes.

ASKED is Spec-Bench's file of questions, or a part of it. A reply's tokens are the model's own, so drafts are right
where they agree with it; lookups take the time that they take. With *a process each*, as `edgellm chat QUESTION` is,
the policy knows nothing of earlier replies, and the history only their texts. *Another's reply* follows each prompt
where hardly a copy is right. Columns: the speed over plain decoding,
the geometric mean of all replies, and that of the slowest category.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import of_each, questions
from edgellm.engine import Message, Model
from edgellm.llm import LLM
from edgellm.llm.drafting import continues_word
from edgellm.spec.drafters.model import HybridDrafter
from edgellm.spec.drafting.cost_curve import MAX_DRAFT, CostCurve
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.ngram.retriever import DraftIndex
from edgellm.spec.protocols import GenerationLimits, GenerationState
from edgellm.spec.types import Decision, Round, Verdict
from edgellm.storage.model_files import resolve

SOURCES = {"context": ("context",), "context and history": ("context", "history")}


def speed(prompt: Sequence[int], reply: Sequence[int], index: DraftIndex, names: Sequence[str]) -> float:
    """Return the speed of a reply over plain decoding, by the policy's cost curve."""
    table, retriever = index.policy.cost.given.table(len(prompt)), index.take(names)
    assert retriever is not None
    state = GenerationState(np.array(prompt, np.int32), limits=GenerationLimits(len(reply), 2**20, MAX_DRAFT))
    drafter, spent = HybridDrafter(index.policy, retriever), 0.0
    drafter.begin(state)
    while state.tokens_left:
        began, left = perf_counter(), reply[state.written :]
        chunk = drafter.propose(state, min(MAX_DRAFT, len(left) - 1))
        n = [*(one == own for one, own in zip(chunk.ids.tolist(), left, strict=False)), False].index(False)
        asked, decode = perf_counter(), table[len(chunk) + 1]
        verdict = Verdict(n, np.array(left[n : n + 1], np.int32), decode)
        drafter.observe(state, Round(0, chunk, Decision(True, ""), verdict, began, asked, asked + decode))
        spent += perf_counter() - began + decode
        for token in left[: n + 1]:
            state.append(token)
    drafter.end()
    index.give()
    index.add(prompt, reply)
    return len(reply) * table[1] / spent


def replayed(replies: Sequence[tuple[str, list[int], list[int]]], model: Model, curve: CostCurve, alone: bool,
             names: Sequence[str]) -> list[float]:  # fmt: skip
    """Return the mean speed of all replies, and that of the slowest category."""
    index, found = (
        DraftIndex(DraftPolicy(curve), continues_word(model), model.is_eog),
        defaultdict[str, list[float]](list),
    )
    for category, prompt, reply in replies:
        if alone:
            index.policy = DraftPolicy(curve)
        found[category].append(float(np.log(speed(prompt, reply, index, names))))
    means = [float(np.exp(np.mean(each))) for each in found.values()]
    return [float(np.exp(np.mean([one for each in found.values() for one in each]))), min(means)]


def table(figures: Mapping[str, Any]) -> str:
    """Return a line for each way."""
    lines = [f"{way:52}{mean:7.3f}{least:9.3f}" for way, (mean, least) in figures["ways"].items()]
    return "\n".join([f"{'':52}{'all':>7}{'slowest':>9}", *lines]) + "\n"


def measure(
    asked: Annotated[Path, "Spec-Bench's questions, or a part of them"],
    verifier: str = "smollm2:135m",
    per: Annotated[int, "questions of each category"] = 8,
    tokens: Annotated[int, "of a reply at most"] = 96,
) -> Iterator[Figures]:
    """Yield the figures."""
    replies = []
    with LLM.open(None, verifier, n_ctx=4096, history=False) as llm, Model.load(resolve(verifier)) as model:
        for one in track(of_each(questions(asked), per), "replies"):
            messages = [Message("user", one.text)]
            written = llm.reply(messages, max_tokens=tokens, temperature=0.0, retrieval="off")
            if len(reply := [token.id for token in written]) > 1:
                replies.append((one.category, model.chat_prompt(messages).tolist(), reply))
        llm.wait_until_measured()
        curves = {"as measured": llm.curve(), "rows are cheap": CostCurve((1, 64), (0.01, 0.073))}
        others = [
            (category, prompt, reply)
            for (category, prompt, _), (_, _, reply) in zip(replies, replies[per:] + replies[:per], strict=True)
        ]
        ways = {
            f"{what}{', a process each' * alone}": (replies, alone, names)
            for what, names in SOURCES.items() for alone in (False, True)
        } | {"another's reply, a process each": (others, True, SOURCES["context"])}  # fmt: skip
        yield {
            "ways": {
                f"{cost}, {way}": replayed(some, model, curve, alone, names)
                for cost, curve in curves.items() for way, (some, alone, names) in ways.items()
            }
        }  # fmt: skip
