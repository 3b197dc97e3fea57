"""The markup of a model's thoughts, found from its chat template and its vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


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
    (("</think>",), ThinkingMarkup("<think>", "</think>")),
    (("</think{}>", ":opensource"), ThinkingMarkup("<think:opensource>", "</think:opensource>")),
    (("</seed:think>",), ThinkingMarkup("<seed:think>", "</seed:think>")),
    (("</mm:think>",), ThinkingMarkup("<mm:think>", "</mm:think>")),
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
"""Texts in a chat template, and the markup that they show. The first match counts."""


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
