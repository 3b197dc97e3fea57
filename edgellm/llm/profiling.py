"""Profiling of a pair on this device: on prompts, or in its first replies."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from edgellm.errors import InvalidOption, ProfileStopped, Stopped
from edgellm.llm.engine import DrafterKind, PairEngine
from edgellm.llm.pair_stats import FIRST, PairStats
from edgellm.spec.gates.fitting import Run, Seen, build
from edgellm.spec.gates.profile import VERSION, Profile, ProfileTerms, signals
from edgellm.spec.loop import Detokenizer, generate
from edgellm.spec.ngram.sources import ContextLookup, disagreements, dissents, lookup_threshold
from edgellm.spec.params import BUDGET_CHUNK, has
from edgellm.spec.protocols import Drafter, DraftRules, Gate, GenerationLimits, GenerationState, Verifier
from edgellm.spec.stats import Summary
from edgellm.spec.types import Chunk, Decision, Ids, Notice, Round
from edgellm.state import from_json, read_cached, write_state

_ENOUGH = 64  # verified chunks that make a profile of a new pair


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """The options of a profile.

    `gamma` drafted tokens a chunk, and replies of at most `max_tokens`. `layers` are those whose attention is
    importance, by default the one that foretells most. `context_lookup`: also find the confidence below which the
    context's token is the better draft.
    """

    gamma: int = BUDGET_CHUNK
    max_tokens: int = 96
    layers: tuple[int, ...] | None = None
    context_lookup: bool = True


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
    gamma, most = options.gamma, options.max_tokens
    measurable = bool(draft.header.attention_layers) and has("importance")
    layers = draft.header.attention_layers if options.layers is None else options.layers
    terms = ProfileTerms(*known.hashes(), gamma, layers if measurable else ())
    searches = options.layers is None and measurable
    asked = repr((terms, options, VERSION, [prompt.tolist() for prompt in prompts]))
    done = RunRecorder(known.file(".progress.json"), hashlib.sha256(asked.encode()).hexdigest())
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
    except (KeyboardInterrupt, Stopped):
        raise ProfileStopped(
            f"The profile was stopped after {len(done.runs)} of {len(prompts)} prompts.",
            "Run the same command to continue." if done.saved else "Nothing is kept of it: start it again.",
        ) from None
    profile = build(runs, terms, hesitates=below)
    done.remove()
    progress(len(prompts), len(prompts))
    known.use(profile, save=False)
    return profile


class FirstReplies:
    """The first replies of a pair, which make its profile."""

    def __init__(self, stats: PairStats) -> None:
        self._stats = stats
        self._recorder: RunRecorder | None = None
        self._announced = False

    def begin(self, layers: tuple[int, ...]) -> "tuple[ObservedReply, list[Notice]]":
        """Return the gate of such a reply, which measures the attention of `layers`; and the notices for the user,
        given once."""
        told, self._announced = self._announced, True
        notice = Notice(
            f"This pair has no profile yet. Its first {_ENOUGH} chunks are all verified to make one;"
            " the budget is kept from then on. `edgellm profile` makes a better one from your own prompts."
        )
        return ObservedReply(layers), [] if told else [notice]

    def end(self, gate: "ObservedReply", gamma: int, layers: tuple[int, ...]) -> Notice | None:
        """Add such a reply; return a notice for the user once the first replies make a profile."""
        stats = self._stats
        if stats.known_profile is not None:  # A concurrent reply was first.
            return None
        if self._recorder is None:
            self._recorder = RunRecorder(stats.file(FIRST))
        recorder = self._recorder
        if not gate.seen.alone:  # nothing was drafted
            return None
        recorder.add(gate.seen)
        if sum(len(run.verified) for run in recorder.runs) < _ENOUGH:
            return None if recorder.saved or not stats.saves else _UNSAVED
        terms = ProfileTerms(*stats.hashes(), gamma, layers, origin="first replies")
        made = build(recorder.runs, terms)
        if not stats.saves:
            stats.use(made, save=False)
            return Notice("The pair has a profile now. It is not saved, because the history is off.")
        try:
            path = stats.use(made)
        except OSError as error:
            return Notice(f"The pair's profile cannot be saved ({error}). It will be made again next time.")
        return Notice(f"The pair has a profile now ({path}). The budget is kept from the next reply on.")


_UNSAVED = Notice("What the pair's first replies show cannot be saved. It will be observed again next time.")


def mean_importance(chunk: Chunk) -> tuple[float, ...]:
    """Return the mean importance of a chunk's tokens; 0 where it was not measured."""
    return (round(chunk.importance or 0.0, 6),)


