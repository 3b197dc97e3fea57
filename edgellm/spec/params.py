"""The options of one reply, and an option as data: a record's field that declares the option of the command line which
sets it. `edgellm.cli.options` makes the flag, environment variable, setting and help line from the field.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from edgellm.errors import InvalidOption

if TYPE_CHECKING:
    from edgellm.spec.protocols import Drafter, Gate
    from edgellm.spec.sampling import ModelSampling
    from edgellm.spec.types import Sampling

AS_MODEL = "the model's"  # what help pages say of a default that the model decides

_KEY = "flag"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """The command-line form of a field; by default its flag has the field's name."""

    help: str
    metavar: str | None = None
    names: tuple[str, ...] = ()
    panel: str | None = None
    """The section of a long help page; a short page leaves it out."""
    shown: str = ""
    """The default that a help page shows, where it differs from the field's own."""
    variable: str | None = None
    """An environment variable that takes precedence over that of the flag's name."""
    choices: tuple[str, ...] = ()
    """The values, if there are only some."""
    least: float | None = None


def flag(default: Any, text: str, metavar: str | None = None, **more: Any) -> Any:
    """Return a field with this default and help text; `more` are further fields of `Flag`."""
    return field(default=default, metadata={_KEY: Flag(help=text, metavar=metavar, **more)})


def flags_of(record: type[Any]) -> dict[str, Flag]:
    """Return the flags of a record by its fields' names."""
    return {one.name: one.metadata[_KEY] for one in fields(record) if _KEY in one.metadata}


_RULES, _SYNERA = "edgellm.spec.gates.rules", "edgellm.spec.gates.synera"


class GateKind(NamedTuple):
    """A gate: the place of the function that makes `Chances` from a profile and a share, which keeps a budget; the
    budget that the gate stands for; and whether it needs importance."""

    chances: str = ""
    stands_for: float | None = None
    importance: bool = False


GATES = {
    "auto": GateKind(),  # chunks whose verdict saves the reply, by the pair's profile
    "synera": GateKind(f"{_SYNERA}:by_both", importance=True),  # the paper's: confidence, then importance
    "confidence": GateKind(f"{_RULES}:by_confidence"),
    "importance": GateKind(f"{_SYNERA}:by_importance", importance=True),
    "random": GateKind(f"{_RULES}:at_random"),
    "always": GateKind(stands_for=1.0),
    "never": GateKind(stands_for=0.0),
}
"""The gates by name. A mechanism is a module and its lines."""

TRUNCATIONS = ("auto", "disabled")


