"""Generation of one reply: chooses drafter, gate and verifier, and runs the decoding loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from edgellm.engine import Model, ShouldStop
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported
from edgellm.llm.drafter_pool import DrafterKind, Drafters, exit_layers
from edgellm.llm.idle_work import IdleWork
from edgellm.llm.ngram_runtime import NgramRuntime, NgramSession
from edgellm.llm.pair_stats import PairStats
from edgellm.spec.channels import ChannelSplitter
from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.draft_length import MAX_DRAFT
from edgellm.spec.drafters.acceptance import Acceptance, Probabilities
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafters.pace import PaceChoice
from edgellm.spec.drafters.parallel import MAX_AHEAD, ParallelDrafter
from edgellm.spec.drafters.speculator import SpeculatorDrafter
from edgellm.spec.drafters.translation import TokenTranslation
from edgellm.spec.drafters.verdict_prediction import BRANCHES, MAX_BRANCHES, choose_branches, rejection
from edgellm.spec.gates.factory import GateChoice, choose, needs_profile
from edgellm.spec.gates.profile import Profile
from edgellm.spec.gates.profiler import FirstReply
from edgellm.spec.gates.rules import AlwaysGate, NeverGate
from edgellm.spec.loop import Event, generate
from edgellm.spec.ngram.sources import ContextLookup
from edgellm.spec.params import BUDGET_CHUNK, CHUNK, ReplyOptions
from edgellm.spec.protocols import Drafter, Gate
from edgellm.spec.state import NOT_FILLED, DraftRules, GenerationLimits, GenerationState
from edgellm.spec.stats import Stats
from edgellm.spec.stream import cut_at_stops
from edgellm.spec.types import Explanation, Ids, Notice, PromptProgress, Sampling
from edgellm.spec.verifier import Verifier


def logprobs_unavailable(remote: bool, has_verifier: bool, options: ReplyOptions) -> str:
    """Return why log-probabilities are not available for a reply, "" if they are. `remote`: the verifier is on another
    device and does not report them; `has_verifier`: there is a verifier beside the draft model."""
    if remote:
        return "the verifier is on another device and does not send them"
    if has_verifier and (options.budget not in (None, 1.0) or options.gate not in ("auto", "always")):
        return "not every token is verified"
    return ""


_log = logging.getLogger(__name__)

OnProgress: TypeAlias = Callable[[PromptProgress], None]

MAX_MODEL_DRAFT = 16
"""Maximum tokens of a draft model's chunk if each token is drafted only while it pays."""


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
    idle: IdleWork = field(default_factory=IdleWork)
    placements: tuple[str, ...] = ()  # where each model is, and why
    speculator_or_draft: PaceChoice = field(default_factory=lambda: PaceChoice(_REPLIES))
    """Between the draft model and the verifier's speculator, from reply to reply."""
    tail: PaceChoice = field(default_factory=lambda: PaceChoice(_VERDICTS))
    """Between chunks of the draft model alone, and with extra tokens of a linked verifier behind them."""


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The settings of one reply, and the reasons for them.

    `rejection` as in `ParallelDrafter`, which drafts `branches` at once; `acceptance` learns from verdicts. `first`:
    the gate of one of the replies that make the pair's profile. `gamma`: maximum tokens of the draft model's chunk
    beside retrieval.
    """

    choice: GateChoice
    kind: DrafterKind
    branches: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)
    alpha: float | None = None  # acceptance rate for the paper's rule
    first: FirstReply | None = None
    gamma: int = MAX_MODEL_DRAFT
    notices: tuple[Notice, ...] = ()
    reasons: tuple[str, ...] = ()

    def rejection(self, confidence: Sequence[float]) -> Probabilities:
        """Return where a chunk will be rejected: with the paper's gate by its estimate, else by the verdicts so far."""
        return self.acceptance.rejection(confidence) if self.alpha is None else rejection(confidence, self.alpha)


