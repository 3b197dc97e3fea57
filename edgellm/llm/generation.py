"""Generation of one reply: which drafter, gate and verifier, and the record that travels between them."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

from edgellm.engine import Model, ShouldStop
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported
from edgellm.llm.drafter_pool import DrafterKind, Drafters, exit_layers
from edgellm.llm.ngram_runtime import NgramRuntime, NgramSession
from edgellm.llm.pair_stats import PairStats
from edgellm.spec.draft_length import MOST
from edgellm.spec.drafters.acceptance import Acceptance, Probabilities
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.parallel import FAR, ParallelDrafter
from edgellm.spec.drafters.verdict_prediction import BRANCHES, MOST_BRANCHES, branches, rejection
from edgellm.spec.gates.factory import GateChoice, choose, needs_profile
from edgellm.spec.gates.online_profiler import FirstReply
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.rules import AlwaysGate, NeverGate
from edgellm.spec.loop import Event, generate
from edgellm.spec.ngram.sources import ContextLookup
from edgellm.spec.params import CHUNK, FINE, ReplyOptions
from edgellm.spec.protocols import Drafter, Gate, Verifier
from edgellm.spec.state import NOT_FILLED, DraftRules, GenerationLimits, GenerationState
from edgellm.spec.stats import Stats
from edgellm.spec.stream import until
from edgellm.spec.types import Explanation, Ids, Notice, Sampling


def why_not(silent: bool, verified: bool, options: ReplyOptions) -> str:
    """Return why the tokens of a reply would not all be those of one model that reports probabilities, "" otherwise.
    `silent`: the verifier is on another device, and does not report; `verified`: there is one beside the model.
    """
    if silent:
        return "the verifier is on another device, and does not send them"
    if verified and (options.budget not in (None, 1.0) or options.gate not in ("auto", "always")):
        return "not every token is verified, and what is not is not the verifier's"
    return ""


_log = logging.getLogger(__name__)

LONG = 16
"""Tokens that the small model drafts at most, where each is drafted only if it pays."""


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of a pair. `linked`: the verifier is across a link; `extra` as in `GenerationLimits`."""

    text: Model
    draft: Model | None
    drafters: Drafters | None
    verifier: Verifier | None
    knowledge: PairStats | None
    context: int
    extra: int
    threads: int | None
    linked: bool = False
    retrieval: NgramRuntime | None = None


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The way in which one reply is written, and the reasons. `rejection` as in `ParallelDrafter`, which looks ahead at
    `branches` guesses; `acceptance` learns from verdicts. `first`: the reply is one of those that make the pair's
    profile. `gamma`: tokens that the draft model drafts at most where copies are drafted, too.
    """

    choice: GateChoice
    kind: DrafterKind
    branches: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    alpha: float | None = None  # acceptance rate for the paper's rule
    first: FirstReply | None = None
    gamma: int = LONG
    notices: tuple[Notice, ...] = ()
    reasons: tuple[str, ...] = ()

    def rejection(self, confidence: Sequence[float]) -> Probabilities:
        """Return where a chunk will be rejected: with the paper's gate by its estimate, else by the verdicts so far."""
        return self.acceptance.rejection(confidence) if self.alpha is None else rejection(confidence, self.alpha)


