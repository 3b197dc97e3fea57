"""One reply: its plan (gate, drafter, verifier, sources of copies), with reasons, and the decoding loop run by it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from edgellm.engine import Model, ShouldStop
from edgellm.errors import InvalidOption
from edgellm.llm.engine import DrafterKind, PairEngine
from edgellm.llm.pair_stats import PairStats
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance
from edgellm.spec.drafting.cost_curve import MAX_DRAFT
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.gates.rules import AlwaysGate, GateChoice, NeverGate, choose
from edgellm.spec.loop import generate
from edgellm.spec.ngram.retriever import Retriever
from edgellm.spec.ngram.sources import ContextLookup
from edgellm.spec.params import BUDGET_CHUNK, CHUNK, GATES, ReplyOptions, has, mechanism
from edgellm.spec.protocols import Drafter, DraftRules, GenerationLimits, GenerationState, VerdictTerms, Verifier
from edgellm.spec.sampling import ReplyGrammar
from edgellm.spec.stats import Summary
from edgellm.spec.stream import ChannelSplitter, cut_at_stops
from edgellm.spec.types import Event, Explanation, Ids, Notice, PromptProgress, Sampling

if TYPE_CHECKING:
    from edgellm.llm.profiling import ObservedReply

MAX_MODEL_DRAFT = 16
"""Maximum tokens of a draft model's chunk if each token is drafted only while it pays."""
DRAFT_MODEL = "draft model"
"""The draft model's name for the draft policy."""
OnProgress: TypeAlias = Callable[[PromptProgress], None]
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WantedReply:
    """A requested reply to `prompt` (n,) with `options`, by the rule `sampling`, separated by `channels`.
    `draft_prompt` as for `DraftRules.prompt`, `turn_openings` as for `cut_at_stops`."""

    prompt: Ids
    options: ReplyOptions
    sampling: Sampling
    channels: ChannelSplitter
    draft_prompt: Ids | None = None
    turn_openings: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """The settings of one reply, and the reasons for them.

    `drafts`: the draft model drafts, as a drafter of this `kind`, at most `gamma` tokens beside copies. `acceptance`
    foretells verdicts, and learns from them. `observer`: the gate of one of the replies that make the pair's profile.
    `checked`: every draft is verified. `speculates`: the verifier's speculator drafts. The `retriever` copies; None:
    the draft policy is not asked at all.
    """

    choice: GateChoice
    reasons: tuple[str, ...]
    kind: DrafterKind = DrafterKind()
    acceptance: ConfidenceAcceptance | None = None
    observer: ObservedReply | None = None
    notices: tuple[Notice, ...] = ()
    gamma: int = MAX_MODEL_DRAFT
    checked: bool = True
    drafts: bool = False
    speculates: bool = False
    verifier: Verifier | None = None
    retriever: Retriever | None = None


