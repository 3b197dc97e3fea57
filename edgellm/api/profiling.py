"""Profiling a pair on prompts: everything is verified, and everything that gates and exits need is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from edgellm.api.drafters import Kind
from edgellm.api.measure import batch_seconds, exit_points
from edgellm.api.writing import Parts, default_layers
from edgellm.engine import Ids
from edgellm.errors import InvalidOption
from edgellm.spec.exit_drafter import THRESHOLD
from edgellm.spec.profile import Profile, build
from edgellm.spec.profiling import Run, Watcher
from edgellm.spec.records import GREEDY


def profile_pair(
    parts: Parts,
    prompts: Sequence[Ids],
    *,
    gamma: int,
    most: int,
    layers: tuple[int, ...] | None,
    progress: Callable[[int, int], None] | None,
) -> Profile:
    """The pair's profile from now on. See `Pair.profile`."""
    known, draft, drafters, verifier = parts.knowledge, parts.draft, parts.drafters, parts.verifier
    if known is None or draft is None or drafters is None or verifier is None:
        raise InvalidOption("This is no pair: a draft model or a verifier is missing.", "Name both.")
    if not prompts:
        raise InvalidOption("There are no prompts to profile the pair on.", "Give some dozens, one a line.")
    draft_hash, verifier_hash = known.hashes()
    kind = Kind(layers if layers is not None else default_layers(draft))
    drafter = drafters.take(kind)
    session = verifier.open(GREEDY)
    try:
        runs: list[Run] = []
        watcher = Watcher(drafter, session, draft.is_eog, gamma, most)
        for done, prompt in enumerate(prompts):
            if progress is not None:
                progress(done, len(prompts))
            watcher.most = min(most, parts.context - len(prompt))
            runs.append(watcher.run(prompt))
    finally:
        session.close()
        drafters.give(kind, drafter)
    points = exit_points(draft, drafters, prompts, threshold=THRESHOLD, gamma=gamma, most=most, threads=parts.threads)
    profile = build(
        runs, draft_hash=draft_hash, verifier_hash=verifier_hash, gamma=gamma, layers=kind.layers,
        batch_seconds=batch_seconds(draft, prompts[0], parts.threads), exits=points,
    )  # fmt: skip
    if progress is not None:
        progress(len(prompts), len(prompts))
    known.use(profile, save=False)
    return profile
