"""The part of a profile beside the verdicts: how long drafting takes here, and whether an early exit pays."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import numpy as np

from edgellm.engine import Context, Ids, Model, SeqRows, top2
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported
from edgellm.llm.drafter_pool import DrafterKind, Drafters, exit_layers
from edgellm.spec.drafters.verdict_prediction import MOST_BRANCHES
from edgellm.spec.gates.profile import ExitPoint
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState

_REPEATS = 12
_PROMPTS = 12  # of those given, for the early exit


def batch_seconds(model: Model, prompt: Ids, threads: int | None) -> tuple[float, ...]:
    """Return the seconds of a batch with a token of each of 1, 2, ... branches, behind `prompt`; medians of a few."""
    n_ctx = len(prompt) + 2 * _REPEATS
    seconds = []
    with Context(
        model, n_ctx=n_ctx, n_seq=1 + MOST_BRANCHES, spare=MOST_BRANCHES * 2 * _REPEATS, threads=threads
    ) as context:
        context.decode(prompt)
        for rows in range(1, MOST_BRANCHES + 1):
            for seq in range(1, rows + 1):
                context.branch(0, seq)
            batch = [SeqRows(seq, prompt[-1:], 1) for seq in range(1, rows + 1)]
            times = []
            for _ in range(_REPEATS):
                began = perf_counter()
                context.decode_rows(batch)
                times.append(perf_counter() - began)
            seconds.append(float(median(times)))
    return tuple(seconds)


def exit_points(
    model: Model,
    drafters: Drafters,
    prompts: Sequence[Ids],
    *,
    threshold: float,
    gamma: int,
    most: int,
    threads: int | None,
) -> tuple[ExitPoint, ...]:
    """Measure an early exit after each layer of the last quarter, on replies of the draft model; return () where the
    model cannot be cut.
    """
    try:
        layers = exit_layers(model.path)
    except (ModelUnsupported, ModelCorrupt):
        return ()
    whole = drafters.take(DrafterKind())
    texts = [(prompt, _written(whole, model, prompt, gamma, most)) for prompt in prompts[:_PROMPTS]]
    found = []
    for layer in layers:
        kind = DrafterKind(exit_layer=layer, threshold=threshold)
        try:
            early = drafters.take(kind)
        except (InvalidOption, ModelUnsupported):  # no room for the shards: the rest of the profile is good
            continue
        fast, full = [], []
        for prompt, reply in texts:  # in turns, so that other load of the machine slows both down
            fast.append(_seconds(early, prompt, reply, gamma))
            full.append(_seconds(whole, prompt, reply, gamma))
        lower = drafters.shard(layer)
        left, same = _agreement(model, lower, texts, threshold, threads)
        found.append(ExitPoint(layer, left, same, float(median(fast)), float(median(full))))
        drafters.give(kind, early)
    drafters.give(DrafterKind(), whole)
    return tuple(found)


def _written(drafter: Drafter, model: Model, prompt: Ids, gamma: int, most: int) -> Ids:
    """Return the draft model's own reply to `prompt`, of at least one token."""
    ids = prompt
    while len(ids) - len(prompt) < most and not model.is_eog(int(ids[-1])):
        gamma_now = min(gamma, most - len(ids) + len(prompt))
        ids = np.concatenate((ids, drafter.propose(GenerationState(ids), gamma_now).ids))
    return ids[len(prompt) :]


def _seconds(drafter: Drafter, prompt: Ids, reply: Ids, gamma: int) -> float:
    """Return the seconds of a drafted token along a reply, without the decoding of the prompt."""
    drafter.propose(GenerationState(prompt), 1)
    texts = [GenerationState(np.concatenate((prompt, reply[:at]))) for at in range(0, len(reply), gamma)]
    began = perf_counter()
    drafted = sum(len(drafter.propose(text, gamma)) for text in texts)
    return (perf_counter() - began) / max(1, drafted)


def _agreement(
    model: Model, lower: Model, texts: Sequence[tuple[Ids, Ids]], threshold: float, threads: int | None
) -> tuple[float, float]:
    """Return the share of tokens that leave early, and the share of those for which full depth says the same."""
    left = same = total = 0
    longest = max(len(prompt) + len(reply) for prompt, reply in texts)
    with (
        Context(model, n_ctx=longest, threads=threads) as whole,
        Context(lower, n_ctx=longest, threads=threads) as early,
    ):
        for prompt, reply in texts:
            ids = np.concatenate((prompt, reply[:-1]))
            for context in (whole, early):
                context.clear()
            outputs = min(len(reply), whole.n_batch)
            rows = zip(whole.decode(ids, outputs=outputs), early.decode(ids, outputs=outputs), strict=True)
            for full, sooner in rows:
                total += 1
                facts = top2(sooner)
                if facts.p1 - facts.p2 > threshold:
                    left += 1
                    same += facts.id == top2(full).id
    return left / max(1, total), same / max(1, left)
