"""A model's thoughts: their markup, found from its chat template and its vocabulary, and the level of effort that
clients ask for, in the chat template's own arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgellm.engine.chat.prompt import ChatTemplate


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
    (("</think>", "</response>"), ThinkingMarkup("<think>", "</think>", ("<response>", "</response>"))),
    (("</think{}>", ":opensource"), ThinkingMarkup("<think:opensource>", "</think:opensource>")),
    *(((f"</{tag}>",), ThinkingMarkup(f"<{tag}>", f"</{tag}>")) for tag in ("think", "seed:think", "mm:think")),
    (("[/THINK]",), ThinkingMarkup("[THINK]", "[/THINK]")),
    (("<|channel>", "<channel|>"), ThinkingMarkup("<|channel>thought", "<channel|>")),
    (("<|inner_prefix|>", "<|inner_suffix|>"), ThinkingMarkup("<|inner_prefix|>", "<|inner_suffix|>")),
    (
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ThinkingMarkup(
            "<|START_THINKING|>", "<|END_THINKING|>",
            ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        ),
    ),
    (
        ("[BEGIN FINAL RESPONSE]",),
        ThinkingMarkup("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", ("[END FINAL RESPONSE]",)),
    ),
    (
        ("<|think|>", "<|content|>", "<|begin|>"),
        ThinkingMarkup("<|think|>", "<|end|><|begin|>assistant<|content|>", ("<|content|>",)),
    ),
    (
        ("<|open|>", "<|close|>", "<|sep|>", "think"),
        ThinkingMarkup(
            "<|open|>think<|sep|>", "<|close|>think<|sep|>", ("<|open|>response<|sep|>", "<|close|>response<|sep|>")
        ),
    ),
    (
        ("to=self<|message|>", "<|eom|>"),
        ThinkingMarkup("to=self<|message|>", "<|eom|><|start|>assistant to=user<|message|>", ("to=user<|message|>",)),
    ),
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