def plan_reply(engine: PairEngine, wanted: WantedReply, grammar: ReplyGrammar | None) -> ReplyPlan:
    """Return the plan of a reply by this pair. Its `retriever` is the reply's until `Drafting.end`."""
    options, knowledge, draft, verifier = wanted.options, engine.knowledge, engine.draft, engine.verifier
    translation, why = engine.fit.translation, unable(engine, wanted.sampling)
    if knowledge is None or draft is None:
        plan = _plan_alone(draft, options)
    elif why:
        plan, verifier = _plan_alone(draft, options, why), None
    elif translation is not None:
        plan = _plan_translated(translation.reason, options)
    else:
        plan = _plan_pair(engine, knowledge, draft, wanted)
    choice, all_pass = plan.choice, options.gate in ("auto", "always") or options.budget == 1.0
    lossless = verifier is None or (all_pass and (choice.controller is None or options.budget in (None, 1.0)))
    checked = lossless and plan.observer is None and options.budget != 0.0 and not why
    barred = _bars_others(options, checked)
    speculates, speculator = _choose_speculator(engine, barred)
    sources, retrieval = _choose_sources(engine, options, barred, speculates)
    retriever = None if sources is None else engine.drafting.begin(sources, grammar)
    drafts = draft is not None and options.drafter is None and (verifier is not None or retriever is None)
    if sources is not None and retriever is None:
        retrieval = "no retrieval: another reply is using it"
        drafts = drafts and not (engine.batches or engine.drafting.policy.slow_model(DRAFT_MODEL))
    if translation is not None and wanted.draft_prompt is None:
        drafts = False  # Without a prompt for the draft model the verifier writes alone.
    batches = engine.batches and plan.kind.exits is None
    if options.logprobs is not None:
        drafts, verifier = drafts and not engine.linked, reporting(engine, options)
        choice = replace(choice, gate=AlwaysGate())
    elif verifier is None and (retriever is not None or options.drafter is not None or batches):
        verifier, choice = engine.drafting.self_verifier(), replace(choice, gate=AlwaysGate())
        drafts = False
    if (temperature := wanted.sampling.temperature) > 2.0:
        hot = f"A temperature of {temperature:g} makes unlikely words nearly as likely as others; 0 to 1 is usual."
        plan = replace(plan, notices=(*plan.notices, Notice(hot)))
    return replace(
        plan, choice=choice, reasons=(*plan.reasons, speculator, retrieval), checked=checked, drafts=drafts,
        gamma=plan.gamma if options.gamma is None and not engine.linked else choice.gamma,
        speculates=speculates and retriever is not None, verifier=verifier, retriever=retriever,
    )  # fmt: skip


def _plan_alone(draft: Model | None, options: ReplyOptions, why: str = "") -> ReplyPlan:
    """Return the plan of a reply by one model: the `draft` model, else the verifier. `why`: the reason why the
    verifier cannot follow the reply's schema, so that the draft model writes; else ""."""
    writer, whole = ("the verifier", 1.0) if draft is None else ("the draft model", 0.0)
    kind, reason = _early_exit(draft, options, DrafterKind())
    alone = f"The verifier cannot follow the JSON schema: {why}. The draft model writes alone, unverified."
    notices = [Notice(alone)] if why else []
    if options.budget not in (None, whole):
        notices.append(Notice(f"The budget of {options.budget} has no effect: {writer} writes alone."))
    if options.early_exit and draft is None:
        notices.append(Notice("The early exit has no effect: there is no draft model to leave early."))
    choice = GateChoice(AlwaysGate() if draft is None else NeverGate(), "", options.gamma or CHUNK)
    return ReplyPlan(choice, (f"{writer} writes alone", reason), kind, notices=tuple(notices))


def _plan_translated(reason: str, options: ReplyOptions) -> ReplyPlan:
    """Return the plan of a reply whose drafts are translated: all of them are verified."""
    asked = {
        f"the budget of {options.budget}": options.budget not in (None, 1.0),
        f"the gate {options.gate}": options.gate not in ("auto", "always"),
        "the early exit": options.early_exit,
    }
    unused = ", ".join(f"{name} has no effect" for name, given in asked.items() if given)
    notice = Notice(f"The models have different tokenizers, so every draft is verified: {unused}.")
    reasons = (reason, "no gate, early exit or parallel inference: the models have different tokenizers")
    choice = GateChoice(AlwaysGate(), reason, options.gamma or CHUNK)
    return ReplyPlan(choice, reasons, notices=(notice,) if unused else ())


def _plan_pair(engine: PairEngine, knowledge: PairStats, draft: Model, wanted: WantedReply) -> ReplyPlan:
    """Return the plan of a reply by both models."""
    options, sampling = wanted.options, wanted.sampling
    if isinstance(options.gate, str) and GATES[options.gate].importance and not draft.header.attention_layers:
        raise InvalidOption(
            f"The gate {options.gate} needs attention, and {draft.name} has none.", "Use --gate auto or confidence."
        )
    wants_profile, (controller, acceptance) = options.needs_profile, knowledge.learned(options)
    profile = knowledge.profile(wants_profile)
    observer: ObservedReply | None = None
    notices: list[Notice] = []
    if wants_profile and profile is None:
        layers = draft.header.attention_layers[:2][-1:]  # By default the second layer with attention shows importance.
        observer, notices = knowledge.first.begin(layers)
        choice = GateChoice(observer, "the pair has no profile yet", options.gamma or BUDGET_CHUNK)
    else:
        choice = choose(options, sampling.seed, profile=profile, controller=controller, linked=engine.linked)
    kind, early = _early_exit(draft, options, DrafterKind(choice.gate.layers))
    hindrance = _hinders_parallel(engine, options, kind, choice, observer)
    if not hindrance:
        parallel = mechanism("parallel drafting")
        kind = replace(kind, branches=parallel.BRANCHES, gamma=max(choice.gamma, parallel.MAX_AHEAD))
    reasons = choice.reason, early, f"no parallel inference{hindrance}" if hindrance else "parallel inference"
    return ReplyPlan(choice, reasons, kind, acceptance, observer, tuple(notices))


