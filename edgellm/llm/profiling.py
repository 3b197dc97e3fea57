"""Profiling of a pair on this device: the speed of drafting, the layer whose attention is importance, and the gates."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

import numpy as np

from edgellm.engine import Ids
from edgellm.errors import InvalidOption, ProfileStopped, Stopped
from edgellm.llm.drafter_pool import DrafterKind
from edgellm.llm.opening.engine import PairEngine
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.fitting import auc, build
from edgellm.spec.gates.profile import VERSION, Profile
from edgellm.spec.gates.profiler import PairProfiler, ProfileProgress, PromptRecord
from edgellm.spec.mechanisms import has, mechanism
from edgellm.spec.ngram.sources import lookup_threshold
from edgellm.spec.state import GenerationLimits, GenerationState

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
    engine: PairEngine,
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
    known, draft, drafters, verifier = engine.knowledge, engine.draft, engine.drafters, engine.verifier
    if known is None or draft is None or drafters is None or verifier is None:
        raise InvalidOption("A profile needs both a draft model and a verifier, and one is missing.", "Name both.")
    if not prompts:
        raise InvalidOption("There are no prompts to profile the pair on.", "Give a few dozen, one per line.")
    draft_hash, verifier_hash = known.hashes()
    measurable = bool(draft.attention_layers) and has("importance")
    search, given = layers is None and measurable, (layers or ()) if measurable else ()
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

    limits = GenerationLimits(most, engine.context, gamma)
    best: int | None = None  # place of the most predictive measured layer
    scores: tuple[float, ...] = ()
    try:
        with drafters.taken(DrafterKind(all_layers)) as drafter:
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
            mechanism("early exit").exit_points(
                draft, drafters, prompts, gamma=gamma, most=most, threads=engine.config.threads
            )
            if early_exit
            else ()
        )
        batch = ()
        if has("parallel drafting"):
            batch = mechanism("parallel drafting").batch_seconds(draft, prompts[0], engine.config.threads)
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
