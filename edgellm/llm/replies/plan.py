"""The plan of a reply: gate, drafter, and number of guesses while waiting; pure data, with its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from edgellm.engine import Model
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported
from edgellm.llm.drafter_pool import DrafterKind, Drafters, exit_layers
from edgellm.llm.idle_work import IdleWork
from edgellm.llm.ngram_runtime import NgramRuntime
from edgellm.llm.pair_stats import PairStats
from edgellm.spec.channels import ChannelSplitter
from edgellm.spec.drafters.verdict_prediction import BRANCHES, MAX_AHEAD, MAX_BRANCHES, choose_branches, rejection
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance, Probabilities
from edgellm.spec.drafting.bandit import Bandit
from edgellm.spec.gates.factory import GateChoice, choose, needs_profile
from edgellm.spec.gates.rules import AlwaysGate, NeverGate
from edgellm.spec.params import BUDGET_CHUNK, CHUNK, ReplyOptions
from edgellm.spec.protocols import Verifier
from edgellm.spec.types import Ids, Notice, Sampling

if TYPE_CHECKING:
    from edgellm.spec.drafters.translation import TokenTranslation
    from edgellm.spec.gates.profile import Profile
    from edgellm.spec.gates.profiler import FirstReply

MAX_MODEL_DRAFT = 16
"""Maximum tokens of a draft model's chunk if each token is drafted only while it pays."""
_VERDICTS = 8  # verdicts with extra tokens, and without, before the faster arm is chosen
_REPLIES = 2  # replies with the draft model, and with the speculator, before the faster arm is chosen
_LOGPROBS = "log-probabilities are requested"


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
    placements: tuple[str, ...] = ()  # place of each model, and why
    speculator_or_draft: Bandit = field(default_factory=lambda: Bandit(_REPLIES))
    """The choice between draft model and verifier's speculator, from reply to reply."""
    tail: Bandit = field(default_factory=lambda: Bandit(_VERDICTS))
    """The choice between chunks of the draft model alone, and with extra tokens of a linked verifier."""


@dataclass(frozen=True, slots=True)
class WantedReply:
    """A requested reply to `prompt` (n,) with `options`, by the rule `sampling`, separated by `channels`.
    `draft_prompt` as for `GenerationState`, `heads` as for `cut_at_stops`."""

    prompt: Ids
    options: ReplyOptions
    sampling: Sampling
    channels: ChannelSplitter
    draft_prompt: Ids | None = None
    heads: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReplyPlan:
    """The settings of one reply, and the reasons for them.

    `rejection` as in `ParallelDrafter`, which drafts `branches` at once; `acceptance` learns from verdicts. `first`:
    the gate of one of the replies that make the pair's profile. `gamma`: maximum tokens of the draft model's chunk
    beside retrieval. `checked`: every draft is verified. `speculates`: the verifier's speculator drafts. `sources` are
    copied from; None: the draft policy is not asked at all.
    """

    choice: GateChoice
    kind: DrafterKind
    branches: int = 0
    acceptance: ConfidenceAcceptance = field(default_factory=ConfidenceAcceptance)
    alpha: float | None = None  # acceptance rate for the paper's rule
    first: FirstReply | None = None
    gamma: int = MAX_MODEL_DRAFT
    notices: tuple[Notice, ...] = ()
    reasons: tuple[str, ...] = ()
    checked: bool = True
    speculates: bool = False
    sources: tuple[str, ...] | None = None
    retrieval: str = ""  # sources of copies, or why there are none

    def without_retrieval(self, why: str) -> ReplyPlan:
        """Return the plan without the draft policy, for the reason `why`."""
        return replace(self, sources=None, speculates=False, retrieval=why)

    def rejection(self, confidence: Sequence[float]) -> Probabilities:
        """Return the chances of a rejection at each place: with the paper's gate its estimate, else by the verdicts."""
        return self.acceptance.rejection(confidence) if self.alpha is None else rejection(confidence, self.alpha)


def plan_reply(parts: Components, request: WantedReply) -> ReplyPlan:
    """Return the plan of a reply by this pair, with reasons."""
    plan, options = _plan_drafts(parts, request.options, request.sampling), request.options
    lossless = plan.choice.controller is None or options.budget in (None, 1.0)
    checked = parts.verifier is None or (lossless and options.gate in ("auto", "always"))
    plan = replace(plan, checked=checked and plan.first is None and options.budget != 0.0)
    speculates, speculator = _choose_speculator(parts, options, plan)
    sources, retrieval = _choose_sources(parts, options, plan, speculates)
    return replace(
        plan, speculates=speculates and sources is not None, sources=sources,
        retrieval=retrieval,
        reasons=tuple(filter(None, (*plan.reasons, speculator))),
    )  # fmt: skip


