"""Generation of one reply: opens the drafter and verifier of its plan, and runs the decoding loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import TypeAlias

from edgellm.engine import ShouldStop
from edgellm.errors import InvalidOption
from edgellm.llm.ngram_runtime import NgramRuntime
from edgellm.llm.replies.plan import Components, ReplyPlan, WantedReply, plan_reply
from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.drafting.cost_curve import MAX_DRAFT
from edgellm.spec.gates.rules import AlwaysGate, NeverGate
from edgellm.spec.loop import Event, generate
from edgellm.spec.ngram.retriever import Retriever
from edgellm.spec.ngram.sources import ContextLookup
from edgellm.spec.params import ReplyOptions
from edgellm.spec.protocols import Drafter, Verifier
from edgellm.spec.state import NOT_FILLED, DraftRules, GenerationLimits, GenerationState
from edgellm.spec.stats import Stats
from edgellm.spec.stream import cut_at_stops
from edgellm.spec.types import Explanation, Ids, PromptProgress, Sampling

OnProgress: TypeAlias = Callable[[PromptProgress], None]
_log = logging.getLogger(__name__)


def write(
    parts: Components, request: WantedReply, stats: Stats, explain: bool, should_stop: ShouldStop,
    on_progress: OnProgress,
) -> Generator[Event, None, None]:  # fmt: skip
    """Write a reply while idle work is suspended. Raise ProfileUnusable."""
    options, prompt = request.options, request.prompt
    with parts.idle.suspended():
        plan = plan_reply(parts, request)
        copies = None
        if plan.sources is not None and parts.retrieval is not None:
            copies = parts.retrieval.begin(plan.sources)
            plan = plan if copies is not None else plan.without_retrieval("no retrieval: another reply is using it")
        writer = ReplyWriter(parts, request, plan, copies)
        reasons = (*plan.reasons, plan.retrieval)
        _log.debug("reply to a prompt of %d tokens: %s", len(prompt), "; ".join(reasons))
        try:
            yield from plan.notices
            if explain:
                told = (*reasons, request.channels.reason, *parts.placements)
                yield from (Explanation(None, reason) for reason in told if reason)
            events = writer.write(stats, explain, should_stop, on_progress)
            cuts = options.stop or request.heads
            yield from cut_at_stops(options.stop, events, stats, request.heads) if cuts else events
        finally:
            _log.info("reply of %d tokens to a prompt of %d: %s", stats.tokens, len(prompt), stats.finish_reason)
            if copies is not None and parts.retrieval is not None:
                parts.retrieval.end()
            if parts.knowledge is not None and stats.verdict_seconds is not None:
                parts.knowledge.observe_verdicts(stats.verdict_seconds, stats.verified_drafted)
        speculator = "" if parts.verifier is None else parts.verifier.capabilities.speculator
        if speculator and copies is not None and parts.draft is not None:
            parts.speculator_or_draft.record(plan.speculates, stats.tokens, stats.seconds)
        if parts.retrieval is not None and stats.finish_reason == "stop":
            parts.retrieval.add(prompt, stats.ids)


class ReplyWriter:
    """A writer of one reply by its plan; `copies` retrieve drafts, if the plan has sources."""

    def __init__(self, parts: Components, request: WantedReply, plan: ReplyPlan, copies: Retriever | None) -> None:
        self._parts, self._request, self._plan, self._copies = parts, request, plan, copies
        options, verifier, gate = request.options, parts.verifier, plan.choice.gate
        drafts = parts.draft is not None and options.drafter is None and (verifier is not None or copies is None)
        if parts.drafters is not None and parts.drafters.translation is not None and request.draft_prompt is None:
            drafts = False  # Without a prompt for the draft model the verifier writes alone.
        if options.logprobs is not None:
            drafts, verifier, gate = drafts and not parts.linked, reporting(parts, options), AlwaysGate()
        elif verifier is None and parts.retrieval is not None and (copies is not None or options.drafter is not None):
            verifier, gate = parts.retrieval.self_verifier(), AlwaysGate()
        self._drafts, self._verifier, self._gate = drafts, verifier, gate
        """True if the draft model drafts; the verifier; the gate of its drafts."""

    def write(
        self, stats: Stats, explain: bool, should_stop: ShouldStop, on_progress: OnProgress
    ) -> Generator[Event, None, None]:
        """Write the reply: a thought up to its limit, and the answer."""
        parts, plan, request = self._parts, self._plan, self._request
        state = self._state(explain, should_stop, on_progress)
        own = None
        if parts.drafters is not None and self._drafts and not plan.speculates:
            own = parts.drafters.take(plan.kind)
        drafter = self._drafter(own, stats)
        announces = parts.linked and own is not None and not isinstance(self._gate, NeverGate)
        try:
            for _ in range(2):
                if state.thought_is_full and not self._close_thought(state, stats):
                    stats.finish("length")
                    break
                yield from generate(
                    state, vocabulary=parts.text, drafter=drafter, gate=self._gate, verifier=self._verifier,
                    stats=stats, channels=request.channels, announce=announces,
                )  # fmt: skip
                if not state.thought_is_full:
                    break
            if plan.first is not None and parts.knowledge is not None:
                notice = parts.knowledge.end_first(plan.first, plan.choice.gamma, plan.kind.layers)
                yield from () if notice is None else (notice,)
        finally:
            if parts.drafters is not None and own is not None:
                parts.drafters.give(plan.kind, own)

    def _state(self, explain: bool, should_stop: ShouldStop, on_progress: OnProgress) -> GenerationState:
        """Return the reply's state, before its first token."""
        parts, plan, request, copies = self._parts, self._plan, self._request, self._copies
        options, choice, verifier = request.options, plan.choice, self._verifier
        policy = parts.retrieval.index.policy if copies is not None and parts.retrieval is not None else None
        asks_tail = parts.linked and plan.checked and verifier is not None and verifier.capabilities.drafts_extra
        asks_extra = copies is not None or (asks_tail if self._drafts else options.drafter is None)
        alike = verifier is None or verifier.capabilities.choice.draws_alike(request.sampling)
        limits = GenerationLimits(
            options.max_tokens, parts.context, choice.gamma if copies is None else MAX_DRAFT,
            extra=parts.extra if asks_extra else 0, max_thinking=options.max_thinking, max_total=options.max_total,
        )  # fmt: skip
        constraint = request.sampling.constraint
        rules = DraftRules(choice.stop_below, choice.lookup_below, greedy=not alike and plan.checked)
        if policy is not None and not parts.linked:
            rules = replace(rules, floors=policy.floors)
        return GenerationState(
            request.prompt, request.sampling, limits,
            rules=rules,
            should_stop=should_stop, logprobs=options.logprobs, explain=explain,
            context=ContextLookup(request.prompt) if choice.lookup_below else None,
            expect=None if copies is None else copies.expect,
            filling=NOT_FILLED if policy is None else policy.cost.given.behind(len(request.prompt)).filling(),
            channel=request.channels.channel, draft_prompt=request.draft_prompt, on_progress=on_progress,
            grammar=None if constraint is None else ReplyGrammar.of(constraint, parts.text.grammar),
            tail=parts.tail if self._drafts and asks_tail else None,
        )  # fmt: skip

    def _drafter(self, own: Drafter | None, stats: Stats) -> Drafter | None:
        """Return the drafter: a custom one, `own` (the draft model's, with branches if planned) or the speculator;
        beside copies, the draft policy decides."""
        parts, plan, copies, is_eog = self._parts, self._plan, self._copies, self._parts.text.is_eog
        drafter, guessed = self._request.options.drafter or own, None
        if plan.branches and isinstance(own, ModelDrafter):
            from edgellm.spec.drafters.parallel import ParallelDrafter

            drafter = ahead = ParallelDrafter(
                own, is_eog=is_eog, rejection=plan.rejection, branches=plan.branches, acceptance=plan.acceptance
            )
            guessed = ahead.guessed
        if copies is None or parts.retrieval is None or self._verifier is None:
            stats.count_with(plan.choice.controller, guessed)
            return drafter
        from edgellm.spec.drafters.hybrid import HybridDrafter

        if plan.speculates:
            from edgellm.spec.drafters.speculator import SpeculatorDrafter

            drafter = SpeculatorDrafter(self._verifier, is_eog)
        policy, name = parts.retrieval.index.policy, "speculator" if plan.speculates else "draft model"
        parts.retrieval.track(self._verifier)
        stats.count_with(plan.choice.controller, guessed, copies.copied, policy.account)
        return HybridDrafter(policy, copies, drafter, plan.gamma, name=name, linked=parts.linked)

    def _close_thought(self, state: GenerationState, stats: Stats) -> bool:
        """End the thought by the model's own markup, which belongs to no channel. Return False without room."""
        text = self._parts.text
        if text.thinking is None:
            return False
        ids: Ids = text.tokenize(text.thinking.closing, special=True)
        if closed := state.close_thought(ids):
            self._request.channels.close_thought()
            stats.insert(ids.tolist())
        return closed


def logprobs_unavailable(remote: bool, has_verifier: bool, options: ReplyOptions) -> str:
    """Return why log-probabilities are not available for a reply, else "". `remote`: the verifier is on another device
    and does not report them; `has_verifier`: there is a verifier beside the draft model."""
    if remote:
        return "the verifier is on another device and does not send them"
    if has_verifier and (options.budget not in (None, 1.0) or options.gate not in ("auto", "always")):
        return "not every token is verified"
    return ""


def reporting(parts: Components, options: ReplyOptions) -> Verifier:
    """Return a verifier that reports log-probabilities: the pair's own if possible, else the model itself.

    Raises:
        InvalidOption: log-probabilities are not available.
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
    """Raise InvalidOption where the pair's verifier cannot follow the penalties or constraint of `sampling`, or tells
    too few tokens to choose by it."""
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