SOURCES = {
    "context": 0.35,  # the prompt and the reply so far
    "history": 0.2,  # past conversations, verbatim
    "calibration": 0.3,  # the model's predictions while it read the prompt
    "reuse": 0.4,  # the rest of a rejected draft
    "schema": 0.8,  # what the reply's JSON schema leaves no choice about
}
"""The sources that drafts can be retrieved from, each with the prior chance that a token which it alone offers is
accepted."""
DEFAULT_SOURCES = ("context", "history", "schema")
"""The default sources: calibration and reuse cost as much as they bring."""
ANY_TOOL = "*"
"""The `tool_choice` for a call of any tool, which the model decides."""
MAX_STOPS, MAX_STOP_LENGTH, MAX_LOGPROBS = 16, 500, 20
MAX_BIAS, MAX_BIASES = 100.0, 1024
"""The most that a penalty or a bias changes a logit by, and the most biased tokens."""
MIN_REPEAT = 1.0 / MAX_BIAS
CHUNK = 4
"""Drafted tokens in a chunk if everything is verified, or nothing."""
BUDGET_CHUNK = 2
"""The same under a budget: with small chunks the budget goes to wrong tokens, not to their neighbours."""
_PENALTY = (-MAX_BIAS, MAX_BIAS, f"a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
_NUMBERS = {
    "temperature": (0.0, sys.float_info.max, "0 (greedy) or a positive number"),
    "top_p": (sys.float_info.min, 1.0, "a number above 0 and up to 1; 1 switches it off"),
    "repeat_penalty": (
        MIN_REPEAT, MAX_BIAS, f"a number from {MIN_REPEAT} to {MAX_BIAS:g}, such as 1.1; 1 switches it off"
    ),
    "frequency_penalty": _PENALTY, "presence_penalty": _PENALTY,
    **dict.fromkeys(("min_p", "exit_threshold", "budget"), (0.0, 1.0, "a number from 0 to 1, such as 0.2")),
    "logprobs": (0, MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}"),
    **dict.fromkeys(("max_tokens", "gamma", "max_total"), (1, inf, "a whole number of at least 1")),
    **dict.fromkeys(("seed", "think", "top_k"), (0, inf, "a whole number of at least 0")),
}  # fmt: skip
"""The least and the largest value of numbers, and their ranges in words. Where the least is whole, all are."""


def _sampled(text: str, metavar: str, default: float | None = None, shown: str = "") -> Any:
    return flag(default, text, metavar, panel="Sampling", shown=shown or AS_MODEL if default is None else "")


_drafts = partial(flag, panel="Drafts and verification")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """Options for one reply. By default everything is verified, and sampled as the model wants, in this process and in
    the verifier. Penalties and `logit_bias` hold for greedy replies, too.

    Raises: InvalidOption: a value out of range, named with the range.
    """

    budget: float | None = flag(None, "Share of chunks to verify, 0 to 1.", "SHARE", shown="all")
    """Kept over all replies of a pair."""
    max_tokens: int = flag(512, "Maximum number of tokens in the answer.", "N")
    temperature: float | None = flag(None, "Sampling temperature; 0 is greedy.", "T", shown=AS_MODEL)
    top_k: int | None = _sampled("Sample from the K likeliest tokens; 0: from all.", "K")
    top_p: float | None = _sampled("Sample from the likeliest tokens that together have probability P.", "P")
    min_p: float | None = _sampled(
        "Sample from tokens with at least this share of the likeliest one's probability.", "P"
    )
    repeat_penalty: float | None = _sampled("Above 1: repeat the last 64 tokens less.", "X")
    frequency_penalty: float = _sampled("Above 0: write a token less, the more often the reply has it.", "X", 0.0)
    presence_penalty: float = _sampled("Above 0: write tokens less that the reply has already.", "X", 0.0)
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # amounts added to tokens' logits
    json_schema: str | None = None  # the reply is JSON that is valid by this schema, itself JSON
    seed: int | None = _sampled("Seed; the same one repeats a sampled reply.", "N", shown="random")
    gate: str | Gate = _drafts(
        "auto",
        f"Rule that chooses the chunks to verify: {', '.join(GATES)}; auto: by the pair's profile.",
        "GATE", choices=tuple(GATES),
    )  # fmt: skip
    """One of `GATES`, or a custom gate. `auto` verifies everything without a budget."""
    drafter: Drafter | None = None
    """A custom drafter in place of the draft model and of retrieval; it works with the gates `auto` without a budget,
    `always`, `never`, or a custom one."""
    parallel: bool = _drafts(True, "Keep drafting while a served verifier checks.")
    early_exit: bool = _drafts(False, "Skip the draft model's last layers for tokens it is sure of.")
    exit_threshold: float = _drafts(0.7, "How sure: the likeliest token's probability minus the second's.", "P")
    context_lookup: bool = _drafts(
        True,
        "With a budget: where the draft model is unsure, draft the token that followed the same words in the context.",
    )
    gamma: int | None = None
    """Drafted tokens in a chunk, at most; None: the profile's under a budget, else what pays. With `retrieval` off, a
    given number together with the gate `always` drafts in each round, whether that pays or not."""
    retrieval: str = _drafts(
        "auto", f"Sources to copy drafts from, separated by commas: {', '.join(SOURCES)}.", "auto|off|SOURCES",
    )  # fmt: skip
    """Used only if everything is verified, so it never changes the text."""
    stop: tuple[str, ...] = ()  # texts that end the reply, and are not part of it
    logprobs: int | None = None
    """Report each token's log-probability and those of so many others, by the verifier (by the draft model, if that is
    alone); only if everything is verified, in this process."""
    think: bool | int | None = None
    max_total: int | None = None
    template_args: Mapping[str, object] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()  # functions that the model may call, as OpenAI's API describes them
    tool_choice: str | None = None  # one that it must call, or ANY_TOOL
    truncation: str = "disabled"
    """`auto` leaves out the oldest turns of a conversation that is longer than the context, with a notice; `disabled`
    refuses it."""

    def __post_init__(self) -> None:
        self._check_numbers()
        if self.truncation not in TRUNCATIONS:
            raise InvalidOption(f"truncation is {self.truncation!r}.", f"Choose one of {', '.join(TRUNCATIONS)}.")
        if isinstance(self.gate, str) and self.gate not in GATES:
            raise InvalidOption(f"gate is {self.gate!r}.", f"Choose one of {', '.join(GATES)}.")
        if len(self.stop) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_LENGTH for text in self.stop):
            raise InvalidOption(
                f"stop has {len(self.stop)} texts, of {[len(text) for text in self.stop[:MAX_STOPS]]} characters.",
                f"Give at most {MAX_STOPS}, each of 1 to {MAX_STOP_LENGTH} characters.",
            )
        if len(self.logit_bias) > MAX_BIASES:
            raise InvalidOption(f"logit_bias has {len(self.logit_bias)} tokens.", f"Give at most {MAX_BIASES}.")
        for token, amount in self.logit_bias.items():
            if token < 0 or not -MAX_BIAS <= amount <= MAX_BIAS:
                raise InvalidOption(
                    f"logit_bias adds {amount} to token {token}.",
                    f"Give ids of tokens, and amounts from {-MAX_BIAS:g} to {MAX_BIAS:g}.",
                )
        self.sources()
        self._check_budget()

    def _check_numbers(self) -> None:
        for name, (least, most, range_) in _NUMBERS.items():
            value = getattr(self, name)
            if (value is None and name != "max_tokens") or (name == "think" and isinstance(value, bool)):
                continue
            is_kind = not isinstance(least, int) or (isinstance(value, int) and not isinstance(value, bool))
            if not (is_kind and least <= value <= most):  # NaN fails, too.
                raise InvalidOption(f"{name} is {value!r}.", f"Give {range_}.")

    @property
    def max_thinking(self) -> int | None:
        """Return the maximum number of tokens of a thought; None: no limit of its own."""
        return None if self.think is None or self.think is True else int(self.think)

    @property
    def needs_profile(self) -> bool:
        """Return whether these options require a profile of the pair."""
        return self.budget is not None and 0.0 < self.budget < 1.0 and self.gate != "random"

    def template_arguments(self) -> dict[str, object]:
        """Return the arguments of a chat template: the switches of thoughts, and `template_args`."""
        if self.think is None:
            asked: dict[str, object] = {"enable_thinking": True}  # Other servers do the same.
        else:
            thinks = bool(self.think)
            asked = {"enable_thinking": thinks, "thinking": thinks}
            asked["thinking_mode"] = "enabled" if thinks else "disabled"
            if self.think is not True:
                asked["thinking_budget"] = int(self.think)
        return asked | dict(self.template_args)

    def sources(self) -> tuple[str, ...]:
        """Return the sources of retrieved drafts, in the order of `SOURCES`; empty if retrieval is off."""
        if self.retrieval in ("auto", "off"):
            return DEFAULT_SOURCES if self.retrieval == "auto" else ()
        wanted = {name.strip() for name in self.retrieval.split(",")}
        if unknown := sorted(wanted - set(SOURCES)):
            raise InvalidOption(
                f"retrieval is {self.retrieval!r}, and {unknown[0]!r} is not a source.",
                f"Choose auto, off, or some of {', '.join(SOURCES)}.",
            )
        return tuple(name for name in SOURCES if name in wanted)

    def _check_budget(self) -> None:
        kind = GATES[self.gate] if isinstance(self.gate, str) else None
        lossless = self.budget is None and kind is not None and not kind.chances
        if self.drafter is not None and kind is not None and not lossless:
            raise InvalidOption(
                f"The gate {self.gate} with the budget {self.budget} only handles chunks of the draft model.",
                "With a custom drafter, leave the budget out or give a custom gate as well.",
            )
        if self.budget is None:
            if kind is not None and kind.chances:
                raise InvalidOption(f"The gate {self.gate} needs a budget.", "Give one, such as 0.2.")
            return
        if kind is None or kind.stands_for not in (None, self.budget):
            name = "A custom gate" if kind is None else f"The gate {self.gate}"
            raise InvalidOption(
                f"{name} does not keep a budget of {self.budget}.", "Leave one of them out, or choose the gate auto."
            )

    def sampling(self, wanted: ModelSampling, prompt_tokens: int = 0) -> Sampling:
        """Return the rule for a reply to a prompt of `prompt_tokens`: these options, else the model's `wanted` figures,
        with a fresh seed if none was given."""
        from edgellm.spec.types import Penalties, Sampling

        def chosen(given: float | None, wanted: float) -> float:
            return wanted if given is None else given

        seed = self.seed if self.seed is not None else int.from_bytes(os.urandom(4))
        penalties = Penalties(
            chosen(self.repeat_penalty, wanted.repeat_penalty), self.frequency_penalty, self.presence_penalty,
            tuple(sorted(self.logit_bias.items())), prompt_tokens,
        )  # fmt: skip
        return Sampling(
            chosen(self.temperature, wanted.temperature), int(chosen(self.top_k, wanted.top_k)),
            chosen(self.top_p, wanted.top_p), seed, chosen(self.min_p, wanted.min_p),
            None if penalties == Penalties(start=prompt_tokens) else penalties,
        )  # fmt: skip


MECHANISMS = {
    "calibration": "edgellm.spec.ngram.calibration",
    "early exit": "edgellm.llm.early_exit",
    "fitting": "edgellm.llm.profiling",
    "forced text": "edgellm.spec.ngram.forced",
    "importance": "edgellm.spec.drafters.importance",
    "parallel drafting": "edgellm.spec.drafters.parallel",
    "reuse": "edgellm.spec.ngram.reuse",
    "speculators": "edgellm.spec.drafters.speculator",
    "translation": "edgellm.spec.drafters.translation",
}
"""The modules of mechanisms, by name."""


def has(name: str) -> bool:
    """Return whether a mechanism is there."""
    return name in MECHANISMS


def mechanism(name: str) -> Any:
    """Return the module of a mechanism, imported when it is first needed. Raise InvalidOption where it is left out."""
    if name not in MECHANISMS:
        raise InvalidOption(f"The {name} is left out of this edgellm.", "Do without it, or install the whole package.")
    return import_module(MECHANISMS[name])
