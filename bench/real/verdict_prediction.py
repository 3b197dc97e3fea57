"""Compare what is drafted on while a verdict is awaited: behind our predicted verdicts, and behind Saguaro's fan-out.

ASKED is Spec-Bench's file of questions, or a part of it. A *hit* is a round whose outcome, the accepted tokens and the
verifier's own behind them, was among those that were drafted on. *ours* is the product's drafter. *saguaro* (Kumar, Dao
and May 2026, "Speculative Speculative Decoding") takes the draft model's likeliest tokens at each place, behind k
accepted ones in proportion to a^(k / (1 + r)), and (1 - a)^(-1 / (1 + r)) times that behind the whole chunk: the best
where F tokens miss F^-r of the outcomes, and each is accepted by a chance of a. *uniform* takes as many at each place.
Both know the `a` of these rounds, and *saguaro* the r that is best for it. *saved* are milliseconds a round: hits times
the tokens of a chunk that can be drafted in `WAIT`, by the least time of a pass over so many continuations.

Sampled, draft model and verifier draw *alike* here, by the same numbers. Saguaro draws drafts from probabilities of
which the likeliest tokens' are multiplied by C, and accepts by quotients, so that these are left for a rejection. The
last lines have the chance that a chunk's first token is accepted, and else, that the verifier's is among `OTHERS`.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from bench.harness.progress import track
from bench.harness.results import Figures
from bench.harness.spec_bench import of_each, questions
from edgellm.engine import Context, ContextSpec, Floats, Ids, Message, Model, SeqRows
from edgellm.spec.drafters import parallel
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance
from edgellm.spec.protocols import GenerationState
from edgellm.spec.sampling import distribution, top2
from edgellm.spec.stats import Summary
from edgellm.spec.types import Sampling
from edgellm.spec.verification import judge
from edgellm.storage.model_files import resolve

GAMMA, OTHERS, WAIT, TEMPERATURES = 4, 4, 0.020, (0.0, 0.7)
BUDGETS, LOWERED, PLACES = (1, 2, 4, 8, 16), (1.0, 0.5, 0.25, 0.0), np.arange(GAMMA + 1)
SPEC = ContextSpec(n_ctx=2_560, threads=1)
BRANCHED = ContextSpec(n_ctx=2_560, threads=1, n_seq=1 + BUDGETS[-1], spare=4 * BUDGETS[-1])


def lowered(rows: Sequence[Floats], sampling: Sampling, factor: float) -> tuple[float, float]:
    """Return the chance that a draft of Saguaro's sampling is accepted, and that it is not and `OTHERS` have the
    verifier's token, by the logits of draft model and verifier."""
    drafted, own = np.zeros((2, len(rows[1])))
    for dense, logits in zip((drafted, own), rows, strict=True):
        found = distribution(logits, sampling)
        dense[found.ids] = found.probs
    best = np.argsort(-rows[0])[: OTHERS + 1]
    drafted[best] *= factor if drafted.sum() > drafted[best].sum() else 1.0
    drafted /= drafted.sum()
    lost, left = np.maximum(drafted - own, 0.0), np.maximum(own - drafted, 0.0)
    among = lost[best].sum() * left[best].sum() + (lost.sum() - lost[best].sum()) * left[best[:-1]].sum()
    return 1.0 - lost.sum(), among / max(left.sum(), 1e-9)


def replied(
    draft: Model, verifier: Model, prompt: Ids, sampling: Sampling, learned: ConfidenceAcceptance, tokens: int
) -> Iterator[tuple[int, int, list[int], list[tuple[float, float]]]]:
    """Write a reply, and yield of each round the accepted tokens, how many others were likelier than the verifier's,
    our hits by budget, and the two chances of the first token with ours and each of `LOWERED`."""
    with Context(draft, SPEC) as scoring, Context(verifier, SPEC) as judging, Context(draft, BRANCHED) as context:
        drafter, text = parallel.BranchingDrafter(draft, context), prompt
        found = {n: Summary() for n in BUDGETS}
        ours = [parallel.ParallelDrafter(drafter, learned, stats, is_eog=draft.is_eog, branches=n)
                for n, stats in found.items()]  # fmt: skip
        while len(text) < len(prompt) + tokens:
            state = GenerationState(text, sampling)
            chunk = drafter.propose(state, GAMMA)
            whole = np.concatenate((text, chunk.ids))
            mine, own = (at.decode(whole[at.sync(text) :], outputs=1 + len(chunk)) for at in (scoring, judging))
            accepted, token = judge(chunk.ids, own, sampling, len(text))
            for one in ours:  # The likeliest tokens behind the chunk are known after the first of two passes.
                asked = itertools.chain((False,) * 3, itertools.repeat(True))
                one.look_ahead(state, chunk, GAMMA, asked.__next__)
            learned.observe(chunk, accepted)
            text = np.append(whole[: len(text) + accepted], token).astype(np.int32)
            if draft.is_eog(token) or draft.is_eog(int(text[-2])):
                return
            before = [one.guesses_hit for one in found.values()]
            for one in ours:
                one.propose(GenerationState(text, sampling), 1)
            above = mine[accepted] > mine[accepted][token]
            rank = int(above.sum()) - (accepted < len(chunk) and bool(above[chunk.ids[accepted]]))
            others = parallel.alternatives(chunk, OTHERS, np.unique(state.ids))[0][0]
            chances = [(float(accepted > 0), float(not accepted and token in others))]
            chances += [lowered((mine[0], own[0]), sampling, factor) for factor in LOWERED]
            hit = [one.guesses_hit - was for one, was in zip(found.values(), before, strict=True)]
            yield accepted, rank, hit, chances


