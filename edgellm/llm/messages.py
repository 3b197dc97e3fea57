"""Messages of a conversation, and their tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from edgellm.engine import Message, Model, ToolCall
from edgellm.engine.chat.prompt import fitting
from edgellm.engine.native import ShouldStop, never
from edgellm.errors import InputNotText, InvalidOption, ModelUnsupported, PromptTooLong, TextRefused
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stream import ChannelSplitter, split_text
from edgellm.spec.types import Channel, Constraint, Explanation, Ids, Notice, Token

if TYPE_CHECKING:
    from edgellm.llm.tools.toolbox import Toolbox


def compose(
    prompt: str, *, context: Sequence[str] = (), history: Sequence[Message] = (), system: str | None = None
) -> list[Message]:
    """Return a request's messages: `history` (earlier turns), then a user turn with the `context` texts and `prompt`.

    The user turn has the form that the bundled models are trained on: the context texts first, a blank line after each,
    then the question. `system` opens the conversation, unless `history` already has such a turn.
    """
    opening = [Message("system", system)] if system and not any(m.role == "system" for m in history) else []
    return [*opening, *history, Message("user", prompt, context=tuple(context)).whole()]


def room_for_reply(most: int, context: int) -> int:
    """Return how many tokens of a `context` are kept for a reply of at most `most`."""
    return min(most, context // 4)


def without_turns(messages: Sequence[Message], begin: int) -> list[Message]:
    """Return the messages from `begin` on, a user's message. Earlier system messages stay, and the context of earlier
    questions moves to the user's message."""
    if not begin:
        return list(messages)
    left_out, first = messages[:begin], messages[begin]
    context = [text for message in left_out for text in message.context]
    system = [message for message in left_out if message.role == "system"]
    return [*system, replace(first, context=(*context, *first.context)), *messages[begin + 1 :]]


def _without_markup(model: Model, message: Message) -> Message:
    """Return `message` with its thought separated from its answer."""
    if message.role != "assistant" or (markup := model.thinking) is None:
        return message
    thought, answer = split_text(markup, message.content)
    return replace(message, content=answer, thinking=message.thinking or thought)


_OPENING = 40  # most characters of a turn's first line
_PROMPT_END = 32  # tokens, enough for the markup that opens a thought


def channels_of(model: Model, ids: Ids) -> ChannelSplitter:
    """Return a splitter for the reply to the conversation `ids` (n,)."""
    if (markup := model.thinking) is None:
        return ChannelSplitter()
    end = b"".join(model.control_text(token) for token in ids[-_PROMPT_END:].tolist())
    opened = markup.is_opened_by(end.decode("utf-8", "replace"))
    return ChannelSplitter(markup, opened=opened, control_text=model.control_text)


def draft_ids(
    draft: Model, text: str, prompt: str | Sequence[Message] | None, context: int, should_stop: ShouldStop = never
) -> Ids | None:
    """Return the prompt for a `draft` model with another tokenizer, (n,): a question or a conversation `prompt` in its
    own chat template; without `prompt` or a template, the prompt's `text`. None, for no drafts, if neither is usable.
    """
    try:
        if prompt is not None:
            with suppress(ModelUnsupported):
                return PromptWriter(draft, context, grammars=False).ids(prompt, should_stop=should_stop)
        return plain_ids(draft, text, context, should_stop)
    except (InvalidOption, PromptTooLong, TextRefused):
        return None


def turn_openings(text: str, prompt: str | Sequence[Message]) -> tuple[str, ...]:
    """Return the first lines of turns, such as "user", in the `text` of a conversation `prompt` without its control
    tokens. A draft model that is no chat model may go on with such a line after its turn."""
    question = prompt if isinstance(prompt, str) else prompt[-1].whole().content
    before, found, after = text.rpartition(question.strip() or text)
    lines = (before.rstrip().rpartition("\n")[2], before.endswith("\n")), after.lstrip().partition("\n")[:2]
    openings = [f"\n{line.strip()}" + "\n" * bool(ends) for line, ends in lines if 0 < len(line.strip()) <= _OPENING]
    return tuple(dict.fromkeys(openings)) if found else ()