def write(
    parts: Components, prompt: Ids, options: ReplyOptions, sampling: Sampling, stats: Stats, explain: bool,
    stopped: ShouldStop,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write the reply to `prompt` (n,). Raise what `generate` raises, and ProfileUnusable."""
    plan = plan_reply(parts, options, sampling.seed)
    yield from plan.notices
    copying, why = _copying(parts, options, plan)
    _log.debug("a reply to %d tokens: %s", len(prompt), "; ".join((*plan.reasons, why)))
    try:
        if explain:
            yield from (Explanation(None, reason) for reason in (*plan.reasons, why))
        verifier, gate = parts.verifier, plan.choice.gate
        drafts = parts.draft is not None and options.drafter is None and (verifier is not None or copying is None)
        if options.drafter is not None and verifier is None and parts.retrieval is not None:
            verifier, gate = parts.retrieval.itself(), AlwaysGate()
        if options.logprobs is not None:
            drafts, verifier, gate = drafts and not parts.linked, reporting(parts, options), AlwaysGate()
        state = GenerationState(
            prompt, sampling, _limits(parts, options, plan, copying, drafts),
            rules=DraftRules(
                plan.choice.stop_below, plan.choice.lookup_below, while_it_pays=not parts.linked, alone=verifier is None
            ),
            stopped=stopped, logprobs=options.logprobs, explain=explain,
            context=ContextLookup(prompt) if plan.choice.lookup_below else None,
            suggestions=None if copying is None else copying.suggestions,
            filling=NOT_FILLED if copying is None else copying.filling,
        )  # fmt: skip
        written = _written(parts, state, plan, gate, verifier, copying, stats, options.drafter, drafts=drafts)
        yield from until(options.stop, written, stats) if options.stop else written
    finally:
        _log.info("a reply of %d tokens to %d: %s", stats.tokens, len(prompt), stats.finish_reason)
        if copying is not None:
            copying.close()
        if parts.knowledge is not None and stats.verdict_seconds is not None:
            parts.knowledge.waited(stats.verdict_seconds, stats.verified_drafted)
    if parts.retrieval is not None and stats.finish_reason == "stop":
        parts.retrieval.add(prompt, stats.ids)


def _limits(
    parts: Components, options: ReplyOptions, plan: GenerationPlan, copying: NgramSession | None, drafts: bool
) -> GenerationLimits:
    gamma = plan.choice.gamma if copying is None else MOST
    return GenerationLimits(
        options.max_tokens, parts.context, gamma, extra=0 if drafts or options.drafter is not None else parts.extra
    )


def _written(
    parts: Components, state: GenerationState, plan: GenerationPlan, gate: Gate, verifier: Verifier | None,
    copying: NgramSession | None, stats: Stats, drafter: Drafter | None, *, drafts: bool,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write the reply `state` as `plan` says. `drafts`: the draft model does so; `copying` may, too."""
    choice, text = plan.choice, parts.text
    own = parts.drafters.take(plan.kind) if parts.drafters is not None and drafts else None
    drafter = drafter or own
    guessed = None
    if plan.branches and isinstance(own, ModelDrafter):
        ahead = ParallelDrafter(
            own, is_eog=text.is_eog, rejection=plan.rejection, branches=plan.branches, acceptance=plan.acceptance
        )
        drafter, guessed = ahead, ahead.guessed
    if copying is not None:
        drafter, verifier = copying.beside(drafter, plan.gamma), copying.verifier(verifier)
        gate = AlwaysGate() if parts.verifier is None else gate
    stats.count_with(choice.ledger, guessed, copying.counts if copying is not None else None)
    try:
        yield from generate(
            state, vocabulary=text, drafter=drafter, gate=gate, verifier=verifier, stats=stats,
            announce=parts.linked and own is not None and not isinstance(gate, NeverGate),
        )  # fmt: skip
        if plan.first is not None and parts.knowledge is not None:
            news = parts.knowledge.end_first(plan.first, choice.gamma, plan.kind.layers)
            yield from () if news is None else (news,)
    finally:
        if parts.drafters is not None and own is not None:
            parts.drafters.give(plan.kind, own)


def _copying(parts: Components, options: ReplyOptions, plan: GenerationPlan) -> tuple[NgramSession | None, str]:
    """Return the retrieval of drafts for the reply, None where it cannot be used; and why."""
    if options.drafter is not None:
        return None, "nothing is retrieved: the drafter is your own"
    if options.logprobs is not None:
        return None, "nothing is retrieved: probabilities are asked for"
    if not (sources := options.sources()):
        return None, "nothing is retrieved, as you said"
    if parts.retrieval is None:
        return None, "nothing is retrieved: nobody here verifies"
    lossless = plan.choice.ledger is None or options.budget in (None, 1.0)
    checked = parts.verifier is None or (lossless and options.gate in ("auto", "always"))
    if not checked or plan.first is not None or options.budget == 0.0:
        return None, "nothing is retrieved: not everything is verified"
    if options.temperature > 0.0 and parts.verifier is not None and parts.draft is not None:
        return None, "nothing is retrieved: beside the small model's draws a seed would not repeat the reply"
    copying = parts.retrieval.begin(sources)
    if copying is None:
        return None, "nothing is retrieved: another reply does so"
    return copying, f"drafts are retrieved from: {', '.join(sources)}{parts.retrieval.heads}"


def reporting(parts: Components, options: ReplyOptions) -> Verifier:
    """Return the verifier of a reply whose tokens come with probabilities: the pair's own if it reports them, else the
    model itself.

    Raises:
        InvalidOption: the true probabilities cannot be told; says why.
    """
    own = parts.verifier if parts.verifier is not None and parts.verifier.reports_logprobs else None
    if why := why_not(parts.linked and own is None, parts.verifier is not None, options):
        raise InvalidOption(f"logprobs cannot be told: {why}.", "Leave logprobs out, or verify everything here.")
    if own is not None:
        return own
    retrieval = parts.retrieval or NgramRuntime(parts.text, parts.context, parts.threads, linked=False)
    return retrieval.itself()


def plan_reply(parts: Components, options: ReplyOptions, seed: int) -> GenerationPlan:
    """Return how this pair writes a reply: the `options` as far as it can follow them, and the reasons."""
    known, draft = parts.knowledge, parts.draft
    if known is None or draft is None:
        alone = AlwaysGate() if draft is None else NeverGate()
        who = "the verifier" if draft is None else "the draft model"
        kind, reason = _early(parts, options, None, DrafterKind())
        news: tuple[Notice, ...] = ()
        if options.budget not in (None, 1.0 if draft is None else 0.0):
            news = (Notice(f"The budget of {options.budget} says nothing here: {who} writes alone."),)
        choice = GateChoice(alone, "", options.gamma or CHUNK)
        gamma = _beside(parts, options, choice)
        return GenerationPlan(choice, kind, gamma=gamma, notices=news, reasons=(f"{who} writes alone", reason))
    needed = needs_profile(options)
    profile = known.profile(needed)
    first: FirstReply | None = None
    notices: list[Notice] = []
    ledger = known.ledger(options)
    if needed and profile is None:
        layers = default_layers(draft)
        first, notices = known.begin_first(layers)
        choice = GateChoice(first, "the pair has no profile yet", options.gamma or FINE, layers)
    else:
        choice = choose(options, seed, profile=profile, ledger=ledger, linked=parts.linked)
    kind, early = _early(parts, options, profile, DrafterKind(choice.layers))
    many, parallel = _parallel(parts, options, profile, kind, choice)
    if first is not None:  # importance is not measured for what is drafted ahead
        many, parallel = 0, "no parallel inference: the pair is being profiled"
    if many:
        kind = DrafterKind(kind.layers, MOST_BRANCHES, max(choice.gamma, FAR))
    alpha = profile.alpha if profile is not None and options.gate == "synera" else None
    return GenerationPlan(
        choice, kind, many, known.acceptance(options), alpha, first, _beside(parts, options, choice), tuple(notices),
        (choice.reason, early, parallel),
    )  # fmt: skip


def _beside(parts: Components, options: ReplyOptions, choice: GateChoice) -> int:
    """Return how many tokens the draft model drafts at most beside copies: here each is drafted only if it pays."""
    return LONG if options.gamma is None and not parts.linked else choice.gamma


def default_layers(model: Model) -> tuple[int, ...]:
    """Return the layers whose attention is importance by default: an early one, but not the first."""
    return (min(1, model.n_layer - 1),)


def _early(
    parts: Components, options: ReplyOptions, profile: Profile | None, kind: DrafterKind
) -> tuple[DrafterKind, str]:
    """Return `kind` with an early exit where drafts leave the model early, and why."""
    if options.early_exit == "off" or parts.draft is None:
        return kind, "no early exit, as you said" if parts.draft is not None else "no early exit: nobody drafts"
    layer, why = profile.best_exit() if profile is not None else (None, "the pair has no profile that says it pays")
    if options.early_exit == "on" and layer is None:
        try:
            layer, why = exit_layers(parts.draft.header)[0], "as you said"
        except (IndexError, ModelUnsupported, ModelCorrupt) as error:
            return kind, f"no early exit: {error}"
    if layer is None:
        return kind, f"no early exit: {why}"
    return DrafterKind(kind.layers, exit_layer=layer, threshold=options.exit_threshold), f"early exit: {why}"


def _parallel(
    parts: Components, options: ReplyOptions, profile: Profile | None, kind: DrafterKind, choice: GateChoice
) -> tuple[int, str]:
    """Return how many guesses are followed while a verdict is on its way, and why."""
    if not options.parallel:
        return 0, "no parallel inference, as you said"
    if not parts.linked:
        return 0, "no parallel inference: the verifier computes on this device"
    if kind.exit_layer is not None:
        return 0, "no parallel inference: a draft model with an early exit has no branches"
    if isinstance(choice.gate, NeverGate):
        return 0, "no parallel inference: nothing waits for a verdict"
    if profile is None or not profile.batch_seconds or parts.knowledge is None:
        return BRANCHES, f"parallel inference with {BRANCHES} guesses: their cost is not measured"
    wait = parts.knowledge.verdict_seconds or profile.verify_seconds
    return branches(profile.batch_seconds, wait, max(choice.gamma, FAR))