def pass_seconds(draft: Model, prompt: Ids) -> list[float]:
    """Return the median seconds of a pass over a token of each of `BUDGETS` continuations of `prompt`."""
    found = []
    with Context(draft, BRANCHED) as context:
        context.decode(prompt)
        for n in BUDGETS:
            for seq in range(1, n + 1):
                context.branch(0, seq)
            batch, times = [SeqRows(seq, prompt[-1:]) for seq in range(1, n + 1)], []
            for _ in range(4):
                began = perf_counter()
                _ = [top2(view[0]) for view in context.decode_rows(batch)]
                times.append(perf_counter() - began)
            found.append(median(times))
    return found


def hits(outcomes: npt.NDArray[np.int64], a: float, r: float) -> npt.NDArray[np.float64]:
    """Return the share of hits of Saguaro's fan-out by budget; an infinite `r` is the uniform one. `outcomes[k, n]`
    rounds had k accepted tokens, and n likelier tokens than the verifier's."""
    weights = a ** (PLACES / (1.0 + r)) * np.where(PLACES < GAMMA, 1.0, (1.0 - a) ** (-1.0 / (1.0 + r)))
    parts = np.outer(BUDGETS, weights / weights.sum())
    missing = BUDGETS - np.floor(parts).sum(1)
    order = np.argsort(np.argsort(np.floor(parts) - parts, axis=1, kind="stable"), axis=1)
    fans = (np.floor(parts) + (order < missing[:, None])).astype(int)
    found: npt.NDArray[np.float64] = np.pad(outcomes.cumsum(1), ((0, 0), (1, 0)))[PLACES, fans].sum(1) / outcomes.sum()
    return found


def line(name: str, values: Iterable[float], form: str) -> str:
    return f"{name:19}" + "".join(f"{value:{form}}" for value in values)


def table(figures: Mapping[str, Any]) -> str:
    """Return for each temperature the hits of each way to fan out, what they save, and what sampling for them costs."""
    passes = 1e3 * np.array(figures["seconds"])
    ahead = passes[0] * np.minimum(GAMMA, 1e3 * WAIT // passes)
    lines = [line("continuations", BUDGETS, "8"), line("a pass, ms", passes, "8.1f")]
    lines.append(f"the product follows {parallel.BRANCHES}")
    for temperature, sums in figures["temperatures"].items():
        outcomes, ours, chances = map(np.array, sums)
        ended, rounds = outcomes.sum(1), outcomes.sum()
        a = float(ended @ PLACES / (ended @ np.minimum(PLACES + 1, GAMMA)))
        r = max(np.arange(1, 31) / 10, key=lambda r: hits(outcomes, a, r).sum())
        lines.append(f"temperature {temperature}, {rounds} rounds, a = {a:.2f}, r = {r:.1f}")
        ways = {"ours": ours / rounds, "saguaro": hits(outcomes, a, r), "uniform": hits(outcomes, a, math.inf)}
        for way, shares in ways.items():
            lines.append(line(f"  {way}, hits", shares, "8.1%"))
            lines.append(line(f"  {way}, saved", shares * ahead, "8.2f"))
        if float(temperature):
            for name, (kept, among) in zip(("alike", *(f"C = {c}" for c in LOWERED)), chances / rounds, strict=True):
                lines.append(f"  {name:9}  accepted {kept:.1%}, else among {OTHERS} {among / (1.0 - kept):.1%}")
    return "\n".join(lines) + "\n"


def measure(
    asked: Annotated[Path, "Spec-Bench's questions, or a part of them"],
    per: Annotated[int, "questions of each category"] = 2,
    tokens: Annotated[int, "of a reply, at most"] = 64,
) -> Iterator[Figures]:
    """Yield the figures after each question."""
    found: dict[float, list[Any]] = {one: [np.zeros((GAMMA + 1, BUDGETS[-1] + 1), int), 0, 0] for one in TEMPERATURES}
    learned, curves = {one: ConfidenceAcceptance() for one in TEMPERATURES}, []
    with Model.load(resolve("smollm2:draft")) as draft, Model.load(resolve("smollm2:135m")) as verifier:
        prompts = [verifier.chat_prompt([Message("user", one.text)]) for one in of_each(questions(asked), per)]
        for prompt, (one, sums) in track([*itertools.product(prompts, found.items())], "replies"):
            for accepted, rank, *more in replied(draft, verifier, prompt, Sampling(one), learned[one], tokens):
                sums[0][accepted, min(rank, BUDGETS[-1])] += 1
                sums[1:] = [was + np.array(now) for was, now in zip(sums[1:], more, strict=True)]
            curves.append(pass_seconds(draft, prompts[0]))
            rows = {one: [part.tolist() for part in sums] for one, sums in found.items() if sums[0].any()}
            yield {"seconds": [min(each) for each in zip(*curves, strict=True)], "temperatures": rows}
