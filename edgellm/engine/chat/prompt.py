"""A conversation as token ids, with control tokens from the chat template alone.

A conversation is rendered a second time, with placeholders for its messages and for the arguments of calls: that shows
which control tokens are the template's own, and whether everything is in its text. What spells out a control token,
be it in a message, a tool or a call, is then tokenised as plain text.

A model's thoughts have a markup, found from its chat template and its vocabulary, and the level of effort that clients
ask for is an argument of the template.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from edgellm.engine.chat.template import (
    FORMS,
    ROLES,
    Change,
    Message,
    TemplateInput,
    TemplateRaised,
    TemplateRenderer,
    with_calls,
)
from edgellm.engine.native import ShouldStop, never
from edgellm.engine.vocabulary import Ids
from edgellm.errors import InvalidOption, ModelUnsupported

RESERVED = frozenset(
    ("messages", "tools", "tool_choice", "functions", "function_call", "bos_token", "eos_token",
     "add_generation_prompt", "raise_exception", "strftime_now")
)  # fmt: skip
"""Variables of a template that no caller sets."""
_OPEN, _CLOSE = "\ue000", "\ue001"  # around a placeholder's number; in that rendering only our own text holds them
_HOLDER = re.compile(rf"(?:{_OPEN}|\\ue000)(\d+)")  # some templates write JSON in ASCII
_OURS = re.compile(f"[{_OPEN}{_CLOSE}]")
_MARKUP = re.compile(r"[<>|\[\]{}/\uff5c\u2581]")  # the last two are in DeepSeek's control tokens


class Tokens(Protocol):
    """A model's tokens, as `TextModel` has them."""

    def tokenize(self, text: str, *, special: bool, most: int | None, should_stop: ShouldStop) -> Ids: ...
    def check_length(self, text: str, most: int | None) -> None: ...
    def control_name(self, token: int) -> str: ...


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A conversation in one of its forms, its text, the text as `shown` with placeholders, and the number of missing
    placeholders."""

    conversation: TemplateInput
    text: str
    shown: str
    missing: int


class ChatTemplate:
    """A model's chat template, which makes token ids of conversations."""

    def __init__(self, renderer: TemplateRenderer, tokens: Tokens, bos: str, eos: str) -> None:
        """Set up; `tokens` makes ids of texts, `bos` and `eos` are the texts of those tokens."""
        self._renderer, self._tokens, self._model = renderer, tokens, renderer.model
        self._bos, self._eos = bos, eos

    def arguments(self) -> list[str]:
        """Return the names of the arguments that the template reads and callers set."""
        return [name for name in self._renderer.arguments if name not in RESERVED]

    def check(self, arguments: Mapping[str, object]) -> None:
        """Raise InvalidOption where the template does not read one of the `arguments`, or callers do not set it."""
        if not arguments:
            return
        known = self.arguments()
        if unknown := sorted(set(arguments) - set(known)):
            raise InvalidOption(
                f"{unknown[0]!r} is not an argument of the chat template of {self._model}.",
                f"It reads {', '.join(known)}." if known else "It reads none; leave it out.",
            )

    def names(self, value: str) -> bool:
        """Return whether the template has `value` as a text of its own."""
        return any(quote + value + quote in self._renderer.source for quote in "'\"")

    def takes(self, arguments: Mapping[str, object]) -> bool:
        """Return whether the template accepts the values of these `arguments`, with a question."""

        def writes(arguments: Mapping[str, object]) -> bool:
            try:
                self._render(TemplateInput((Message("user", "Hello"),)), arguments)
            except TemplateRaised:
                return False
            return True

        return writes(arguments) or not writes({})

    def prompt(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, object] = MappingProxyType({}),
        most: int | None = None,
        should_stop: ShouldStop = never,
        tell: Callable[[str], None] = lambda _: None,
    ) -> Ids:
        """Return the ids of the rendered conversation, shape (n,), with the opening of the assistant's turn at the end.

        `arguments` are given to the template; those that it does not read have no effect. Where it fails on the
        conversation, or leaves a message out, it gets another form of `FORMS`; `tell` is called with the change. Raises
        InvalidOption: an unknown role, no message, or an argument that cannot be written as JSON; ModelUnsupported: the
        template is not valid, refuses the conversation in every form, or takes more than its limits; EngineFailed: the
        process that renders it could not be started, or was ended from outside; PromptTooLong: there are more than
        `most` ids; TextRefused, Stopped: as for `TextModel.tokenize`.
        """
        if not messages:
            raise InvalidOption("There is no message to answer.", "Give at least one.")
        for message in messages:
            if message.role not in ROLES:
                raise InvalidOption(f"{message.role!r} is not a message role.", f"Use one of {', '.join(ROLES)}.")

        try:
            tools: Any = arguments.get("tools")
            rendered = self._in_fitting_form(TemplateInput(tuple(with_calls(messages)), tools), arguments, tell)
            self._tokens.check_length(rendered.text, most)
            return self._tokenise(rendered, arguments, most, should_stop)
        except RecursionError:
            raise InvalidOption("A tool or a call is nested too deeply.", "Use fewer levels.") from None

    def _in_fitting_form(
        self, conversation: TemplateInput, arguments: Mapping[str, object], tell: Callable[[str], None]
    ) -> _Rendered:
        """Return the conversation in the first form that loses nothing in the text, without needless changes; if every
        form loses something, in the form that loses least."""
        best: tuple[_Rendered, list[tuple[str, Change]]] | None = None

        def attempt(changes: list[tuple[str, Change]]) -> bool:
            """Return whether everything is in the text of the conversation with `changes`."""
            nonlocal best
            changed = conversation
            for _, change in changes:
                changed = change(changed)
            try:
                rendered = self._rendered(changed, arguments)
            except TemplateRaised:
                return False
            if best is None or rendered.missing < best[0].missing or (rendered.missing == best[0].missing == 0):
                best = rendered, changes
            return not rendered.missing

        chosen: list[tuple[str, Change]] = []
        for form in (None, *FORMS):
            if form is not None:
                if form[1](conversation) == conversation:
                    continue
                chosen.append(form)
            if attempt(chosen.copy()):
                for needless in chosen[:-1]:
                    fewer = [one for one in chosen if one is not needless]
                    chosen = fewer if attempt(fewer) else chosen
                break
        if best is None:
            return self._rendered(conversation, arguments)  # raises why it was refused as it is
        for sentence, _ in best[1]:
            tell(f"{sentence} The chat template wants it so.")
        return best[0]

    def _rendered(self, conversation: TemplateInput, arguments: Mapping[str, object]) -> _Rendered:
        text = self._render(conversation, arguments)
        numbers, mark = count(), _unused(text)

        def held(value: str) -> str:  # an empty value stays empty: templates write less then
            return f"{_OPEN}{next(numbers)}{_CLOSE}" if value.strip() else value

        shown = self._render(conversation.changed(lambda value: _marked(value, mark), held), arguments)
        return _Rendered(conversation, text, shown, next(numbers) - len({*_HOLDER.findall(shown)}))

    def _tokenise(
        self, rendered: _Rendered, arguments: Mapping[str, object], most: int | None, should_stop: ShouldStop
    ) -> Ids:
        """Return the ids of a conversation; control tokens that it spells out are plain text."""

        def encode(text: str, most: int | None = most) -> Ids:
            return self._tokens.tokenize(text, special=True, most=most, should_stop=should_stop)

        def render(change: Callable[[str], str]) -> str:
            text = self._render(rendered.conversation.changed(change), arguments)
            return text.replace(_in_ascii(mark), mark)

        def controls(text: str, ids: Ids) -> list[str]:
            """Return the control tokens among the `ids` of `text` that it spells out, in order."""
            names = {token: self._tokens.control_name(token) for token in {*ids.tolist()}}
            written = {token: name for token, name in names.items() if name and name in text}
            return [written[token] for token in ids.tolist() if token in written] if written else []

        ids = encode(rendered.text)
        found = controls(rendered.text, ids)
        if found == controls(rendered.shown, encode(rendered.shown, most=None)) and all(map(_MARKUP.search, found)):
            return ids
        names, mark = {*found}, _unused(rendered.text)
        marked = render(lambda text: _marked(_apart(text, mark, names), mark))
        expected = controls(marked, encode(marked, most=None))
        if found == expected:  # the template only branches otherwise for placeholders
            return ids
        parts = render(lambda text: _apart(text, mark, names)).split(mark)
        encoded = list(map(encode, parts))
        if [name for part, ids in zip(parts, encoded, strict=True) for name in controls(part, ids)] != expected:
            encoded = list(map(encode, marked.split(mark)))  # the template changes texts
        return np.concatenate(encoded)

    def _render(self, conversation: TemplateInput, arguments: Mapping[str, object] = MappingProxyType({})) -> str:
        given = dict(arguments) if conversation.tools is None else {**arguments, "tools": conversation.tools}
        text = self._renderer.render(conversation.fields(), self._bos, self._eos, given)
        return text.encode("utf-8", "replace").decode()  # JSON may spell out half of a pair of surrogates

    @cached_property
    def describes_tools(self) -> bool:
        """Try whether the template describes the tools that it is given: a name that it reads may also be an argument
        of its macros."""
        name = "name_of_a_tool"
        schema = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
        try:
            return name in self._render(TemplateInput((Message("user", "Hello"),), (tool,)))
        except ModelUnsupported:
            return False