def write(
    parts: Components, prompt: Ids, options: ReplyOptions, sampling: Sampling, channels: ChannelSplitter, stats: Stats,
    explain: bool, should_stop: ShouldStop, on_progress: OnProgress, *, draft_prompt: Ids | None = None,
    heads: Sequence[str] = (),
) -> Generator[Event, None, None]:  # fmt: skip
    """Write the reply to `prompt` (n,), separated by `channels`, while nothing else is computed; `draft_prompt` as for
    `GenerationState`, `heads` as for `cut_at_stops`. Raise what `generate` raises, and ProfileUnusable."""
    with parts.idle.suspended():
        yield from _write(
            parts, prompt, options, sampling, channels, stats, explain, should_stop, on_progress,
            draft_prompt=draft_prompt, heads=heads,
        )  # fmt: skip


def _write(
    parts: Components, prompt: Ids, options: ReplyOptions, sampling: Sampling, channels: ChannelSplitter, stats: Stats,
    explain: bool, should_stop: ShouldStop, on_progress: OnProgress, *, draft_prompt: Ids | None,
    heads: Sequence[str],
) -> Generator[Event, None, None]:  # fmt: skip
    plan = plan_reply(parts, options, sampling)
    yield from plan.notices
    speculates, speculator_why = _choose_speculator(parts, options, plan)
    ngram, why = _open_retrieval(parts, options, plan, len(prompt), speculates)
    speculates = speculates and ngram is not None
    _log.debug("reply to a prompt of %d tokens: %s", len(prompt), "; ".join((*plan.reasons, why, speculator_why)))
    try:
        if explain:
            yield from (
                Explanation(None, reason)
                for reason in (*plan.reasons, why, speculator_why, channels.reason, *parts.placements)
                if reason
            )
        verifier, gate = parts.verifier, plan.choice.gate
        drafts = parts.draft is not None and options.drafter is None and (verifier is not None or ngram is None)
        if parts.drafters is not None and parts.drafters.translation is not None and draft_prompt is None:
            drafts = False  # the draft model cannot read this prompt: the verifier writes alone
        if options.drafter is not None and verifier is None and parts.retrieval is not None:
            verifier, gate = parts.retrieval.self_verifier(), AlwaysGate()
        if options.logprobs is not None:
            drafts, verifier, gate = drafts and not parts.linked, reporting(parts, options), AlwaysGate()
        alike = verifier is None or verifier.capabilities.choice.draws_alike(sampling)
        server_draws = not alike and _checked(parts, options, plan)
        state = GenerationState(
            prompt, sampling, _limits(parts, options, plan, ngram, drafts),
            rules=DraftRules(
                plan.choice.stop_below, plan.choice.lookup_below, while_it_pays=not parts.linked,
                greedy=server_draws,
            ),
            should_stop=should_stop, logprobs=options.logprobs, explain=explain,
            context=ContextLookup(prompt) if plan.choice.lookup_below else None,
            suggestions=None if ngram is None else ngram.suggestions,
            filling=NOT_FILLED if ngram is None else ngram.filling, channel=channels.channel, draft_prompt=draft_prompt,
            on_progress=on_progress,
            grammar=None if sampling.constraint is None else ReplyGrammar.of(sampling.constraint, parts.text.grammar),
            tail=parts.tail if drafts and _asks_tail(parts, options, plan) else None,
        )  # fmt: skip
        events = _generate(
            parts, state, channels, plan, gate, verifier, ngram, stats, options.drafter, drafts=drafts,
            speculates=speculates,
        )  # fmt: skip
        yield from cut_at_stops(options.stop, events, stats, heads) if options.stop or heads else events
    finally:
        _log.info("reply of %d tokens to a prompt of %d: %s", stats.tokens, len(prompt), stats.finish_reason)
        if ngram is not None:
            ngram.close()
        if parts.knowledge is not None and stats.verdict_seconds is not None:
            parts.knowledge.observe_verdicts(stats.verdict_seconds, stats.verified_drafted)
    if (
        parts.draft is not None
        and parts.verifier is not None
        and parts.verifier.capabilities.speculator
        and ngram is not None
    ):
        parts.speculator_or_draft.record(speculates, stats.tokens, stats.seconds)
    if parts.retrieval is not None and stats.finish_reason == "stop":
        parts.retrieval.add(prompt, stats.ids)


