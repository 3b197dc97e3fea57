"""Profiling of a pair on this device: on prompts, or in its first replies."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from edgellm.engine import Ids
from edgellm.errors import InvalidOption, ProfileStopped, Stopped
from edgellm.llm.engine import DrafterKind, PairEngine
from edgellm.llm.pair_stats import FIRST, LEARNED, PairStats
from edgellm.spec.gates.fitting import build
from edgellm.spec.gates.profile import VERSION, Profile, ProfileTerms
from edgellm.spec.gates.profiler import ObservedReply, PairProfiler, RunRecorder
from edgellm.spec.mechanisms import has, mechanism
from edgellm.spec.ngram.sources import lookup_threshold
from edgellm.spec.params import BUDGET_CHUNK
from edgellm.spec.state import GenerationLimits
from edgellm.spec.types import Notice

_ENOUGH = 64  # verified chunks that make a profile of a new pair


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The options of a profile.

    `gamma` drafted tokens a chunk, and replies of at most `max_tokens`. `layers` are those whose attention is
    importance, by default the one that foretells most. `context_lookup`: also find the confidence below which the
    context's token is the better draft. `early_exit`: also measure where it pays to leave the draft model early, which
    loads parts of the model twice.
    """

    gamma: int = BUDGET_CHUNK
    max_tokens: int = 96
    layers: tuple[int, ...] | None = None
    context_lookup: bool = True
    early_exit: bool = False


def profile_pair(
    engine: PairEngine, prompts: Sequence[Ids], options: ProfileOptions, progress: Callable[[int, int], None]
) -> Profile:
    """Return a new profile, which is the pair's from now on. `progress` is called with the number of finished prompts
    and of all."""
    known, draft, drafters, verifier = engine.knowledge, engine.draft, engine.drafters, engine.verifier
    if known is None or draft is None or drafters is None or verifier is None:
        raise InvalidOption("A profile needs both a draft model and a verifier, and one is missing.", "Name both.")
    if not prompts:
        raise InvalidOption("There are no prompts to profile the pair on.", "Give a few dozen, one per line.")
    gamma, most, threads = options.gamma, options.max_tokens, engine.config.threads
    measurable = bool(draft.attention_layers) and has("importance")
    layers = draft.attention_layers if options.layers is None else options.layers
    terms = ProfileTerms(*known.hashes(), gamma, layers if measurable else ())
    searches = options.layers is None and measurable
    done = RunRecorder(
        known.file(".progress.jsonl"),
        {**asdict(terms), "layers": list(terms.layers), "most": most, "lookup": options.context_lookup,
         "searches": searches, "version": VERSION,
         "prompts": hashlib.sha256(repr([prompt.tolist() for prompt in prompts]).encode()).hexdigest()},
    )  # fmt: skip
    try:
        with drafters.taken(DrafterKind(terms.layers)) as drafter:
            limits = GenerationLimits(most, engine.context, gamma)
            profiler = PairProfiler(drafter, verifier, draft, limits, by_layer=searches)
            for count in range(len(done.runs), len(prompts)):
                progress(count, len(prompts))
                done.add(profiler.record(prompts[count], context_lookup=options.context_lookup))
            below = lookup_threshold([each for run in done.runs for each in run.disagreements])
            recorded = zip(prompts, done.runs, strict=True)
            runs = [profiler.with_lookup(prompt, run, below) for prompt, run in recorded]
        points, batch = (), ()
        if options.early_exit:
            exits, asked = mechanism("early exit"), {"gamma": gamma, "most": most, "threads": threads}
            points = exits.exit_points(draft, drafters, prompts, **asked)
        if has("parallel drafting"):
            batch = mechanism("parallel drafting").batch_seconds(draft, prompts[0], threads)
    except BaseException as error:
        kept = done.save()
        if not isinstance(error, KeyboardInterrupt | Stopped):
            raise
        raise ProfileStopped(
            f"The profile was stopped after {len(done.runs)} of {len(prompts)} prompts.",
            "Run the same command to continue." if kept else "Nothing is kept of it: start it again.",
            len(done.runs), len(prompts), kept=kept,
        ) from None  # fmt: skip
    fitted = build(runs, terms, prompts=prompts, hesitates=below)
    profile = replace(fitted, batch_seconds=batch, exits=points)
    done.remove()
    progress(len(prompts), len(prompts))
    known.use(profile, save=False)
    return profile


class FirstReplies:
    """The first replies of a pair, which make its profile, and further ones that improve it."""

    def __init__(self, stats: PairStats) -> None:
        self._stats = stats
        self._recorder: RunRecorder | None = None
        self._announced = False

    def begin(self, layers: tuple[int, ...], *, improves: bool) -> tuple[ObservedReply, list[Notice]]:
        """Return the gate of such a reply, which measures the attention of `layers`; and the notices for the user,
        given once. With `improves` the user has asked for the profile, and gets none."""
        notices = []
        if not self._announced and not improves:
            notices.append(Notice(
                f"This pair has no profile yet. Its first {_ENOUGH} chunks are all verified to make one;"
                " the budget is kept from then on. `edgellm profile` makes a better one from your own prompts."
            ))  # fmt: skip
        self._announced = True
        return ObservedReply(layers, improves=improves), notices

    def end(self, gate: ObservedReply, gamma: int, layers: tuple[int, ...]) -> Notice | None:
        """Add such a reply; return a notice for the user once the first replies make a profile."""
        stats, profile = self._stats, self._stats.known_profile
        if profile is not None and not (gate.improves and stats.learns()):  # A concurrent reply was first.
            return None
        if self._recorder is None:
            self._recorder = RunRecorder(stats.file(FIRST))
        recorder = self._recorder
        if (run := gate.run()) is not None:
            recorder.add(run)
        known = 0 if profile is None else profile.terms.chunks
        if recorder.chunks < max(_ENOUGH, 2 * known):
            return None if recorder.save() or not stats.saves else _UNSAVED
        terms = ProfileTerms(*stats.hashes(), gamma, layers, origin="first replies")
        made = build(recorder.runs, terms)
        if not stats.saves:
            stats.use(made, save=False)
            return Notice("The pair has a profile now. It is not saved, because the history is off.")
        try:
            path = stats.use(made)
        except OSError as error:
            return Notice(f"The pair's profile cannot be saved ({error}). It will be made again next time.")
        recorder.remove()
        if gate.improves and made.terms.chunks < LEARNED:
            recorder.save()
        if known:
            return Notice(f"The pair's profile is made of {made.terms.chunks} chunks now.")
        return Notice(f"The pair has a profile now ({path}). The budget is kept from the next reply on.")


_UNSAVED = Notice("What the pair's first replies show cannot be saved. It will be observed again next time.")