def _plan_drafts(parts: Components, options: ReplyOptions, sampling: Sampling) -> ReplyPlan:
    """Return the plan of gate and draft model."""
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
        return ReplyPlan(choice, kind, gamma=gamma, notices=notice, reasons=(f"{writer} writes alone", reason))
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
    if first is not None:  # Importance is not measured for tokens drafted ahead.
        n_branches, parallel = 0, "no parallel inference: the pair is being profiled"
    if n_branches:
        kind = DrafterKind(kind.layers, MAX_BRANCHES, max(choice.gamma, MAX_AHEAD))
    alpha = profile.alpha if profile is not None and options.gate == "synera" else None
    return ReplyPlan(
        choice, kind, n_branches, knowledge.acceptance(options), alpha, first, _draft_limit(parts, options, choice),
        tuple(notices), (choice.reason, early, parallel),
    )  # fmt: skip


def _translated(
    parts: Components, options: ReplyOptions, knowledge: PairStats, translation: TokenTranslation
) -> ReplyPlan:
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
    return ReplyPlan(
        choice, DrafterKind(), acceptance=knowledge.acceptance(options), gamma=_draft_limit(parts, options, choice),
        notices=(notice,) if unused else (),
        reasons=(translation.reason, "no gate, early exit or parallel inference: the models have different tokenizers"),
    )  # fmt: skip


def _verifies_all(options: ReplyOptions) -> bool:
    """Return whether every chunk is verified, and drafted by the draft model."""
    checked = options.budget in (None, 1.0) and options.gate in ("auto", "always")
    return checked and options.drafter is None and options.logprobs is None


def _draft_limit(parts: Components, options: ReplyOptions, choice: GateChoice) -> int:
    """Return the maximum tokens of a draft model's chunk beside retrieval."""
    return MAX_MODEL_DRAFT if options.gamma is None and not parts.linked else choice.gamma


def default_layers(model: Model) -> tuple[int, ...]:
    """Return the default layer for importance: the second with attention."""
    return model.attention_layers[:2][-1:]


def _early_exit(
    parts: Components, options: ReplyOptions, profile: Profile | None, kind: DrafterKind
) -> tuple[DrafterKind, str]:
    """Return `kind`, with an early exit if used, and why.

    Raises:
        InvalidOption: an early exit is requested, but impossible.
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
    if options.json_schema is not None:  # Guesses may break the schema.
        return 0, "no parallel inference: the reply follows a JSON schema"
    if kind.exit_layer is not None:
        return 0, "no parallel inference: a draft model with an early exit has no branches"
    if isinstance(choice.gate, NeverGate):
        return 0, "no parallel inference: no verdict is waited for"
    if profile is None or not profile.batch_seconds or parts.knowledge is None:
        return BRANCHES, f"parallel inference with {BRANCHES} guesses: their cost is not measured"
    wait = parts.knowledge.verdict_seconds or profile.verify_seconds
    return choose_branches(profile.batch_seconds, wait, max(choice.gamma, MAX_AHEAD))


def _choose_speculator(parts: Components, options: ReplyOptions, plan: ReplyPlan) -> tuple[bool, str]:
    """Return whether the speculator of the model that decides the text drafts, and why; "" without a speculator."""
    verifier, own = parts.verifier, parts.text.speculator
    name = verifier.capabilities.speculator if verifier is not None else own.name if own is not None else ""
    if not name or parts.linked:
        return False, ""
    nothing = f"{name} drafts nothing"
    if options.drafter is not None or options.logprobs is not None:
        return False, f"{nothing}: {'a custom drafter is used' if options.drafter else _LOGPROBS}"
    if not plan.checked:
        return False, f"{nothing}: not everything is verified"
    if verifier is not None and parts.draft is not None:
        if plan.kind.layers or options.early_exit == "on" or not parts.speculator_or_draft.second():
            return False, f"{nothing}: the draft model drafts in this reply"
        return True, f"{name} drafts in this reply, in place of the draft model"
    return True, f"{name} drafts where that is faster"


def _choose_sources(
    parts: Components, options: ReplyOptions, plan: ReplyPlan, speculates: bool
) -> tuple[tuple[str, ...] | None, str]:
    """Return the sources of copies, and why. The draft policy also decides on drafts of the draft model or, with
    `speculates`, the speculator, if need be without sources; None: the policy is not asked."""
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
    if not plan.checked:
        return None, "no retrieval: not everything is verified"
    if not sources:
        return (), "no retrieval, as requested"
    return sources, f"drafts are retrieved from: {', '.join(sources)}{parts.retrieval.head_note}"