def plain_ids(model: Model, prompt: str | Sequence[int], context: int, should_stop: ShouldStop) -> Ids:
    """Return the ids (n,) of a text without template, or of given tokens. Raises InvalidOption for an invalid token."""
    if isinstance(prompt, str):
        _check_text(prompt)
        ids = model.plain_prompt(prompt, most=context - 1, should_stop=should_stop)
    else:
        if (bad := next((token for token in prompt if not 0 <= token < model.n_vocab), None)) is not None:
            raise InvalidOption(f"{bad} is not a token of {model.name}.", f"Ids are 0 to {model.n_vocab - 1}.")
        ids = np.array(prompt, dtype=np.int32)
    if not len(ids):
        raise InvalidOption("The prompt is empty.", "Write a text to continue.")
    return check_length(ids, context)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InputNotText("The prompt holds bytes that are not UTF-8.", "Convert it to UTF-8 first.") from None


def check_length(ids: Ids, context: int) -> Ids:
    """Return the `ids` (n,) of a prompt. Raises PromptTooLong where the `context` does not hold them."""
    if len(ids) >= context:
        raise PromptTooLong.of(len(ids), context - 1)
    return ids


@dataclass(frozen=True, slots=True)
class PromptWriter:
    """A writer of questions and conversations in the form of a `model`, with room for a reply in the `context`, in
    tokens, and the reply's constraint. `grammars`: replies can follow a schema."""

    model: Model
    context: int
    grammars: bool

    def fitting_ids(
        self, messages: Sequence[Message], options: ReplyOptions, should_stop: ShouldStop, tell: Callable[[str], None]
    ) -> tuple[Ids, Sequence[Message], list[Notice | Explanation]]:
        """Return the ids (n,) of a conversation, the sent messages, and notices: the oldest turns are left out, with a
        notice, if the reply would have no room. Each try leaves out twice as many turns, so that the next request
        leaves out the same turns, and its prefix is cached. The last turn alone is sent even if it leaves no room."""
        turns = [at for at, message in enumerate(messages) if message.role == "user"]
        most, count, step = self.context - room_for_reply(options.max_tokens, self.context), 0, 1
        while True:
            sent, is_last = without_turns(messages, turns[count] if count else 0), count >= len(turns) - 1
            try:
                ids = self.ids(sent, options, should_stop, tell)
                if is_last or len(ids) <= most:
                    break
            except PromptTooLong:
                if is_last:
                    raise
            count, step = min(count + step, len(turns) - 1), 2 * step
        if not count:
            return ids, messages, []
        text = (
            f"The conversation is longer than the context of {self.context} tokens. Its"
            f" {'oldest turn is' if count == 1 else f'{count} oldest turns are'} no longer sent to the model."
        )
        return ids, sent, [Notice(text, count)]

    def ids(
        self, prompt: str | Sequence[Message], options: ReplyOptions | None = None, should_stop: ShouldStop = never,
        tell: Callable[[str], None] = lambda _: None,
    ) -> Ids:  # fmt: skip
        """Return the token ids of a question or a conversation in the model's chat template, shape (n,), n below the
        context, for a reply with `options`; `should_stop` is polled, and `tell` gets changes that the template wants.

        An assistant's turn that still has the model's markup around its thought is separated into thought and answer.
        Raises Stopped: `should_stop` returned True; TextRefused: the model's tokenizer fails on the prompt, or takes
        too long; InvalidOption: the prompt is empty; InputNotText: it is not valid Unicode; PromptTooLong: it does not
        fit the context; states both lengths.
        """
        options = options or ReplyOptions()
        if not isinstance(prompt, str) and prompt and prompt[-1].continued:
            return self._continued(prompt, options, should_stop, tell)
        arguments = options.template_arguments()
        used = not isinstance(prompt, str) and any(turn.tool_calls or turn.role == "tool" for turn in prompt)
        if not (options.tools or used):
            return self._chat(prompt, arguments, should_stop, tell)
        toolbox = self.toolbox(options)
        turns = toolbox.messages(compose(prompt) if isinstance(prompt, str) else prompt)
        ids = self._chat(turns, arguments | toolbox.arguments(), should_stop, tell)
        if not (opening := toolbox.opening()):
            return ids
        markup = self.model.thinking
        if markup is not None and channels_of(self.model, ids).channel is Channel.THINKING:
            if options.think:
                raise InvalidOption(
                    f"tool_choice is {options.tool_choice}, so that the reply begins with a call, and think asks for a"
                    " thought.",
                    "Leave think out, or leave the choice to the model.",
                )
            opening = f"{markup.closing}\n\n{opening}"  # The thought stays empty.
        return check_length(np.concatenate((ids, self.model.tokenize(opening, special=True))), self.context)

    def _chat(
        self, prompt: str | Sequence[Message], arguments: Mapping[str, object], should_stop: ShouldStop,
        tell: Callable[[str], None],
    ) -> Ids:  # fmt: skip
        """Return the ids (n,) of a prompt; `arguments` are given to the chat template."""
        messages = compose(prompt) if isinstance(prompt, str) else [message.whole() for message in prompt]
        turns = [message for message in messages if message.role != "system"] or messages
        if not any(turn.content.strip() or turn.tool_calls for turn in turns):
            raise InvalidOption("The prompt is empty.", "Write a question.")
        for message in messages:
            _check_text(message.content)
            _check_text(message.thinking)
        messages, most = [_without_markup(self.model, message) for message in messages], self.context - 1
        ids = self.model.chat_prompt(messages, arguments=arguments, most=most, should_stop=should_stop, tell=tell)
        return check_length(ids, self.context)

    def _continued(
        self, turns: Sequence[Message], options: ReplyOptions, should_stop: ShouldStop, tell: Callable[[str], None]
    ) -> Ids:
        """Return the ids (n,) of a conversation whose last turn goes on, behind its thought if the model opens one."""
        *before, last = turns
        ids, markup = self.ids(before, options, should_stop, tell), self.model.thinking
        if markup is not None and channels_of(self.model, ids).channel is Channel.THINKING:
            thought = self.model.tokenize(f"{markup.closing}\n\n", special=True)
            ids = np.concatenate((ids, self.model.tokenize(last.thinking, special=False), thought))
        return check_length(np.concatenate((ids, self.model.tokenize(last.content, special=False))), self.context)

    def constraint(self, ids: Ids, options: ReplyOptions, channels: ChannelSplitter) -> Constraint | None:
        """Return the constraint of a reply to `ids` (n,): behind its thought, if any; a required call follows at once.
        Raises InvalidOption where the schema cannot be used."""
        toolbox = self.toolbox(options) if options.tools else None
        called = None if toolbox is None else toolbox.schema
        schema = options.json_schema if called is None else called
        if schema is None:
            return None
        self.model.grammar(schema)
        after, markup = "", self.model.thinking
        if channels.thinks and markup is not None and not (called and toolbox and toolbox.opening()):
            if markup.channels:
                after = "<|channel|>final<|message|>"
            elif channels.channel is Channel.THINKING or options.think:
                after = markup.closing
        return Constraint(schema, len(ids), tuple(self.model.tokenize(after, special=True).tolist()) if after else ())

    def check(self, options: ReplyOptions) -> None:
        """Raise InvalidOption where the model cannot think as `options` say, or its chat template does not read one of
        their arguments."""
        self.model.template.check(options.template_args)
        if options.think and self.model.thinking is None:
            raise InvalidOption(
                f"think is {options.think}, and {self.model.name} is not known to think.",
                "Leave it out, or use a model whose chat template has thoughts.",
            )

    def fitting_options(self, options: ReplyOptions) -> tuple[ReplyOptions, list[str]]:
        """Return `options` with the model's nearest settings of thoughts, and the names of the options that it cannot
        follow."""
        model, given = self.model, options.template_args
        able = model.thinking is not None
        arguments, thinks, left_out = fitting(given, model.template, able) if given else ({}, None, [])
        think = thinks if thinks is False or (thinks and not options.think) else options.think
        if think and not able:
            think, left_out = None, [*left_out, "think"]
        return replace(options, template_args=arguments, think=think), left_out

    def calls(
        self, reply: Iterable[Token], options: ReplyOptions, cut: Callable[[], bool]
    ) -> Iterator[Token | ToolCall]:
        """Yield the tokens of a `reply` with `options`, and its tool calls, whose tokens have no text. `cut` returns,
        after the last token, whether the reply broke off."""
        from edgellm.llm.tools.toolbox import split_calls

        return split_calls(reply, self.toolbox(options), self.model.control_text, cut)

    def toolbox(self, options: ReplyOptions) -> Toolbox:
        """Return the tools of a reply with `options`, in the form of the model."""
        from edgellm.llm.tools.toolbox import Toolbox

        return Toolbox.of(self.model, options, grammars=self.grammars)