def _early_exit(draft: Model | None, options: ReplyOptions, kind: DrafterKind) -> tuple[DrafterKind, str]:
    """Return `kind`, with an early exit if asked for, and why. Raise InvalidOption if it is impossible."""
    if draft is None or not options.early_exit:
        return kind, ""
    mechanism("early exit").first_exit(draft)
    return replace(kind, exits=options.exit_threshold), "early exit: as requested"


def _hinders_parallel(
    engine: PairEngine, options: ReplyOptions, kind: DrafterKind, choice: GateChoice, observer: ObservedReply | None
) -> str:
    """Return why nothing is drafted while waiting for a verdict, as the end of a sentence; "" if it is."""
    hindrances = {
        ": the pair is being profiled": observer is not None,  # Importance is not measured for tokens drafted ahead.
        ", as requested": not options.parallel,
        ": it is left out": not has("parallel drafting"),
        ": the verifier computes on this device": not engine.linked,
        ": the reply follows a JSON schema": options.json_schema is not None,  # Guesses may break the schema.
        ": a draft model with an early exit has no branches": kind.exits is not None,
        ": no verdict is waited for": isinstance(choice.gate, NeverGate),
    }
    return next((why for why, hinders in hindrances.items() if hinders), "")


def _bars_others(options: ReplyOptions, checked: bool) -> str:
    """Return why nothing drafts beside the draft model, as a clause; "" if something may."""
    hindrances = {
        "a custom drafter is used": options.drafter is not None,
        "log-probabilities are requested": options.logprobs is not None,
        "not everything is verified": not checked,
    }
    return next((why for why, hinders in hindrances.items() if hinders), "")


def _choose_speculator(engine: PairEngine, barred: str) -> tuple[bool, str]:
    """Return whether the speculator of the model that decides the text drafts, and why; "" without a speculator."""
    verifier, own = engine.verifier, engine.text_model.speculator
    name = verifier.capabilities.speculator if verifier is not None else own.name if own is not None else ""
    if not name or engine.linked:
        return False, ""
    if why := barred or ("the draft model drafts" if None not in (verifier, engine.draft) else ""):
        return False, f"{name} drafts nothing: {why}"
    return True, f"{name} drafts where that is faster"


def _choose_sources(
    engine: PairEngine, options: ReplyOptions, barred: str, speculates: bool
) -> tuple[tuple[str, ...] | None, str]:
    """Return the sources of copies, and why. The draft policy also decides on drafts of the draft model or, with
    `speculates`, the speculator, if need be without sources; None: the policy is not asked."""
    if barred:
        return None, f"no retrieval: {barred}"
    if sources := options.sources():
        return sources, f"drafts are retrieved from: {', '.join(sources)}"
    forced = options.gate == "always" and options.gamma is not None
    compares = None not in (engine.draft, engine.verifier) and not forced
    return () if compares or speculates else None, "no retrieval, as requested"


