"""Generation of one reply: opens the drafter and verifier of its plan, and runs the decoding loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TypeAlias

from edgellm.engine import ShouldStop
from edgellm.errors import InvalidOption
from edgellm.llm.opening.engine import PairEngine
from edgellm.llm.replies.plan import ReplyPlan, WantedReply, plan_reply
from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.drafting.cost_curve import MAX_DRAFT
from edgellm.spec.gates.rules import AlwaysGate, NeverGate
from edgellm.spec.loop import Event, generate
from edgellm.spec.mechanisms import mechanism
from edgellm.spec.ngram.retriever import Retriever
from edgellm.spec.ngram.sources import ContextLookup
from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import Drafter, Verifier
from edgellm.spec.state import NOT_FILLED, DraftRules, GenerationLimits, GenerationState, VerdictTerms
from edgellm.spec.stats import Summary
from edgellm.spec.stream import cut_at_stops
from edgellm.spec.types import Explanation, Ids, PromptProgress, Sampling

OnProgress: TypeAlias = Callable[[PromptProgress], None]
_log = logging.getLogger(__name__)


def write(
    engine: PairEngine, request: WantedReply, stats: Summary, explain: bool, should_stop: ShouldStop,
    on_progress: OnProgress,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write a reply while idle work is suspended. Raise ProfileUnusable."""
    options, prompt, retrieval = request.options, request.prompt, engine.retrieval
    with engine.idle.suspended():
        plan = plan_reply(engine, request)
        copies = None if plan.sources is None else retrieval.begin(plan.sources)
        if plan.sources is not None and copies is None:
            plan = plan.without_retrieval("no retrieval: another reply is using it")
        writer = ReplyWriter(engine, request, plan, copies)
        reasons = (*plan.reasons, plan.retrieval)
        _log.debug("reply to a prompt of %d tokens: %s", len(prompt), "; ".join(reasons))
        try:
            yield from plan.notices
            if explain:
                told = (*reasons, request.channels.reason, *engine.reasons)
                yield from (Explanation(None, reason) for reason in told if reason)
            events = writer.write(stats, explain, should_stop, on_progress)
            cuts = options.stop or request.heads
            yield from cut_at_stops(options.stop, events, stats, request.heads) if cuts else events
        finally:
            _log.info("reply of %d tokens to a prompt of %d: %s", stats.tokens, len(prompt), stats.finish_reason)
            if copies is not None:
                retrieval.end()
            if engine.knowledge is not None and stats.verdict_seconds is not None:
                engine.knowledge.observe_verdicts(stats.verdict_seconds, stats.verdicts_on_drafts)
        if stats.finish_reason == "stop":
            retrieval.add(prompt, stats.ids)


