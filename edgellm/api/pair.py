"""A pair of models, and replies from it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from time import perf_counter
from types import TracebackType
from typing import Any, Self

from edgellm.api.compose import compose
from edgellm.api.loading import (
    DRAFT,
    VERIFIER,
    Named,
    Progress,
    check_vocabularies,
    is_address,
    load,
    local_verifier,
    named,
    positions,
    remote_verifier,
)
from edgellm.engine import Context, Message, Model
from edgellm.errors import InputNotText, InvalidOption, PromptTooLong
from edgellm.spec.drafter import ModelDrafter
from edgellm.spec.loop import Event, Limits
from edgellm.spec.loop import generate as write_reply
from edgellm.spec.options import ReplyOptions
from edgellm.spec.pool import ContextPool
from edgellm.spec.protocols import Verifier
from edgellm.spec.records import Ids, Sampling
from edgellm.spec.reply import Reply
from edgellm.spec.stats import Stats

_AT_ONCE = 7  # tokens beyond the next one that a verifier across a link writes per request, where nobody drafts


class Pair:
    """A draft model and a verifier: opened once, good for many replies, also for several at a time.

    `context_length` is the number of tokens that prompt and reply can have together.
    """

    def __init__(
        self,
        text: Model,
        *,
        draft: Model | None,
        verifier: Verifier | None,
        n_ctx: int | None = None,
        threads: int | None = None,
        extra: int = 0,
        closing: ExitStack | None = None,
    ) -> None:
        """Of parts that are already there; `open` is the usual way.

        `text` is the model whose tokenizer and chat template are used; `extra` as in `Limits`; `closing` is closed
        with the pair, and closes what the pair shall own.

        Raises:
            InvalidOption: both left out, or `n_ctx` is more than the draft model was trained for.
        """
        self._text = text
        self._draft = draft
        self._verifier = verifier
        self._extra = extra
        self._replies: weakref.WeakSet[Reply] = weakref.WeakSet()
        self._closing = closing or ExitStack()
        self._closed = False
        self._contexts: ContextPool | None = None
        lengths = [] if verifier is None else [min(verifier.context_length, n_ctx or verifier.context_length)]
        if draft is not None:
            lengths.append(positions(draft, n_ctx))
            self._contexts = ContextPool(partial(Context, draft, n_ctx=lengths[-1], threads=threads))
            self._closing.callback(self._contexts.close)
        if not lengths:
            raise InvalidOption("Neither a draft model nor a verifier is given.", "Give at least one of the two.")
        self.context_length = min(lengths)

    @classmethod
    def open(
        cls,
        draft: Named | None = DRAFT,
        verifier: Named | None = VERIFIER,
        *,
        tokenizer: Named = DRAFT,
        n_ctx: int | None = None,
        threads: int | None = None,
        gpu_layers: int = 0,
        progress: Progress | None = None,
    ) -> Self:
        """Loads the models and compares their vocabularies.

        A model is a path, an alias or `user/repo:quant`; the verifier may also be the `HOST:PORT` of one that is being
        served; None or "none" leaves one of the two out. `tokenizer` names the model whose vocabulary and template are
        used where neither model is in this process. `n_ctx` limits prompt and reply together, in tokens. `progress`
        is called with a model's name and the share of it that is loaded.

        Raises:
            InvalidOption: both left out, or `n_ctx` is more than a model was trained for.
            ModelNotFound, ModelCorrupt, ModelUnsupported: from loading.
            VocabularyMismatch: the two do not share one vocabulary; names the first token that differs.
            VerifierUnreachable: nobody answers at the address.
        """
        draft, verifier = named(draft), named(verifier)
        if draft is None and verifier is None:
            raise InvalidOption("Both the draft model and the verifier are 'none'.", "Give at least one of the two.")
        if n_ctx is not None and n_ctx < 1:
            raise InvalidOption(f"n_ctx is {n_ctx}.", "Give a whole number of at least 1.")
        closing = ExitStack()
        loaded = partial(load, gpu_layers=gpu_layers, progress=progress, closing=closing)
        try:
            small = loaded(draft) if draft is not None else None
            checker: Verifier | None = None
            extra = 0
            if verifier is None or is_address(verifier):
                text = small if small is not None else loaded(tokenizer)
                if verifier is not None:
                    checker, extra = remote_verifier(str(verifier), text, closing), _AT_ONCE
            else:
                text = loaded(verifier)
                if small is not None:
                    check_vocabularies(small, text)
                checker = local_verifier(text, positions(text, n_ctx), threads, closing)
            return cls(text, draft=small, verifier=checker, n_ctx=n_ctx, threads=threads, extra=extra, closing=closing)
        except BaseException:
            closing.close()
            raise

    def reply(self, prompt: str | Sequence[Message], options: ReplyOptions | None = None, **changes: Any) -> Reply:
        """A reply to a question, or to a conversation as `compose` makes it. Nothing is computed before it is iterated.

        `changes` are fields of `ReplyOptions` that differ from `options`.

        Raises:
            InvalidOption: an option that cannot be meant, or an empty prompt.
            InputNotText: the prompt cannot be written as UTF-8.
            PromptTooLong: the prompt leaves no room in the context; says both lengths.
        """
        began = perf_counter()
        if self._closed:
            raise InvalidOption("This pair is closed.", "Open it again.")
        options = replace(options or ReplyOptions(), **changes)
        ids = self.prompt_ids(prompt)
        sampling = options.sampling()
        reply = Reply(
            partial(self._write, ids, options, sampling),
            prompt_tokens=len(ids),
            seed=sampling.seed,
            prepared=perf_counter() - began,
        )
        self._replies.add(reply)
        return reply

    def prompt_ids(self, prompt: str | Sequence[Message]) -> Ids:
        """The prompt as the models see it, shape (n,). Raises what `reply` raises for a prompt."""
        messages = compose(prompt) if isinstance(prompt, str) else list(prompt)
        if not messages or not messages[-1].content.strip():
            raise InvalidOption("The prompt is empty.", "Write a question.")
        try:
            for message in messages:
                message.content.encode()
        except UnicodeEncodeError:
            raise InputNotText("The prompt holds bytes that are not UTF-8.", "Convert it to UTF-8 first.") from None
        ids = self._text.chat_prompt(messages)
        if len(ids) >= self.context_length:
            raise PromptTooLong(
                f"The prompt has {len(ids)} tokens, and the context holds {self.context_length} with the reply.",
                "Shorten the prompt, its context files or the history.",
            )
        return ids

    def _write(
        self, prompt: Ids, options: ReplyOptions, sampling: Sampling, stats: Stats, explain: bool,
        stopped: Callable[[], bool],
    ) -> Generator[Event, None, None]:  # fmt: skip
        context = self._contexts.take() if self._contexts is not None else None
        try:
            yield from write_reply(
                prompt,
                alphabet=self._text,
                drafter=ModelDrafter(self._draft, context) if self._draft is not None and context is not None else None,
                gate=options.make_gate(sampling.seed),
                verifier=self._verifier,
                sampling=sampling,
                limits=Limits(options.max_tokens, self.context_length, options.gamma, self._extra),
                stats=stats,
                explain=explain,
                stopped=stopped,
            )
        finally:
            if self._contexts is not None and context is not None:
                self._contexts.give(context)

    def close(self) -> None:
        """Stops the replies that are under way and gives memory back."""
        self._closed = True
        for reply in list(self._replies):
            reply.close()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def generate(
    prompt: str,
    *,
    context: Sequence[str] = (),
    history: Sequence[Message] = (),
    system: str | None = None,
    draft: Named | None = DRAFT,
    verifier: Named | None = VERIFIER,
    threads: int | None = None,
    **options: Any,
) -> Reply:
    """One reply in one call, with the bundled pair unless told otherwise: `for token in generate("Where is my mug?")`.

    `options` are fields of `ReplyOptions`. The models are loaded for this reply and closed behind it: open a `Pair`
    for several. Raises what `Pair.open` and `Pair.reply` raise.
    """
    chosen = ReplyOptions(**options)
    pair = Pair.open(draft, verifier, threads=threads)
    try:
        reply = pair.reply(compose(prompt, context=context, history=history, system=system), chosen)
    except BaseException:
        pair.close()
        raise
    reply.when_over(pair.close)
    return reply