def write(
    engine: PairEngine, wanted: WantedReply, stats: Summary, explain: bool, should_stop: ShouldStop,
    on_progress: OnProgress,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write a reply while idle work is suspended. Raise ProfileUnusable."""
    prompt, drafting = wanted.prompt, engine.drafting
    with engine.idle.suspended():
        grammar = ReplyGrammar.of(wanted.sampling.constraint, engine.text_model.grammar)
        plan = plan_reply(engine, wanted, grammar)
        try:
            _log.debug("reply to a prompt of %d tokens: %s", len(prompt), "; ".join(filter(None, plan.reasons)))
            yield from plan.notices
            if explain:
                told = (*plan.reasons, wanted.channels.reason, *engine.reasons)
                yield from (Explanation(None, reason) for reason in told if reason)
            rules, terms = _rules(engine, wanted, plan, grammar)
            state = GenerationState(
                prompt, wanted.sampling, _limits(engine, wanted.options, plan), rules=rules, terms=terms,
                should_stop=should_stop, explain=explain, channel=wanted.channels.channel, on_progress=on_progress,
            )  # fmt: skip
            events, stops = _written(engine, wanted, plan, state, stats), wanted.options.stop
            openings = wanted.turn_openings
            yield from cut_at_stops(stops, events, stats, openings) if stops or openings else events
        finally:
            _log.info("reply of %d tokens to a prompt of %d: %s", stats.tokens, len(prompt), stats.finish_reason)
            if plan.retriever is not None:
                drafting.end()
        if stats.finish_reason == "stop":
            drafting.add(prompt, stats.ids)
        if plan.retriever is not None and (slow := drafting.slow_once(DRAFT_MODEL)):
            yield Notice(slow)


def _limits(engine: PairEngine, options: ReplyOptions, plan: ReplyPlan) -> GenerationLimits:
    asks_extra = plan.retriever is not None or not (plan.drafts or options.drafter is not None)
    extra = 0 if plan.verifier is None else plan.verifier.extra
    return GenerationLimits(
        options.max_tokens, engine.context, plan.choice.gamma if plan.retriever is None else MAX_DRAFT,
        extra=extra if asks_extra else 0,
        max_thinking=options.max_thinking, max_total=options.max_total,
    )  # fmt: skip


def _rules(
    engine: PairEngine, wanted: WantedReply, plan: ReplyPlan, grammar: ReplyGrammar | None
) -> tuple[DraftRules, VerdictTerms]:
    """Return the rules of drafts, and the terms of verdicts."""
    choice, verifier = plan.choice, plan.verifier
    alike = verifier is None or verifier.capabilities.choice.draws_alike(wanted.sampling)
    rules = DraftRules(
        choice.stop_below, choice.lookup_below, greedy=not alike and plan.checked,
        context=ContextLookup(wanted.prompt) if choice.lookup_below else None, prompt=wanted.draft_prompt,
        grammar=grammar,
    )  # fmt: skip
    if plan.retriever is None:
        return rules, VerdictTerms(wanted.options.logprobs)
    policy = engine.drafting.policy
    terms = VerdictTerms(wanted.options.logprobs, plan.retriever.expect, policy.cost.given.widths())
    return rules if engine.linked else replace(rules, floors=policy.floors), terms


def _written(
    engine: PairEngine, wanted: WantedReply, plan: ReplyPlan, state: GenerationState, stats: Summary
) -> Generator[Event, None, None]:
    """Write the reply: a thought up to its limit, and the answer."""
    drafters = engine.drafters if plan.drafts else None
    with nullcontext() if drafters is None else drafters.taken(plan.kind) as model_drafter:
        drafter = _drafter(engine, wanted, plan, model_drafter, stats)
        reads_ahead = engine.linked and model_drafter is not None and not isinstance(plan.choice.gate, NeverGate)
        for _ in range(2):  # at most a thought, then an answer
            if state.thought_is_full and not _close_thought(engine.text_model, wanted.channels, state, stats):
                stats.finish("length")
                break
            yield from generate(
                state, vocabulary=engine.text_model, drafter=drafter, gate=plan.choice.gate, verifier=plan.verifier,
                stats=stats, channels=wanted.channels, reads_ahead=reads_ahead,
            )  # fmt: skip
            if not state.thought_is_full:
                break
        if plan.observer is not None and engine.knowledge is not None:
            notice = engine.knowledge.first.end(plan.observer, plan.choice.gamma, plan.kind.layers)
            yield from () if notice is None else (notice,)


def _drafter(
    engine: PairEngine, wanted: WantedReply, plan: ReplyPlan, model_drafter: Drafter | None, stats: Summary
) -> Drafter | None:
    """Return the drafter: a custom one, `model_drafter` (with branches if planned) or the speculator; beside copies,
    the draft policy decides."""
    is_eog, drafting, verifier = engine.text_model.is_eog, engine.drafting, plan.verifier
    drafter = wanted.options.drafter or model_drafter
    if plan.kind.branches and model_drafter is not None:
        drafter = mechanism("parallel drafting").ParallelDrafter(model_drafter, plan.acceptance, stats, is_eog=is_eog)
    if plan.retriever is None or verifier is None:  # Copies are planned only with a verifier.
        stats.count_with(plan.choice.controller)
        return drafter
    from edgellm.spec.drafters.model import HybridDrafter

    if plan.speculates:
        drafter = mechanism("speculators").SpeculatorDrafter(is_eog)
    policy, name = drafting.policy, "speculator" if plan.speculates else DRAFT_MODEL
    if model_drafter is not None and engine.draft is not None and not engine.linked:
        _introduce(engine, engine.draft, policy)
    drafting.track(verifier)
    stats.count_with(plan.choice.controller, plan.retriever.copied, lambda: policy.reason)
    return HybridDrafter(
        policy, plan.retriever, drafter, plan.gamma, name=name, linked=engine.linked, crowded=lambda: verifier.crowded
    )


def _introduce(engine: PairEngine, draft: Model, policy: DraftPolicy) -> None:
    """Tell the policy what is known of the draft model: it reads its weights for a token as fast as the verifier, where
    both are on the same hardware; and the acceptance of the pair's profile."""
    same = draft.placement == engine.text_model.placement
    profile = None if engine.knowledge is None else engine.knowledge.profile(False)
    acceptance = () if profile is None else profile.acceptance
    share = draft.header.file_size / engine.text_model.header.file_size
    policy.meet(DRAFT_MODEL, policy.cost.single * share if same else 0.0, acceptance)


def _close_thought(text_model: Model, channels: ChannelSplitter, state: GenerationState, stats: Summary) -> bool:
    """End the thought by the model's own markup, which belongs to no channel. Return False without room."""
    if text_model.thinking is None:
        return False
    ids: Ids = text_model.tokenize(text_model.thinking.closing, special=True)
    if closed := state.close_thought(ids):
        channels.close_thought()
        stats.insert(ids.tolist())
    return closed


def reporting(engine: PairEngine, options: ReplyOptions) -> Verifier:
    """Return a verifier that reports log-probabilities: the pair's own if possible, else the model itself. Raise
    InvalidOption where these are not available."""
    verifier, why = engine.verifier, ""
    reports = verifier is not None and verifier.capabilities.logprobs
    if engine.linked and not reports:
        why = "the verifier computes in another process or on another device, and does not send them"
    elif verifier is not None and not (options.budget in (None, 1.0) and options.gate in ("auto", "always")):
        why = "not every token is verified"
    if why:
        raise InvalidOption(
            f"logprobs are not available: {why}.", "Leave logprobs out, or verify every token on this device."
        )
    return verifier if verifier is not None and reports else engine.drafting.self_verifier()


def unable(engine: PairEngine, sampling: Sampling) -> str:
    """Return why the verifier cannot choose tokens by `sampling`, as a clause; "" if it can."""
    return "" if engine.verifier is None else engine.verifier.capabilities.refusal(sampling)


def check_reply(engine: PairEngine, options: ReplyOptions, sampling: Sampling) -> None:
    """Raise InvalidOption where the verifier reports no log-probabilities, or cannot choose tokens by `sampling` and no
    draft model follows the schema in its place. An error now is better than during the reply."""
    if options.logprobs is not None:
        reporting(engine, options)
    drafts = engine.draft is not None and engine.fit.translation is None and options.logprobs is None
    if (why := unable(engine, sampling)) and not (drafts and sampling.constraint is not None):
        raise InvalidOption(
            f"The verifier cannot write by penalties, logit_bias or a JSON schema: {why}.",
            "Leave them out, or use a verifier of edgellm.",
        )