class ReplyWriter:
    """A writer of one reply by its plan; `copies` retrieve drafts, if the plan has sources."""

    def __init__(self, engine: PairEngine, request: WantedReply, plan: ReplyPlan, copies: Retriever | None) -> None:
        self._engine, self._request, self._plan, self._copies = engine, request, plan, copies
        options, verifier, gate = request.options, engine.verifier, plan.choice.gate
        drafts = engine.draft is not None and options.drafter is None and (verifier is not None or copies is None)
        if engine.fit.translation is not None and request.draft_prompt is None:
            drafts = False  # Without a prompt for the draft model the verifier writes alone.
        if options.logprobs is not None:
            drafts, verifier, gate = drafts and not engine.linked, reporting(engine, options), AlwaysGate()
        elif verifier is None and (copies is not None or options.drafter is not None):
            verifier, gate = engine.retrieval.self_verifier(), AlwaysGate()
        self._drafts, self._verifier, self._gate = drafts, verifier, gate
        """True if the draft model drafts; the verifier; the gate of its drafts."""

    def write(
        self, stats: Summary, explain: bool, should_stop: ShouldStop, on_progress: OnProgress
    ) -> Generator[Event, None, None]:
        """Write the reply: a thought up to its limit, and the answer."""
        engine, plan, request = self._engine, self._plan, self._request
        state = self._state(explain, should_stop, on_progress)
        own = None
        if engine.drafters is not None and self._drafts and not plan.speculates:
            own = engine.drafters.take(plan.kind)
        drafter = self._drafter(own, stats)
        announces = engine.linked and own is not None and not isinstance(self._gate, NeverGate)
        try:
            for _ in range(2):
                if state.thought_is_full and not self._close_thought(state, stats):
                    stats.finish("length")
                    break
                yield from generate(
                    state, vocabulary=engine.text, drafter=drafter, gate=self._gate, verifier=self._verifier,
                    stats=stats, channels=request.channels, announce=announces,
                )  # fmt: skip
                if not state.thought_is_full:
                    break
            if plan.first is not None and engine.knowledge is not None:
                notice = engine.knowledge.first.end(plan.first, plan.choice.gamma, plan.kind.layers)
                yield from () if notice is None else (notice,)
        finally:
            if engine.drafters is not None and own is not None:
                engine.drafters.give(plan.kind, own)

    def _state(self, explain: bool, should_stop: ShouldStop, on_progress: OnProgress) -> GenerationState:
        """Return the reply's state, before its first token."""
        engine, plan, request, copies = self._engine, self._plan, self._request, self._copies
        options, choice, verifier = request.options, plan.choice, self._verifier
        policy = None if copies is None else engine.retrieval.index.policy
        asks_extra = copies is not None or not (self._drafts or options.drafter is not None)
        alike = verifier is None or verifier.capabilities.choice.draws_alike(request.sampling)
        limits = GenerationLimits(
            options.max_tokens, engine.context, choice.gamma if copies is None else MAX_DRAFT,
            extra=engine.elsewhere.extra if asks_extra and engine.elsewhere is not None else 0,
            max_thinking=options.max_thinking, max_total=options.max_total,
        )  # fmt: skip
        rules = DraftRules(
            choice.stop_below, choice.lookup_below, greedy=not alike and plan.checked,
            context=ContextLookup(request.prompt) if choice.lookup_below else None, prompt=request.draft_prompt,
            grammar=ReplyGrammar.of(request.sampling.constraint, engine.text.grammar),
        )  # fmt: skip
        if policy is not None and not engine.linked:
            rules = replace(rules, floors=policy.floors)
        terms = VerdictTerms(
            options.logprobs, expect=None if copies is None else copies.expect,
            filling=NOT_FILLED if policy is None else policy.cost.given.behind(len(request.prompt)).filling(),
        )  # fmt: skip
        return GenerationState(
            request.prompt, request.sampling, limits, rules=rules, terms=terms, should_stop=should_stop,
            explain=explain, channel=request.channels.channel, on_progress=on_progress,
        )  # fmt: skip

    def _drafter(self, own: Drafter | None, stats: Summary) -> Drafter | None:
        """Return the drafter: a custom one, `own` (the draft model's, with branches if planned) or the speculator;
        beside copies, the draft policy decides."""
        engine, plan, copies, is_eog = self._engine, self._plan, self._copies, self._engine.text.is_eog
        drafter, guessed = self._request.options.drafter or own, None
        if plan.branches and own is not None:
            drafter = ahead = mechanism("parallel drafting").ParallelDrafter(
                own, is_eog=is_eog, rejection=plan.rejection, branches=plan.branches, acceptance=plan.acceptance
            )
            guessed = ahead.guessed
        if copies is None or self._verifier is None:
            stats.count_with(plan.choice.controller, guessed)
            return drafter
        from edgellm.spec.drafters.hybrid import HybridDrafter

        if plan.speculates:
            drafter = mechanism("speculators").SpeculatorDrafter(self._verifier, is_eog)
        policy, name = engine.retrieval.index.policy, "speculator" if plan.speculates else "draft model"
        engine.retrieval.track(self._verifier)
        stats.count_with(plan.choice.controller, guessed, copies.copied, policy.account)
        return HybridDrafter(policy, copies, drafter, plan.gamma, name=name, linked=engine.linked)

    def _close_thought(self, state: GenerationState, stats: Summary) -> bool:
        """End the thought by the model's own markup, which belongs to no channel. Return False without room."""
        text = self._engine.text
        if text.thinking is None:
            return False
        ids: Ids = text.tokenize(text.thinking.closing, special=True)
        if closed := state.close_thought(ids):
            self._request.channels.close_thought()
            stats.insert(ids.tolist())
        return closed


def reporting(engine: PairEngine, options: ReplyOptions) -> Verifier:
    """Return a verifier that reports log-probabilities: the pair's own if possible, else the model itself.

    Raises:
        InvalidOption: log-probabilities are not available.
    """
    verifier, why = engine.verifier, ""
    reports = verifier is not None and verifier.capabilities.logprobs
    if engine.linked and not reports:
        why = "the verifier is on another device and does not send them"
    elif verifier is not None and (options.budget not in (None, 1.0) or options.gate not in ("auto", "always")):
        why = "not every token is verified"
    if why:
        raise InvalidOption(
            f"logprobs are not available: {why}.", "Leave logprobs out, or verify every token on this device."
        )
    return verifier if verifier is not None and reports else engine.retrieval.self_verifier()


def check_sampling(verifier: Verifier | None, sampling: Sampling) -> None:
    """Raise InvalidOption where a verifier cannot follow the penalties or constraint of `sampling`, or tells too few
    tokens to choose by it."""
    if verifier is None:
        return
    can = verifier.capabilities
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
