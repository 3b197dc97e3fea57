"""Profiling of a pair on this device: the speed of drafting, the layer whose attention is importance, and the gates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import isfinite
from statistics import median
from time import perf_counter

import numpy as np

from edgellm.engine import Context, ContextSpec, Ids, Model, SeqRows, top2, top2_of_rows
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported, ProfileStopped, Stopped
from edgellm.llm.drafter_pool import DrafterKind, Drafters, PooledDrafter, exit_layers
from edgellm.llm.replies.plan import Components
from edgellm.spec.drafters.early_exit import THRESHOLD
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.verdict_prediction import MAX_BRANCHES
from edgellm.spec.gates.fitting import auc, build
from edgellm.spec.gates.profile import VERSION, ExitPoint, Profile
from edgellm.spec.gates.profiler import PairProfiler, ProfileProgress, PromptRecord
from edgellm.spec.ngram.sources import lookup_threshold
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationLimits, GenerationState

_REPEATS = 4
_PROMPTS = 12  # prompts for the early exit
MOST_READ = 4_096
"""Most tokens of a prompt in contexts besides the pair's own: for times, and for early exits."""


def batch_seconds(model: Model, prompt: Ids, threads: int | None) -> tuple[float, ...]:
    """Return the median seconds of a batch with one token of each of 1, 2, ... branches after the first `MOST_READ`
    tokens of `prompt`, with the top two of each token."""
    prompt = prompt[:MOST_READ]
    n_ctx = len(prompt) + 2 * _REPEATS
    seconds = []
    with Context(
        model, ContextSpec(n_ctx=n_ctx, n_seq=1 + MAX_BRANCHES, spare=MAX_BRANCHES * 2 * _REPEATS, threads=threads)
    ) as context:
        context.decode(prompt)
        for rows in range(1, MAX_BRANCHES + 1):
            for seq in range(1, rows + 1):
                context.branch(0, seq)
            batch = [SeqRows(seq, prompt[-1:], 1) for seq in range(1, rows + 1)]
            times = []
            for _ in range(_REPEATS):
                began = perf_counter()
                top2_of_rows([view[0].copy() for view in context.decode_rows(batch)])
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
    model cannot be cut, or all prompts are longer than 4,096 tokens.
    """
    prompts = [prompt for prompt in prompts if len(prompt) <= MOST_READ][:_PROMPTS]
    if not prompts:
        return ()
    try:
        layers = exit_layers(model.header)
    except (ModelUnsupported, ModelCorrupt):
        return ()
    whole = drafters.take(DrafterKind())
    texts = [(prompt, _written(whole, model, prompt, gamma, most)) for prompt in prompts]
    full = [_seconds(whole, prompt, reply, gamma) for prompt, reply in texts]
    drafters.give(DrafterKind(), whole)
    found: list[ExitPoint] = []
    best: ExitPoint | None = None
    try:
        for layer in layers:
            try:
                with _taken(drafters, DrafterKind(exit_layer=layer, threshold=threshold)) as early:
                    fast = [_seconds(early, prompt, reply, gamma) for prompt, reply in texts]
                left, same = _agreement(model, drafters.shard(layer), texts, threshold, threads)
            except (InvalidOption, ModelUnsupported):  # Without room for shards, the rest of the profile is good.
                continue
            point = ExitPoint(layer, left, same, float(median(fast)), float(median(full)))
            found.append(point)
            if point.pays and (best is None or point.seconds < best.seconds):
                best = point
            drafters.keep_shards(None if best is None else best.layer)
    finally:
        drafters.keep_shards(None if best is None else best.layer)
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
    """Return the share of tokens that leave early, and the share of these on which full depth agrees."""
    left = same = total = 0
    longest = max(len(prompt) + len(reply) for prompt, reply in texts)
    with (
        Context(model, ContextSpec(n_ctx=longest, threads=threads)) as whole,
        Context(lower, ContextSpec(n_ctx=longest, threads=threads)) as early,
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
"""Most prompts to find the layer by: with some four hundred chunks an AUC is known to about 0.03."""


def layer_scores(records: Sequence[PromptRecord], n_layers: int, gamma: int) -> tuple[float, ...]:
    """Return the AUC of the importance in each of the measured layers, by the verdicts on whole chunks.

    Shorter chunks at the end of a reply do not count: their length itself would seem to predict the verdict. If no
    chunk was rejected, or every one, each AUC is NaN.
    """
    rejected: list[bool] = []
    rows: list[list[float]] = []
    for record in records:
        for chunks, by_layer in (
            (record.verified, record.verified_importance),
            (record.alone, record.alone_importance),
        ):
            for chunk, layers in zip(chunks, by_layer, strict=True):
                if chunk.tokens == gamma:
                    rejected.append(not chunk.whole)
                    rows.append([mean for mean, _, _ in layers])
    columns = np.array(rows, dtype=np.float64).reshape(-1, n_layers).T
    return tuple(auc(layer, np.array(rejected, dtype=np.bool_)) for layer in columns)


def profile_pair(
    parts: Components,
    prompts: Sequence[Ids],
    *,
    gamma: int,
    most: int,
    layers: tuple[int, ...] | None,
    context_lookup: bool,
    early_exit: bool,
    progress: Callable[[int, int], None] | None,
) -> Profile:
    """Return a new profile, which is the pair's from now on."""
    known, draft, drafters, verifier = parts.knowledge, parts.draft, parts.drafters, parts.verifier
    if known is None or draft is None or drafters is None or verifier is None:
        raise InvalidOption("A profile needs both a draft model and a verifier, and one is missing.", "Name both.")
    if not prompts:
        raise InvalidOption("There are no prompts to profile the pair on.", "Give a few dozen, one per line.")
    draft_hash, verifier_hash = known.hashes()
    search = layers is None and bool(draft.attention_layers)
    given = (layers or ()) if draft.attention_layers else ()
    all_layers = draft.attention_layers if search else given
    terms = {
        "hashes": [draft_hash, verifier_hash], "gamma": gamma, "most": most, "layers": list(all_layers),
        "search": search, "lookup": context_lookup, "version": VERSION, "prompts": _digest(prompts),
    }  # fmt: skip
    done = ProfileProgress(known.progress_file(), terms)
    session = verifier.open(GenerationState())

    def reached(count: int) -> None:
        if progress is not None:
            progress(count, len(prompts))

    limits = GenerationLimits(most, parts.context, gamma)
    best: int | None = None  # place of the most predictive measured layer
    scores: tuple[float, ...] = ()
    try:
        with _taken(drafters, DrafterKind(all_layers)) as drafter:
            by_layer = drafter.importance_by_layer if search and isinstance(drafter, ModelDrafter) else None
            profiler = PairProfiler(drafter, session, draft.is_eog, limits, by_layer)
            found = [each for record in done.records for each in record.disagreements]
            for count in range(len(done.records), len(prompts)):
                reached(count)
                record = profiler.record(prompts[count], context_lookup)
                found += record.disagreements
                # The lookup run follows at once, by the threshold so far: both caches hold the prompt.
                done.add(profiler.with_lookup(prompts[count], record, lookup_threshold(found)))
            below = lookup_threshold(found)
            records = [
                profiler.with_lookup(prompt, record, below) if below else record
                for prompt, record in zip(prompts, done.records, strict=True)
            ]
        if search:
            scores = layer_scores(sample(records), len(all_layers), gamma)
            best = int(np.nan_to_num(np.array(scores), nan=0.0).argmax())
        layers = given if best is None else (all_layers[best],)
        runs = [record.run(best, with_lookup=below > 0.0) for record in records]
        points = (
            exit_points(draft, drafters, prompts, threshold=THRESHOLD, gamma=gamma, most=most, threads=parts.threads)
            if early_exit
            else ()
        )
        batch = batch_seconds(draft, prompts[0], parts.threads)
    except (KeyboardInterrupt, Stopped):
        kept = done.save()
        raise ProfileStopped(
            f"The profile was stopped after {len(done.records)} of {len(prompts)} prompts.",
            "Run the same command to continue." if kept else "Nothing is kept of it: start it again.",
            len(done.records), len(prompts), kept=kept,
        ) from None  # fmt: skip
    except BaseException:
        done.save()
        raise
    finally:
        session.close()
    profile = build(
        runs, prompts=prompts, draft_hash=draft_hash, verifier_hash=verifier_hash, gamma=gamma, layers=layers,
        batch_seconds=batch, exits=points, hesitates=below,
    )  # fmt: skip
    by_name = {
        f"auc importance, layer {at}": round(value, 4)
        for at, value in zip(all_layers, scores, strict=False)
        if isfinite(value)
    }
    profile = replace(profile, evidence=profile.evidence | by_name)
    done.remove()
    reached(len(prompts))
    known.use(profile, save=False)
    return profile


def sample(records: Sequence[PromptRecord]) -> Sequence[PromptRecord]:
    """Return at most `PROMPTS` of the records, spread evenly: prompts may be sorted by topic. At least one is given."""
    return records[:: -(-len(records) // PROMPTS)]


def _digest(prompts: Sequence[Ids]) -> str:
    """Return a hash of all prompts together."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(4, "little"))
        digest.update(np.ascontiguousarray(prompt, dtype=np.int32).tobytes())
    return digest.hexdigest()


@contextmanager
def _taken(drafters: Drafters, kind: DrafterKind) -> Iterator[PooledDrafter]:
    drafter = drafters.take(kind)
    try:
        yield drafter
    finally:
        drafters.give(kind, drafter)
