"""Profiling a pair on prompts: verify everything, and measure what gates and early exits need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

from edgellm.engine import Ids
from edgellm.errors import InvalidOption
from edgellm.llm.drafter_pool import DrafterKind
from edgellm.llm.generation import Components
from edgellm.llm.profiling.draft_speed import batch_seconds, exit_points
from edgellm.llm.profiling.importance_layer import sample, telling_layer
from edgellm.spec.drafters.early_exit import THRESHOLD
from edgellm.spec.gates.profile import Profile, build
from edgellm.spec.gates.profiler import Run, Watcher
from edgellm.spec.ngram.context_lookup import Seen, hesitation
from edgellm.spec.state import GenerationLimits, GenerationState

ASKED = 64
"""Prompts that are used to find out when the draft model had better heed the context."""


def profile_pair(
    parts: Components,
    prompts: Sequence[Ids],
    *,
    gamma: int,
    most: int,
    layers: tuple[int, ...] | None,
    precedents: bool,
    progress: Callable[[int, int], None] | None,
) -> Profile:
    """Return a new profile, which is the pair's from now on. See `Pair.profile`."""
    known, draft, drafters, verifier = parts.knowledge, parts.draft, parts.drafters, parts.verifier
    if known is None or draft is None or drafters is None or verifier is None:
        raise InvalidOption("This is no pair: a draft model or a verifier is missing.", "Name both.")
    if not prompts:
        raise InvalidOption("There are no prompts to profile the pair on.", "Give some dozens, one a line.")
    draft_hash, verifier_hash = known.hashes()
    few = sample(prompts) if layers is None else []
    total = len(few) + len(prompts)

    def reached(done: int) -> None:
        if progress is not None:
            progress(done, total)

    session = verifier.open(GenerationState())
    told: tuple[float, ...] = ()
    try:
        if layers is None:
            best, told = telling_layer(draft, drafters, session, few, most, parts.context, reached)
            layers = (best,)
        kind = DrafterKind(layers)
        drafter = drafters.take(kind)
        try:
            runs: list[Run] = []
            watcher = Watcher(drafter, session, draft.is_eog, GenerationLimits(most, parts.context, gamma))
            seen: list[Seen] = []
            for prompt in prompts[:: max(1, len(prompts) // ASKED)] if precedents else ():
                seen += watcher.ask(prompt)
            lookup_below = hesitation(seen)
            for done, prompt in enumerate(prompts, len(few)):
                reached(done)
                runs.append(watcher.run(prompt, lookup_below))
        finally:
            drafters.give(kind, drafter)
    finally:
        session.close()
    points = exit_points(draft, drafters, prompts, threshold=THRESHOLD, gamma=gamma, most=most, threads=parts.threads)
    profile = build(
        runs, draft_hash=draft_hash, verifier_hash=verifier_hash, gamma=gamma, layers=kind.layers,
        batch_seconds=batch_seconds(draft, prompts[0], parts.threads), exits=points, hesitates=lookup_below,
    )  # fmt: skip
    by_layer = {f"auc importance, layer {at}": round(value, 4) for at, value in enumerate(told) if isfinite(value)}
    profile = replace(profile, evidence=profile.evidence | by_layer)
    reached(total)
    known.use(profile, save=False)
    return profile
