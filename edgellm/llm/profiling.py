"""Profiling of a pair on this device: the speed of drafting, the layer whose attention is importance, and the gates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite
from statistics import median
from time import perf_counter

import numpy as np

from edgellm.engine import Context, Ids, Model, SeqRows, top2
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported
from edgellm.llm.drafter_pool import DrafterKind, Drafters, exit_layers
from edgellm.llm.generation import Components
from edgellm.spec.drafters.early_exit import THRESHOLD
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.verdict_prediction import MAX_BRANCHES
from edgellm.spec.gates.profile import ExitPoint, Profile, build
from edgellm.spec.gates.profiler import PairProfiler, Run
from edgellm.spec.gates.rejection_model import auc
from edgellm.spec.ngram.sources import Disagreement, lookup_threshold
from edgellm.spec.params import CHUNK
from edgellm.spec.protocols import Drafter, VerifierSession
from edgellm.spec.state import GenerationLimits, GenerationState
from edgellm.spec.types import Chunk, Floats

_REPEATS = 12
_PROMPTS = 12  # of those given, for the early exit


def batch_seconds(model: Model, prompt: Ids, threads: int | None) -> tuple[float, ...]:
    """Return the median seconds of a batch with one token of each of 1, 2, ... branches after `prompt`."""
    n_ctx = len(prompt) + 2 * _REPEATS
    seconds = []
    with Context(
        model, n_ctx=n_ctx, n_seq=1 + MAX_BRANCHES, spare=MAX_BRANCHES * 2 * _REPEATS, threads=threads
    ) as context:
        context.decode(prompt)
        for rows in range(1, MAX_BRANCHES + 1):
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
        layers = exit_layers(model.header)
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


PROMPTS = 80
"""The most prompts that are read to find the layer: with some four hundred chunks an AUC is known to about 0.03."""


def sample(prompts: Sequence[Ids]) -> Sequence[Ids]:
    """Return at most `PROMPTS` of the prompts, spread evenly: they may be sorted by topic. At least one is given."""
    return prompts[:: -(-len(prompts) // PROMPTS)]


def most_predictive_layer(
    draft: Model,
    drafters: Drafters,
    session: VerifierSession,
    prompts: Sequence[Ids],
    most: int,
    context: int,
    reached: Callable[[int], None],
) -> tuple[int, tuple[float, ...]]:
    """Return the layer with the best AUC, counted from 0, and the AUC of each, on replies to `prompts` of up to `most`
    tokens.

    Everything is verified, in the paper's chunks of four: in smaller ones no token gets attention from many. Shorter
    chunks at the end of a reply do not count: their length itself would seem to predict the verdict. If no chunk was
    rejected, or every one, each AUC is NaN and the layer is the first. `reached` is called with the prompts done.
    """
    layers = draft.attention_layers
    kind = DrafterKind(layers)
    drafter = drafters.take(kind)
    if not isinstance(drafter, ModelDrafter):
        raise TypeError("the drafter has no early exit")
    recorder = _LayerRecorder(drafter)
    profiler = PairProfiler(recorder, session, draft.is_eog, GenerationLimits(most, context, CHUNK))
    rejected: list[bool] = []
    try:
        for done, prompt in enumerate(prompts):
            reached(done)
            rejected += [not chunk.whole for chunk in profiler.verified_reply(prompt) if chunk.tokens == CHUNK]
    finally:
        drafters.give(kind, drafter)
    columns = np.array(recorder.layers, dtype=np.float64).reshape(-1, len(layers)).T
    found = [auc(layer, np.array(rejected, dtype=np.bool_)) for layer in columns]
    return layers[int(np.nan_to_num(np.array(found), nan=0.0).argmax())], tuple(found)


class _LayerRecorder(Drafter):
    """A drafter whose full chunks' importance is noted, layer by layer."""

    def __init__(self, drafter: ModelDrafter) -> None:
        self._drafter = drafter
        self.layers: list[Floats] = []

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        chunk = self._drafter.propose(state, gamma)
        layers = self._drafter.importance_by_layer(len(chunk))
        if layers is not None and len(chunk) == CHUNK:
            self.layers.append(layers.mean(axis=1))
        return chunk


ASKED = 64
"""Prompts used to find the confidence below which a token from the context is drafted instead."""


def profile_pair(
    parts: Components,
    prompts: Sequence[Ids],
    *,
    gamma: int,
    most: int,
    layers: tuple[int, ...] | None,
    context_lookup: bool,
    progress: Callable[[int, int], None] | None,
) -> Profile:
    """Return a new profile, which is the pair's from now on. See `LLM.profile`."""
    known, draft, drafters, verifier = parts.knowledge, parts.draft, parts.drafters, parts.verifier
    if known is None or draft is None or drafters is None or verifier is None:
        raise InvalidOption("A profile needs both a draft model and a verifier, and one is missing.", "Name both.")
    if not prompts:
        raise InvalidOption("There are no prompts to profile the pair on.", "Give a few dozen, one per line.")
    draft_hash, verifier_hash = known.hashes()
    layers = () if not draft.attention_layers else layers
    sampled = sample(prompts) if layers is None else []
    total = len(sampled) + len(prompts)

    def reached(done: int) -> None:
        if progress is not None:
            progress(done, total)

    session = verifier.open(GenerationState())
    scores: tuple[float, ...] = ()
    try:
        if layers is None:
            best, scores = most_predictive_layer(draft, drafters, session, sampled, most, parts.context, reached)
            layers = (best,)
        kind = DrafterKind(layers)
        drafter = drafters.take(kind)
        try:
            runs: list[Run] = []
            profiler = PairProfiler(drafter, session, draft.is_eog, GenerationLimits(most, parts.context, gamma))
            seen: list[Disagreement] = []
            for prompt in prompts[:: max(1, len(prompts) // ASKED)] if context_lookup else ():
                seen += profiler.disagreements(prompt)
            lookup_below = lookup_threshold(seen)
            for done, prompt in enumerate(prompts, len(sampled)):
                reached(done)
                runs.append(profiler.run(prompt, lookup_below))
        finally:
            drafters.give(kind, drafter)
    finally:
        session.close()
    points = exit_points(draft, drafters, prompts, threshold=THRESHOLD, gamma=gamma, most=most, threads=parts.threads)
    profile = build(
        runs, draft_hash=draft_hash, verifier_hash=verifier_hash, gamma=gamma, layers=kind.layers,
        batch_seconds=batch_seconds(draft, prompts[0], parts.threads), exits=points, hesitates=lookup_below,
    )  # fmt: skip
    by_layer = {
        f"auc importance, layer {at}": round(value, 4)
        for at, value in zip(draft.attention_layers, scores, strict=False)
        if isfinite(value)
    }
    profile = replace(profile, evidence=profile.evidence | by_layer)
    reached(total)
    known.use(profile, save=False)
    return profile
