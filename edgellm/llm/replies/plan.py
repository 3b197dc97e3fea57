"""The plan of a reply: gate, drafter, and number of guesses while waiting; pure data, with its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from edgellm.engine import Model
from edgellm.errors import InvalidOption
from edgellm.llm.drafter_pool import DrafterKind
from edgellm.llm.opening.engine import PairEngine
from edgellm.llm.pair_stats import PairStats
from edgellm.spec.channels import ChannelSplitter
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance, Probabilities
from edgellm.spec.gates.factory import GateChoice, choose, needs_profile
from edgellm.spec.gates.rules import AlwaysGate, NeverGate
from edgellm.spec.mechanisms import has, mechanism
from edgellm.spec.params import BUDGET_CHUNK, CHUNK, GATES, ReplyOptions
from edgellm.spec.types import Ids, Notice, Sampling

if TYPE_CHECKING:
    from edgellm.spec.gates.profile import Profile
    from edgellm.spec.gates.profiler import ObservedReply

MAX_MODEL_DRAFT = 16
"""Maximum tokens of a draft model's chunk if each token is drafted only while it pays."""
_LOGPROBS = "log-probabilities are requested"


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
    kind: DrafterKind = DrafterKind()
    branches: int = 0
    acceptance: ConfidenceAcceptance = field(default_factory=ConfidenceAcceptance)
    alpha: float | None = None  # acceptance rate for the paper's rule
    first: ObservedReply | None = None
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
        if self.alpha is None:
            return self.acceptance.rejection(confidence)
        found: Probabilities = mechanism("parallel drafting").rejection(confidence, self.alpha)
        return found


def plan_reply(engine: PairEngine, request: WantedReply) -> ReplyPlan:
    """Return the plan of a reply by this pair, with reasons."""
    options, knowledge, draft = request.options, engine.knowledge, engine.draft
    if knowledge is None or draft is None:
        plan = _plan_alone(engine, options)
    elif engine.fit.translation is not None:
        plan = _plan_translated(engine.fit.translation.reason, options)
    else:
        plan = _plan_pair(engine, knowledge, draft, options, request.sampling)
    if options.gamma is not None or engine.linked:
        plan = replace(plan, gamma=plan.choice.gamma)
    lossless = plan.choice.controller is None or options.budget in (None, 1.0)
    checked = engine.verifier is None or (lossless and options.gate in ("auto", "always"))
    plan = replace(plan, checked=checked and plan.first is None and options.budget != 0.0)
    speculates, speculator = _choose_speculator(engine, options, plan)
    sources, retrieval = _choose_sources(engine, options, plan, speculates)
    reasons = tuple(filter(None, (*plan.reasons, speculator)))
    return replace(
        plan, speculates=speculates and sources is not None, sources=sources, retrieval=retrieval, reasons=reasons
    )


def _plan_alone(engine: PairEngine, options: ReplyOptions) -> ReplyPlan:
    """Return the plan of a reply by one model."""
    drafts = engine.draft is not None
    writer = "the draft model" if drafts else "the verifier"
    kind, reason = _early_exit(engine.draft, options, None, DrafterKind())
    notices = []
    if options.budget not in (None, 0.0 if drafts else 1.0):
        notices.append(Notice(f"The budget of {options.budget} has no effect: {writer} writes alone."))
    if options.early_exit == "on" and not drafts:
        notices.append(Notice("The early exit has no effect: there is no draft model to leave early."))
    choice = GateChoice(NeverGate() if drafts else AlwaysGate(), "", options.gamma or CHUNK)
    return ReplyPlan(choice, kind, notices=tuple(notices), reasons=(f"{writer} writes alone", reason))


def _plan_translated(reason: str, options: ReplyOptions) -> ReplyPlan:
    """Return the plan of a reply whose drafts are translated: all of them are verified."""
    asked = {
        f"the budget of {options.budget}": options.budget not in (None, 1.0),
        f"the gate {options.gate}": options.gate not in ("auto", "always"),
        "the early exit": options.early_exit == "on",
    }
    unused = ", ".join(f"{name} has no effect" for name, given in asked.items() if given)
    notice = Notice(f"The models have different tokenizers, so every draft is verified: {unused}.")
    return ReplyPlan(
        GateChoice(AlwaysGate(), reason, options.gamma or CHUNK), notices=(notice,) if unused else (),
        reasons=(reason, "no gate, early exit or parallel inference: the models have different tokenizers"),
    )  # fmt: skip