def _unused(text: str) -> str:
    """Return a character without a meaning that `text` does not have, not as JSON in ASCII either."""
    used = set(text)
    candidates = map(chr, chain(range(0xF8FF, 0xE001, -1), range(0xF0000, 0xFFFFE)))
    return next(one for one in candidates if one not in used and _in_ascii(one) not in text)


def _in_ascii(character: str) -> str:
    return json.dumps(character)[1:-1]


def _apart(text: str, mark: str, names: Iterable[str]) -> str:
    """Return the text with a `mark` inside each of the `names` of control tokens."""
    for name in names:
        text = text.replace(name, name[:1] + mark + name[1:])
    return text


def _marked(text: str, mark: str) -> str:
    """Return the text with a `mark` behind every character of control tokens' markup."""
    return _MARKUP.sub(rf"\g<0>{mark}", _OURS.sub("", text))


@dataclass(frozen=True, slots=True)
class ThinkingMarkup:
    """The texts that a model writes around its thoughts.

    A reply begins with a thought after `opening`, which may also be the end of the prompt; `closing` ends it, and the
    answer follows. Texts in `hidden` surround the answer and belong to neither. With `channels` a reply consists of
    messages in OpenAI's harmony format, each with a header that names its channel; `opening` and `closing` are then the
    usual headers. `reason` says where the markup was found.
    """

    opening: str
    closing: str
    hidden: tuple[str, ...] = ()
    channels: bool = False
    reason: str = ""

    def is_opened_by(self, prompt: str) -> bool:
        """Return whether a reply to `prompt` begins within a thought."""
        return prompt.rstrip().endswith(self.opening.rstrip())