def _limits(
    parts: Components, options: ReplyOptions, plan: GenerationPlan, ngram: NgramSession | None, drafts: bool
) -> GenerationLimits:
    gamma = plan.choice.gamma if ngram is None else MAX_DRAFT
    alone = not drafts and options.drafter is None
    asks = alone or ngram is not None or (drafts and _asks_tail(parts, options, plan))
    return GenerationLimits(
        options.max_tokens, parts.context, gamma, extra=parts.extra if asks else 0,
        max_thinking=options.max_thinking, max_total=options.max_total,
    )  # fmt: skip


def _generate(
    parts: Components, state: GenerationState, channels: ChannelSplitter, plan: GenerationPlan, gate: Gate,
    verifier: Verifier | None, ngram: NgramSession | None, stats: Stats, drafter: Drafter | None, *, drafts: bool,
    speculates: bool,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write the reply `state` as `plan` says. `drafts`: the draft model drafts; with `speculates` the verifier's
    speculator does, in its place; and `ngram`, if given."""
    choice, text = plan.choice, parts.text
    model_drafter = parts.drafters.take(plan.kind) if parts.drafters is not None and drafts and not speculates else None
    drafter = drafter or model_drafter
    guessed = None
    if plan.branches and isinstance(model_drafter, ModelDrafter):
        ahead = ParallelDrafter(
            model_drafter,
            is_eog=text.is_eog,
            rejection=plan.rejection,
            branches=plan.branches,
            acceptance=plan.acceptance,
        )
        drafter, guessed = ahead, ahead.guessed
    if ngram is not None:
        verifier = ngram.verifier(verifier)
        drafter = SpeculatorDrafter(verifier, text.is_eog) if speculates else drafter
        drafter = ngram.hybrid_drafter(drafter, plan.gamma, speculates=speculates, linked=parts.linked)
        gate = AlwaysGate() if parts.verifier is None else gate
    if ngram is None:
        stats.count_with(choice.controller, guessed)
    else:
        stats.count_with(choice.controller, guessed, ngram.counts, ngram.trying)
    try:
        for _ in range(2):  # up to the limit of a thought, and behind it
            if state.thought_is_full and not _close_thought(text, state, channels, stats):
                stats.finish("length")
                break
            yield from generate(
                state, vocabulary=text, drafter=drafter, gate=gate, verifier=verifier, stats=stats, channels=channels,
                announce=parts.linked and model_drafter is not None and not isinstance(gate, NeverGate),
            )  # fmt: skip
            if not state.thought_is_full:
                break
        if plan.first is not None and parts.knowledge is not None:
            notice = parts.knowledge.end_first(plan.first, choice.gamma, plan.kind.layers)
            yield from () if notice is None else (notice,)
    finally:
        if parts.drafters is not None and model_drafter is not None:
            parts.drafters.give(plan.kind, model_drafter)


def _close_thought(text: Model, state: GenerationState, channels: ChannelSplitter, stats: Stats) -> bool:
    """End the thought by the model's own markup, which belongs to no channel. Return False where there is no room."""
    if text.thinking is None:
        return False
    ids = text.tokenize(text.thinking.closing, special=True)
    if closed := state.close_thought(ids):
        channels.close_thought()
        stats.insert(ids.tolist())
    return closed


def _choose_speculator(parts: Components, options: ReplyOptions, plan: GenerationPlan) -> tuple[bool, str]:
    """Return whether the speculator of the model that decides the text drafts, and why; "" for a model without one."""
    verifier, own = parts.verifier, parts.text.speculator
    name = verifier.capabilities.speculator if verifier is not None else own.name if own is not None else ""
    if not name or parts.linked:
        return False, ""
    nothing = f"{name} drafts nothing"
    if options.drafter is not None or options.logprobs is not None:
        return False, f"{nothing}: {'a custom drafter is used' if options.drafter else _LOGPROBS}"
    if not _checked(parts, options, plan):
        return False, f"{nothing}: not everything is verified"
    if verifier is not None and parts.draft is not None:
        if plan.kind.layers or options.early_exit == "on" or not parts.speculator_or_draft.second():
            return False, f"{nothing}: the draft model drafts in this reply"
        return True, f"{name} drafts in this reply, in place of the draft model"
    return True, f"{name} drafts where that is faster"


def _asks_tail(parts: Components, options: ReplyOptions, plan: GenerationPlan) -> bool:
    """Return whether a linked verifier may write tokens behind the draft model's chunks: it drafts them itself."""
    drafts_extra = parts.linked and parts.verifier is not None and parts.verifier.capabilities.drafts_extra
    return drafts_extra and _checked(parts, options, plan)


_VERDICTS = 8  # with extra tokens and without, before the faster way is chosen
_LOGPROBS = "log-probabilities are requested"
_REPLIES = 2  # with the draft model and with the speculator, before the faster one is chosen


def _checked(parts: Components, options: ReplyOptions, plan: GenerationPlan) -> bool:
    """Return whether every draft of the reply is verified."""
    lossless = plan.choice.controller is None or options.budget in (None, 1.0)
    checked = parts.verifier is None or (lossless and options.gate in ("auto", "always"))
    return checked and plan.first is None and options.budget != 0.0


def _open_retrieval(
    parts: Components, options: ReplyOptions, plan: GenerationPlan, prompt_tokens: int, speculates: bool
) -> tuple[NgramSession | None, str]:
    """Return the retrieval session of the reply, None if it cannot be used; and why. It also chooses when the draft
    model or, with `speculates`, the speculator drafts, then without sources if need be."""
    if options.drafter is not None:
        return None, "no retrieval: a custom drafter is used"
    if options.logprobs is not None:
        return None, f"no retrieval: {_LOGPROBS}"
    sources = options.sources()
    compares = None not in (parts.draft, parts.verifier) and options.gate == "auto" and options.gamma is None
    if not sources and not (compares or speculates):
        return None, "no retrieval, as requested"
    if parts.retrieval is None:
        return None, "no retrieval: the verifier is on another device, or missing"
    if not _checked(parts, options, plan):
        return None, "no retrieval: not everything is verified"
    ngram = parts.retrieval.begin(sources, prompt_tokens)
    if ngram is None:
        return None, "no retrieval: another reply is using it"
    if not sources:
        return ngram, "no retrieval, as requested"
    return ngram, f"drafts are retrieved from: {', '.join(sources)}{parts.retrieval.head_note}"


def reporting(parts: Components, options: ReplyOptions) -> Verifier:
    """Return a verifier that reports log-probabilities: the pair's own if it does, else the model itself.

    Raises:
        InvalidOption: they are not available, and why.
    """
    model_drafter = parts.verifier if parts.verifier is not None and parts.verifier.capabilities.logprobs else None
    if why := logprobs_unavailable(parts.linked and model_drafter is None, parts.verifier is not None, options):
        raise InvalidOption(
            f"logprobs are not available: {why}.", "Leave logprobs out, or verify every token on this device."
        )
    if model_drafter is not None:
        return model_drafter
    retrieval = parts.retrieval or NgramRuntime(parts.text, parts.context, parts.threads, None)
    return retrieval.self_verifier()


def check_sampling(parts: Components, sampling: Sampling) -> None:
    """Raise InvalidOption where the pair's verifier does not know penalties or constraints, and `sampling` has them; or
    where it does not tell enough tokens to choose one by `sampling`."""
    if parts.verifier is None:
        return
    can = parts.verifier.capabilities
    silent = "it is a server that does not tell which tokens are likely"
    if sampling.penalties is not None and not can.penalties:
        raise InvalidOption(
            f"The verifier {can.name} does not apply penalties and logit_bias: {silent}.",
            "Leave them out, or use a verifier of edgellm.",
        )
    if why := can.choice.refusal(sampling):
        raise InvalidOption(
            f"The verifier {can.name} cannot choose by penalties, logit_bias or a JSON schema: {why}.",
            f"Set temperature to 0 or top_k to at most {can.choice.likely}, and leave repeat_penalty out; or use a"
            " verifier of edgellm.",
        )
    if sampling.constraint is not None and not can.grammars:
        raise InvalidOption(
            f"The verifier {can.name} follows no JSON schema: {silent}.",
            "Leave the schema out, or use a verifier of edgellm.",
        )


def plan_reply(parts: Components, options: ReplyOptions, sampling: Sampling) -> GenerationPlan:
    """Return how this pair writes a reply with `options` by the rule `sampling`, and the reasons."""
    knowledge, draft = parts.knowledge, parts.draft
    if knowledge is None or draft is None:
        alone = AlwaysGate() if draft is None else NeverGate()
        writer = "the verifier" if draft is None else "the draft model"
        kind, reason = _early_exit(parts, options, None, DrafterKind())
        notice: tuple[Notice, ...] = ()
        if options.budget not in (None, 1.0 if draft is None else 0.0):
            notice = (Notice(f"The budget of {options.budget} has no effect: {writer} writes alone."),)
        if options.early_exit == "on" and draft is None:
            notice = (*notice, Notice("The early exit has no effect: there is no draft model to leave early."))
        choice = GateChoice(alone, "", options.gamma or CHUNK)
        gamma = _draft_limit(parts, options, choice)
        return GenerationPlan(choice, kind, gamma=gamma, notices=notice, reasons=(f"{writer} writes alone", reason))
    if parts.drafters is not None and parts.drafters.translation is not None:
        return _translated(parts, options, knowledge, parts.drafters.translation)
    if options.gate in ("importance", "synera") and not draft.attention_layers:
        raise InvalidOption(
            f"The gate {options.gate} needs attention, and {draft.name} has none.", "Use --gate auto or confidence."
        )
    wants_profile = needs_profile(options)
    profile = knowledge.profile(wants_profile)
    learns = options.learn_profile and sampling.greedy and _verifies_all(options) and knowledge.learns()
    first: FirstReply | None = None
    notices: list[Notice] = []
    controller = knowledge.controller(options)
    if learns or (wants_profile and profile is None):
        layers = default_layers(draft)
        first, notices = knowledge.begin_first(layers, improves=learns)
        reason = "the reply improves the pair's profile" if learns else "the pair has no profile yet"
        choice = GateChoice(first, reason, options.gamma or BUDGET_CHUNK, layers)
    else:
        choice = choose(options, sampling.seed, profile=profile, controller=controller, linked=parts.linked)
    kind, early = _early_exit(parts, options, profile, DrafterKind(choice.layers))
    n_branches, parallel = _branches(parts, options, profile, kind, choice)
    if first is not None:  # importance is not measured for tokens drafted ahead
        n_branches, parallel = 0, "no parallel inference: the pair is being profiled"
    if n_branches:
        kind = DrafterKind(kind.layers, MAX_BRANCHES, max(choice.gamma, MAX_AHEAD))
    alpha = profile.alpha if profile is not None and options.gate == "synera" else None
    return GenerationPlan(
        choice, kind, n_branches, knowledge.acceptance(options), alpha, first, _draft_limit(parts, options, choice),
        tuple(notices), (choice.reason, early, parallel),
    )  # fmt: skip


def _translated(
    parts: Components, options: ReplyOptions, knowledge: PairStats, translation: TokenTranslation
) -> GenerationPlan:
    """Return the plan of a reply whose drafts are translated: all of them are verified."""
    unused = [
        f"{name} has no effect"
        for name, asked in (
            (f"the budget of {options.budget}", options.budget not in (None, 1.0)),
            (f"the gate {options.gate}", options.gate not in ("auto", "always")),
            ("the early exit", options.early_exit == "on"),
        )
        if asked
    ]
    notice = Notice(f"The models have different tokenizers, so every draft is verified: {', '.join(unused)}.")
    choice = GateChoice(AlwaysGate(), translation.reason, options.gamma or CHUNK)
    return GenerationPlan(
        choice, DrafterKind(), acceptance=knowledge.acceptance(options), gamma=_draft_limit(parts, options, choice),
        notices=(notice,) if unused else (),
        reasons=(translation.reason, "no gate, early exit or parallel inference: the models have different tokenizers"),
    )  # fmt: skip


def _verifies_all(options: ReplyOptions) -> bool:
    """Return whether every chunk is verified, and drafted by the draft model."""
    checked = options.budget in (None, 1.0) and options.gate in ("auto", "always")
    return checked and options.drafter is None and options.logprobs is None


def _draft_limit(parts: Components, options: ReplyOptions, choice: GateChoice) -> int:
    """Return the maximum tokens of a draft model's chunk beside retrieval, where each must pay."""
    return MAX_MODEL_DRAFT if options.gamma is None and not parts.linked else choice.gamma


def default_layers(model: Model) -> tuple[int, ...]:
    """Return the default layers for attention-based importance: the second that has attention."""
    return model.attention_layers[:2][-1:]


def _early_exit(
    parts: Components, options: ReplyOptions, profile: Profile | None, kind: DrafterKind
) -> tuple[DrafterKind, str]:
    """Return `kind`, with an early exit if that is used, and why.

    Raises:
        InvalidOption: one is asked for, but impossible.
    """
    if options.early_exit == "off" or parts.draft is None:
        return (
            kind,
            "no early exit, as requested" if parts.draft is not None else "no early exit: there is no draft model",
        )
    layer, why = (
        profile.best_exit() if profile is not None else (None, "the pair has no profile that shows that it pays")
    )
    if options.early_exit == "on" and layer is None:
        try:
            layer, why = exit_layers(parts.draft.header)[0], "as requested"
        except (ModelUnsupported, ModelCorrupt) as error:
            raise InvalidOption(
                f"There is no early exit from {parts.draft.name}: {error.what}", "Leave out --early-exit on."
            ) from None
    if layer is None:
        return kind, f"no early exit: {why}"
    return DrafterKind(kind.layers, exit_layer=layer, threshold=options.exit_threshold), f"early exit: {why}"


def _branches(
    parts: Components, options: ReplyOptions, profile: Profile | None, kind: DrafterKind, choice: GateChoice
) -> tuple[int, str]:
    """Return the number of branches to draft while waiting for a verdict, and why."""
    if not options.parallel:
        return 0, "no parallel inference, as requested"
    if not parts.linked:
        return 0, "no parallel inference: the verifier computes on this device"
    if options.json_schema is not None:  # guesses may break it
        return 0, "no parallel inference: the reply follows a JSON schema"
    if kind.exit_layer is not None:
        return 0, "no parallel inference: a draft model with an early exit has no branches"
    if isinstance(choice.gate, NeverGate):
        return 0, "no parallel inference: no verdict is waited for"
    if profile is None or not profile.batch_seconds or parts.knowledge is None:
        return BRANCHES, f"parallel inference with {BRANCHES} guesses: their cost is not measured"
    wait = parts.knowledge.verdict_seconds or profile.verify_seconds
    return choose_branches(profile.batch_seconds, wait, max(choice.gamma, MAX_AHEAD))