def _plan_pair(
    engine: PairEngine, knowledge: PairStats, draft: Model, options: ReplyOptions, sampling: Sampling
) -> ReplyPlan:
    """Return the plan of a reply by both models."""
    if isinstance(options.gate, str) and GATES[options.gate].importance and not draft.attention_layers:
        raise InvalidOption(
            f"The gate {options.gate} needs attention, and {draft.name} has none.", "Use --gate auto or confidence."
        )
    wants_profile = needs_profile(options)
    profile = knowledge.profile(wants_profile)
    learns = options.learn_profile and sampling.greedy and _verifies_all(options) and knowledge.learns()
    first: ObservedReply | None = None
    notices: list[Notice] = []
    if learns or (wants_profile and profile is None):
        layers = default_layers(draft)
        first, notices = knowledge.first.begin(layers, improves=learns)
        reason = "the reply improves the pair's profile" if learns else "the pair has no profile yet"
        choice = GateChoice(first, reason, options.gamma or BUDGET_CHUNK, layers)
    else:
        controller = knowledge.controller(options)
        choice = choose(options, sampling.seed, profile=profile, controller=controller, linked=engine.linked)
    kind, early = _early_exit(draft, options, profile, DrafterKind(choice.layers))
    n_branches, parallel = 0, "no parallel inference: the pair is being profiled"
    if first is None:  # Importance is not measured for tokens drafted ahead.
        n_branches, parallel = _branches(engine, knowledge, options, profile, kind, choice)
    if n_branches:
        most: tuple[int, int] = mechanism("parallel drafting").room(choice.gamma)
        kind = replace(kind, branches=most[0], gamma=most[1])
    alpha = profile.alpha if profile is not None and options.gate == "synera" else None
    return ReplyPlan(
        choice, kind, n_branches, knowledge.acceptance(options), alpha, first, notices=tuple(notices),
        reasons=(choice.reason, early, parallel),
    )  # fmt: skip


def _verifies_all(options: ReplyOptions) -> bool:
    """Return whether every chunk is verified, and drafted by the draft model."""
    checked = options.budget in (None, 1.0) and options.gate in ("auto", "always")
    return checked and options.drafter is None and options.logprobs is None


def default_layers(model: Model) -> tuple[int, ...]:
    """Return the default layer for importance: the second with attention."""
    return model.attention_layers[:2][-1:]


def _early_exit(
    draft: Model | None, options: ReplyOptions, profile: Profile | None, kind: DrafterKind
) -> tuple[DrafterKind, str]:
    """Return `kind`, with an early exit if used, and why. Raise InvalidOption if it is asked for, but impossible."""
    if draft is None:
        return kind, "no early exit: there is no draft model"
    if options.early_exit == "off":
        return kind, "no early exit, as requested"
    layer: int | None = None
    why = "the pair has no profile that shows that it pays"
    if profile is not None:
        layer, why = profile.best_exit()
    if options.early_exit == "on" and layer is None:
        layer, why = mechanism("early exit").first_exit(draft), "as requested"
    if layer is None:
        return kind, f"no early exit: {why}"
    return replace(kind, exit_layer=layer, threshold=options.exit_threshold), f"early exit: {why}"


def _branches(
    engine: PairEngine, knowledge: PairStats, options: ReplyOptions, profile: Profile | None, kind: DrafterKind,
    choice: GateChoice,
) -> tuple[int, str]:  # fmt: skip
    """Return the number of branches to draft while waiting for a verdict, and why."""
    hindrances = {
        ", as requested": not options.parallel,
        ": it is left out": not has("parallel drafting"),
        ": the verifier computes on this device": not engine.linked,
        ": the reply follows a JSON schema": options.json_schema is not None,  # Guesses may break the schema.
        ": a draft model with an early exit has no branches": kind.exit_layer is not None,
        ": no verdict is waited for": isinstance(choice.gate, NeverGate),
    }
    if why := next((why for why, hinders in hindrances.items() if hinders), ""):
        return 0, f"no parallel inference{why}"
    seconds, wait = ((), 0.0) if profile is None else (profile.batch_seconds, profile.verify_seconds)
    chosen: tuple[int, str] = mechanism("parallel drafting").choose_branches(
        seconds, knowledge.verdict_seconds or wait, choice.gamma
    )
    return chosen


def _choose_speculator(engine: PairEngine, options: ReplyOptions, plan: ReplyPlan) -> tuple[bool, str]:
    """Return whether the speculator of the model that decides the text drafts, and why; "" without a speculator."""
    verifier, own = engine.verifier, engine.text.speculator
    name = verifier.capabilities.speculator if verifier is not None else own.name if own is not None else ""
    if not name or engine.linked:
        return False, ""
    nothing = f"{name} drafts nothing"
    if options.drafter is not None or options.logprobs is not None:
        return False, f"{nothing}: {'a custom drafter is used' if options.drafter else _LOGPROBS}"
    if not plan.checked:
        return False, f"{nothing}: not everything is verified"
    if verifier is not None and engine.draft is not None:
        return False, f"{nothing}: the draft model drafts"
    return True, f"{name} drafts where that is faster"


def _choose_sources(
    engine: PairEngine, options: ReplyOptions, plan: ReplyPlan, speculates: bool
) -> tuple[tuple[str, ...] | None, str]:
    """Return the sources of copies, and why. The draft policy also decides on drafts of the draft model or, with
    `speculates`, the speculator, if need be without sources; None: the policy is not asked."""
    if options.drafter is not None:
        return None, "no retrieval: a custom drafter is used"
    if options.logprobs is not None:
        return None, f"no retrieval: {_LOGPROBS}"
    sources = options.sources()
    compares = None not in (engine.draft, engine.verifier) and options.gate == "auto" and options.gamma is None
    if not sources and not (compares or speculates):
        return None, "no retrieval, as requested"
    if not plan.checked:
        return None, "no retrieval: not everything is verified"
    if not sources:
        return (), "no retrieval, as requested"
    return sources, f"drafts are retrieved from: {', '.join(sources)}{engine.retrieval.head_note}"