class ObservedReply(Gate):
    """The gate of an observed reply: every chunk is verified, or none, and what is `seen` of it is recorded. Replies
    that are all verified stand for the draft model's own, too."""

    def __init__(
        self, layers: tuple[int, ...] = (), *, verifies: bool = True,
        importance: Callable[[Chunk], tuple[float, ...]] = mean_importance,
    ) -> None:  # fmt: skip
        """Have the attention of `layers` measured. Not `verifies`: the draft model writes alone. `importance` returns
        that of a chunk, or that in each layer."""
        self.layers, self._verifies, self._importance = layers, verifies, importance
        self.seen = Run()

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        return Decision(self._verifies, "the pair has no profile yet: every chunk of its first replies is verified")

    def observe(self, state: GenerationState, turn: Round) -> None:
        chunk, verdict = turn.chunk, turn.verdict
        if not len(chunk) or (self._verifies and verdict is None):
            return
        importance, run = self._importance(chunk), self.seen
        run = replace(
            run, alone=(*run.alone, (round(float(chunk.confidence.mean()), 6), *importance)),
            tokens=(*run.tokens, *chunk.confidence.round(6).tolist()),
        )  # fmt: skip
        if verdict is not None:
            seen = signals(chunk, state.written).round(6).tolist()
            run = replace(
                run, verified=(*run.verified, Seen(tuple(seen), verdict.accepted, importance)),
                disagreements=(*run.disagreements, *disagreements(chunk, verdict)),
                doubt=float(chunk.confidence[dissents(chunk)].min(initial=run.doubt)),
            )  # fmt: skip
        self.seen = run


class _Verified(Drafter):
    """A drafter whose every chunk is needed: a busy verifier is waited for."""

    needs_verdict = True

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        return self._drafter.propose(state, gamma)


class PairProfiler:
    """A greedy run of prompts through a pair, in chunks of the limits' `gamma`."""

    def __init__(
        self, drafter: Drafter, verifier: Verifier, vocabulary: Detokenizer, limits: GenerationLimits, *,
        by_layer: bool = False,
    ) -> None:  # fmt: skip
        """Watch the pair write replies. `by_layer`: the drafter tells importance layer by layer."""
        self._drafter, self._verifier, self._vocabulary, self._limits = drafter, verifier, vocabulary, limits
        self._importance = self._by_layer if by_layer else mean_importance

    def record(self, prompt: Ids, *, context_lookup: bool = True) -> Run:
        """Return the observations for `prompt`. With `context_lookup`, the context's tokens are compared with the draft
        model's; they replace none of them."""
        verified = self._written(prompt, DraftRules(context=ContextLookup(prompt) if context_lookup else None))
        alone = self._written(prompt, DraftRules(), verifies=False)
        return replace(verified, alone=alone.alone, tokens=alone.tokens)

    def with_lookup(self, prompt: Ids, run: Run, below: float) -> Run:
        """Return the run with the verified reply in which drafts of less confidence than `below` are replaced by the
        context's token; the reply is written again only if the drafts change."""
        if run.doubt >= below:
            return run
        again = self._written(prompt, DraftRules(lookup_below=below, context=ContextLookup(prompt)))
        return replace(run, with_lookup=again.verified)

    def _written(self, prompt: Ids, rules: DraftRules, *, verifies: bool = True) -> Run:
        """Write a reply; not `verifies`: the draft model's own."""
        gate = ObservedReply(verifies=verifies, importance=self._importance)
        for _ in generate(
            GenerationState(prompt, limits=self._limits, rules=rules), vocabulary=self._vocabulary, gate=gate,
            drafter=_Verified(self._drafter) if verifies else self._drafter,
            verifier=self._verifier if verifies else None, stats=Summary(),
        ):  # fmt: skip
            pass
        return gate.seen

    def _by_layer(self, chunk: Chunk) -> tuple[float, ...]:
        layers = self._drafter.importance_by_layer(len(chunk))  # type: ignore[attr-defined]
        return tuple(layers.mean(axis=1).round(6).tolist())


class RunRecorder:
    """Observed replies, kept in a file until they make a profile: figures, and no words of prompts or replies."""

    def __init__(self, path: Path | None, terms: str = "") -> None:
        """Go on with the file at `path`, None: keep them only in memory. Runs under other `terms` are ignored."""
        self._path, self._terms = path, terms
        self.runs = (path and read_cached(path, self._runs)) or []
        self.saved = bool(self.runs)
        """The file has all runs."""

    def _runs(self, rows: Any) -> list[Run]:
        terms, *runs = rows
        return [from_json(Run, row) for row in runs] if terms == self._terms else []

    def add(self, run: Run) -> None:
        """Add the next run, and write the file, if that is possible."""
        self.runs.append(run)
        self.saved = False
        with suppress(OSError):
            if self._path is not None:
                write_state(self._path, json.dumps([self._terms, *map(asdict, self.runs)]))
                self.saved = True

    def remove(self) -> None:
        """Remove the file: the profile is complete."""
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)