_CHANNELS = ThinkingMarkup(
    "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>", channels=True
)
_KNOWN: tuple[tuple[tuple[str, ...], ThinkingMarkup], ...] = (
    (("<|channel|>", "<|message|>"), _CHANNELS),
    *((signs, ThinkingMarkup(opening, closing, hidden)) for signs, opening, closing, hidden in (
        (("</think>", "</response>"), "<think>", "</think>", ("<response>", "</response>")),
        (("</think{}>", ":opensource"), "<think:opensource>", "</think:opensource>", ()),
        *(((f"</{tag}>",), f"<{tag}>", f"</{tag}>", ()) for tag in ("think", "seed:think", "mm:think")),
        (("[/THINK]",), "[THINK]", "[/THINK]", ()),
        (("<|channel>", "<channel|>"), "<|channel>thought", "<channel|>", ()),
        (("<|inner_prefix|>", "<|inner_suffix|>"), "<|inner_prefix|>", "<|inner_suffix|>", ()),
        (("<|START_THINKING|>", "<|END_THINKING|>"), "<|START_THINKING|>", "<|END_THINKING|>",
         ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")),
        (("[BEGIN FINAL RESPONSE]",), "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]",
         ("[END FINAL RESPONSE]",)),
        (("<|think|>", "<|content|>", "<|begin|>"), "<|think|>", "<|end|><|begin|>assistant<|content|>",
         ("<|content|>",)),
        (("<|open|>", "<|close|>", "<|sep|>", "think"), "<|open|>think<|sep|>", "<|close|>think<|sep|>",
         ("<|open|>response<|sep|>", "<|close|>response<|sep|>")),
        (("to=self<|message|>", "<|eom|>"), "to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>",
         ("to=user<|message|>",)),
    )),
)  # fmt: skip
"""Texts in a chat template, and the markup that they show; the first match counts."""


def find_markup(template: str, is_token: Callable[[str], bool]) -> ThinkingMarkup | None:
    """Return the markup of a model's thoughts; None if it is not known to think.

    `is_token` tells whether a text is a single token: some templates leave the markup out of the conversation, and only
    the vocabulary has it.
    """
    for signs, markup in _KNOWN:
        if all(sign in template for sign in signs):
            return replace(markup, reason=f"its chat template contains {' and '.join(signs)}")
    for _, markup in _KNOWN:
        if is_token(markup.opening) and is_token(markup.closing):
            return replace(markup, reason=f"its vocabulary has the tokens {markup.opening} and {markup.closing}")
    return None


EFFORT = "reasoning_effort"
_LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_USUAL = ("low", "medium", "high")  # levels of templates that write any level out, without naming them
_OFF = ("none", "minimal")
_SWITCHES = ("enable_thinking", "thinking")


def fitting(
    arguments: Mapping[str, object], template: ChatTemplate, thinks: bool
) -> tuple[dict[str, object], bool | None, list[str]]:
    """Return the `arguments` that a template reads, with the nearest level of effort that it takes; whether the model,
    if it `thinks` at all, shall think by the other arguments, None if they do not say; and the names of arguments
    without their full effect."""
    known = template.arguments()
    kept, think, left_out = dict[str, object](), None, list[str]()
    for name, value in arguments.items():
        if name == EFFORT and value in _LEVELS:
            level = _nearest(str(value), template) if EFFORT in known else None
            if level is not None:
                kept[name] = level
            elif value in _OFF:
                think = False
            elif thinks:
                think = True
            if level != value and not (value in _OFF and think is False):
                left_out.append(name)
        elif name in known and template.takes({name: value}):
            kept[name] = value
        elif name in _SWITCHES and isinstance(value, bool) and (thinks or not value):
            think = value
        else:
            left_out.append(name)
    return kept, think, left_out


def _nearest(asked: str, template: ChatTemplate) -> str | None:
    """Return the level nearest to `asked`, the lower of two, that the template takes; None if it takes none, or if no
    thought is asked for and the template has no such level."""
    named = [level for level in _LEVELS if level in _USUAL or template.names(level)]
    if asked == "none" and asked not in named:
        return None
    place = _LEVELS.index(asked)
    nearest: Iterable[str] = sorted(named, key=lambda level: abs(_LEVELS.index(level) - place))
    return next((level for level in nearest if template.takes({EFFORT: level})), None)
