"""A pair of models, and replies from it."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from edgellm.engine import Message, Model, ToolCall
from edgellm.engine.hardware import ON_PROCESSOR, Hardware
from edgellm.engine.native import ShouldStop, never
from edgellm.errors import InvalidOption
from edgellm.llm.abilities import longer_context
from edgellm.llm.cost_curves import ModelCurve
from edgellm.llm.drafter_pool import Drafters
from edgellm.llm.generation import Components, check_sampling, reporting, write
from edgellm.llm.idle_work import IdleWork
from edgellm.llm.messages import (
    channels_of,
    chat_ids,
    check_length,
    compose,
    draft_ids,
    leave_out_turns,
    plain_ids,
    room_for_reply,
    turn_heads,
    turns_of,
    without_turns,
)
from edgellm.llm.model_loading import (
    OpenedVerifier,
    PairFit,
    PairMemory,
    Progress,
    eagle3_beside,
    fit,
    fit_remote,
    load,
    local_verifier,
    measure_elsewhere,
    named,
    place_named,
    place_pair,
    positions,
    remote_verifier,
    try_ahead,
)
from edgellm.llm.ngram_runtime import NgramRuntime
from edgellm.llm.pair_stats import PairStats
from edgellm.llm.profiling import profile_pair
from edgellm.llm.tools import Toolbox, split_calls
from edgellm.spec.channels import ChannelSplitter
from edgellm.spec.draft_length import CostCurve
from edgellm.spec.gates.profile import Profile
from edgellm.spec.model_sampling import sampling_of
from edgellm.spec.params import BUDGET_CHUNK, ReplyOptions
from edgellm.spec.stream import Reply
from edgellm.spec.types import Channel, Constraint, Explanation, Ids, Notice, Token
from edgellm.spec.verifier import Verifier
from edgellm.storage import History, name_of
from edgellm.storage.caches.saved_prompts import SavedPrompts
from edgellm.storage.default_pair import DEFAULT, Named, resolve_pair

if TYPE_CHECKING:
    from edgellm.upstream.opening import UpstreamOptions

_AVOIDED = {
    "eagle3": "EAGLE-3 drafts",
    "mtp": "MTP drafts",
    "rollback": "rolled back texts",
    "rows": "several tokens of a text in one batch",
    "sequences": "several texts in one batch",
}
EXTRA_TOKENS = 7  # extra tokens per request that a verifier across a link writes without a draft model


class LLM:
    """A draft model and a verifier: opened once, good for many replies, also for several at a time.

    `context_length` is the number of tokens that prompt and reply can have together, `replies` how many there is surely
    memory for at once. `sampling` is what the model that decides the text wants where a reply's options say nothing.
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
        model_hash: Callable[[], str] | None = None,
        remote: OpenedVerifier | None = None,
        profile: Path | None = None,
        history: bool = True,
        fit: PairFit | None = None,
        closing: ExitStack | None = None,
        idle: IdleWork | None = None,
        placements: tuple[str, ...] = (),
        taken: Counter[str] | None = None,
        replies: int = 1,
        fewer: str = "",
        each: Counter[str] | None = None,
        opened: Callable[[], int] | None = None,
        prompts: SavedPrompts | None = None,
    ) -> None:
        """Build a pair from loaded parts; `open` is the usual way.

        `text` is the model whose tokenizer and chat template are used; `extra` as in `GenerationLimits`; `model_hash`
        returns the hash of a verifier's model that is in another process; `remote` describes how a verifier across a
        link was found; `profile` is a file; `history` as for `open`; `fit` compares the vocabularies, which are equal
        by default; `closing` owns the parts and is closed with the pair, and so is `idle`, which works in the
        background; `placements` say where each model is, and why; `taken` are the bytes of its models by device, with
        contexts for as many `replies` at once, and `fewer` says why they are fewer than were asked for; of these
        contexts `each` takes its bytes, and `opened` returns how many there are already; `prompts` are those that the
        models have read before.

        Raises:
            InvalidOption: both models are missing, or `n_ctx` is more than the draft model was trained for.
            ProfileUnusable: the profile is not of this pair.
        """
        self._remote, self._fit = remote, fit or PairFit()
        self.sampling = sampling_of(text.file) if remote is None else remote.sampling
        self._text = text
        self._replies: weakref.WeakSet[Reply] = weakref.WeakSet()
        self._closing = closing or ExitStack()
        self._closed = False
        lengths = [] if verifier is None else [min(length := verifier.capabilities.context_length, n_ctx or length)]
        self._idle = idle = idle or IdleWork()
        self._prompts = prompts or SavedPrompts(0)
        drafters = knowledge = None

        def curve(model: Model) -> ModelCurve:
            return ModelCurve(model, threads, idle.file_hash(model.path), idle, history=history)

        if draft is not None:
            draft_hash = idle.file_hash(draft.path)
            lengths.append(positions(draft, n_ctx))
            if verifier is not None:
                knowledge = PairStats(draft_hash, model_hash or idle.file_hash(text.path), profile, history=history)
            drafters = Drafters(
                draft, lengths[-1], threads, draft_hash.compute, curve(draft), shared=self._fit.shared_tokens,
                translation=self._fit.translation, prompt_cache=self._prompts.of(draft.path),
            )  # fmt: skip
            self._closing.callback(drafters.close)
        if not lengths:
            raise InvalidOption("Neither a draft model nor a verifier is given.", "Give at least one of the two.")
        self.context_length = min(lengths)
        linked = model_hash is not None
        retrieval = NgramRuntime(
            text, self.context_length, threads, None if linked else curve(text), self._prompts.of(text.path)
        )
        self._closing.callback(retrieval.close)
        self._closing.callback(idle.close)  # before the models that it uses
        self._retrieval = retrieval
        self._parts = Components(
            text,
            draft,
            drafters,
            verifier,
            knowledge,
            self.context_length,
            extra,
            threads,
            linked,
            retrieval,
            idle,
            placements,
        )
        self.replies, self._fewer = replies, fewer
        self._memory = PairMemory.of(self._models(), taken, self.context_length)
        self._each, self._opened = (
            each or Counter(),
            opened or (lambda: replies if drafters is None else drafters.opened()),
        )

    @classmethod
    def open(
        cls,
        draft: Named | None = DEFAULT,
        verifier: Named | None = DEFAULT,
        *,
        tokenizer: Named = DEFAULT,
        profile: Path | None = None,
        n_ctx: int | None = None,
        threads: int | None = None,
        hardware: Hardware = ON_PROCESSOR,
        draft_hardware: Hardware | None = None,
        progress: Progress | None = None,
        peers: Sequence[str] = (),
        history: bool = True,
        beside: Mapping[str, int] | None = None,
        upstream: UpstreamOptions | None = None,
        replies: int = 1,
        fewer_replies: bool = False,
        prompt_cache: int = 0,
    ) -> Self:
        """Load the models and compare their vocabularies.

        The default pair is SmolLM2 and its draft model where they are on this machine; nothing is downloaded. Else,
        and with EDGELLM_PAIR=home, it is the bundled home pair; `notices` says so.

        Where the tokenizers differ, drafts are translated, and all of them are verified; a verifier on another device
        sends its tokenizer once, which is kept. If one of the two models is the default and has another tokenizer than
        the one that is named, it is left out; `notices` says so. Stock servers need the draft model's tokenizer.

        A model is a path, an alias or `user/repo:quant`. The verifier may also be the `HOST:PORT[#MODEL]` of a served
        one, or "auto" for the best one of the paired devices (of `peers`, given as names, IDs or `HOST:PORT`, with
        `#MODEL` behind it where one of several models is wanted, if any);
        `verifier_reason` explains that choice. Or it is the URL of a stock server such as vLLM or llama-server, used as
        `upstream` says. None or "none" leaves one of the two out. In place of the draft model, an EAGLE-3 head drafts
        from the states of a verifier in this process. `tokenizer` names the model
        whose vocabulary and template are used if neither model is in this process. `profile` is a file from `edgellm
        profile`; by default the pair's own is found by the hashes of its models. `n_ctx` limits prompt and reply
        together, in tokens. `hardware` says how the verifier, or the only model, is loaded and computed;
        `draft_hardware` says it of the draft model, and is the same by default. Where neither says how many layers go
        on graphics cards, as many do as fit, those of the verifier first. `threads` holds for both. `progress` is
        called with a model's name and its loaded share. Without `history`, and while `edgellm history` is off, nothing
        derived from prompts is written to disk. `beside` are bytes by device that other models take though the system
        counts them as free. There is to be memory for as many `replies` at once; with `fewer_replies` as many as fit,
        which `replies` tells then, and `notices` why. What the models in this process have read is kept on disk when
        the pair is closed, in at most `prompt_cache` bytes for all models, so that a later process need not read the
        same beginning of a prompt again; but not without `history`.

        Raises:
            InvalidOption: both models are left out, `n_ctx` is more than a model was trained for, or there is no such
                device.
            ModelNotFound, ModelCorrupt, ModelUnsupported: from loading.
            ModelUnsupported: an EAGLE-3 head does not fit the verifier, which must be in this process.
            MemoryShort: the models and their contexts do not fit; raised before anything is loaded.
            VocabularyMismatch: a stock server has another tokenizer, or a verifier that does not send it; names the
                first token that differs.
            ProtocolError: a verifier sends a tokenizer that is not its own.
            VerifierUnreachable: nothing answers at the address.
            PairingRequired, NotPaired, NotPermitted, IdentityClash: the devices do not trust each other.
            ProfileUnusable: the profile is of other models or of another version.
        """
        asked_draft, asked_verifier = draft, verifier = named(draft), named(verifier)
        if draft is None and verifier is None:
            raise InvalidOption("Both the draft model and the verifier are 'none'.", "Give at least one of the two.")
        if n_ctx is not None and n_ctx < 1:
            raise InvalidOption(f"n_ctx is {n_ctx}.", "Give a whole number of at least 1.")
        if replies < 1:
            raise InvalidOption(f"replies is {replies}.", "Give a whole number of at least 1.")
        hardware, draft_hardware = (
            one if n_ctx is None else replace(one, n_ctx=n_ctx) for one in (hardware, draft_hardware or hardware)
        )
        draft, verifier, _ = resolved = resolve_pair(draft, verifier)
        prompts = SavedPrompts(prompt_cache if history else 0, lambda: History().on)
        before = Counter(beside or {})
        closing, idle = ExitStack(), IdleWork()
        closing.callback(idle.close)
        loaded = partial(load, progress=progress, closing=closing, idle=idle)
        try:
            eagle3 = eagle3_beside(verifier, draft)
            draft = None if eagle3 is not None else draft
            placed_pair = place_pair(
                draft, verifier, hardware, draft_hardware, before, threads, eagle3, replies, fewer=fewer_replies
            )  # fmt: skip
            big, placement, taken = placed_pair.verifier, placed_pair.draft, placed_pair.taken
            placed = None if placement is None else placement.placed
            alone = verifier is None
            ahead = None if placed is None else try_ahead(big, closing)
            small = loaded(placed, chat=big is None, speculates=alone) if placed is not None else None
            checker: Verifier | None = None
            opened: Callable[[], int] | None = None
            remote: OpenedVerifier | None = None
            pair = PairFit()
            if big is None:
                text = small
                if text is None:
                    tokenizer = resolve_pair(tokenizer, None).draft or tokenizer
                    text = loaded(place_named(tokenizer, hardware, taken, verifies=False), chat=True)
                if verifier is not None:
                    remote = remote_verifier(str(verifier), peers, text, closing, upstream, progress)
                    checker = remote.verifier
                    pair = fit_remote(small, text, remote, asked_draft, verifier)
                    text = remote.text or text
            else:
                text = loaded(big, chat=True, speculates=True, trial=ahead)
                if small is not None and asked_draft is not None and asked_verifier is not None:
                    pair = fit(small, text, asked_draft, asked_verifier)
                    text = small if pair.left_out == "verifier" else text
                if text is not small:
                    local = local_verifier(text, positions(text, n_ctx), threads, closing, prompts.of(text.path))
                    checker, opened = local, local.opened
            if pair.left_out == "draft":
                small = None
            pair = replace(pair, notice=pair.notice or resolved.notice)
            measure_elsewhere(placement if small is not None else None, threads, idle)
            return cls(
                text, draft=small, verifier=checker, n_ctx=n_ctx, threads=threads, profile=profile, history=history,
                remote=remote, extra=EXTRA_TOKENS if remote else 0, model_hash=remote.model_hash if remote else None,
                fit=pair, closing=closing, idle=idle,
                placements=(
                    *(one.reason for one in (placed, big) if one is not None), *((remote.finding,) if remote else ()),
                ),
                taken=taken - before, replies=placed_pair.replies, fewer=placed_pair.reason, each=placed_pair.each,
                opened=opened, prompts=prompts,
            )  # fmt: skip
        except BaseException:
            closing.close()
            raise

    def reply(
        self,
        prompt: str | Sequence[Message],
        options: ReplyOptions | None = None,
        *,
        should_stop: ShouldStop = never,
        **changes: Any,
    ) -> Reply:
        """Return a reply to a question, or to a conversation from `compose`. The prompt is tokenised at once, unless
        `should_stop` returns True; everything else is computed when the reply is iterated.

        `changes` override fields of `options`. Iterating raises ProfileUnusable if a budget needs a profile that cannot
        be used, and the errors of the verifier.

        Raises:
            InvalidOption: an invalid option, or an empty prompt.
            InputNotText: the prompt is not valid Unicode.
            PromptTooLong: the prompt does not fit the context; states both lengths.
            TextRefused: the model's tokenizer fails on the prompt, or takes too long.
            Stopped: `should_stop` returned True.
        """
        began = perf_counter()
        self._check_open()
        options = replace(options or ReplyOptions(), **changes)
        self.check_options(options)
        notices: list[Notice] = []
        told: list[str] = []
        if options.truncation == "auto" and not isinstance(prompt, str):
            ids, prompt, notices = self._truncated(prompt, options, should_stop, told.append)
        else:
            ids = self.prompt_ids(prompt, options, should_stop, told.append)
        own = self._draft_ids(ids, prompt, should_stop)
        heads: tuple[str, ...] = ()
        if self._parts.linked:  # the draft model may have to go on alone
            heads = turn_heads(self._text.detokenize(ids).decode("utf-8", "replace"), prompt)
        first: list[Notice | Explanation] = [*notices]
        first += [Explanation(None, one) for one in dict.fromkeys(told)]
        return self._reply(ids, options, channels_of(self._text, ids), began, own, first, heads)

    def _truncated(
        self, messages: Sequence[Message], options: ReplyOptions, should_stop: ShouldStop, tell: Callable[[str], None]
    ) -> tuple[Ids, Sequence[Message], list[Notice]]:
        """Return the ids (n,) of a conversation, and what is sent of it: without its oldest turns where it would leave
        the reply no room, of which there is a notice then. Raises what `reply` raises."""
        turns, end = turns_of(messages)
        most = self.context_length - room_for_reply(options.max_tokens, self.context_length)
        ids, begin = leave_out_turns(
            turns, end, lambda at: self.prompt_ids(without_turns(messages, at), options, should_stop, tell),
            lambda ids: len(ids) <= most,
        )  # fmt: skip
        if not (count := sum(at < begin for at in turns)):
            return ids, messages, []
        text = (
            f"The conversation is longer than the context of {self.context_length} tokens. Its"
            f" {'oldest turn is' if count == 1 else f'{count} oldest turns are'} no longer sent to the model."
        )
        return ids, without_turns(messages, begin), [Notice(text, count)]

    def complete(
        self,
        prompt: str | Sequence[int],
        options: ReplyOptions | None = None,
        *,
        should_stop: ShouldStop = never,
        **changes: Any,
    ) -> Reply:
        """Return a continuation of `prompt` without the chat template; otherwise like `reply`, including its errors.

        In a text, names of control tokens such as <|im_start|> are parsed as those tokens.
        """
        began = perf_counter()
        self._check_open()
        ids = plain_ids(self._text, prompt, self.context_length, should_stop)
        own = self._draft_ids(ids, None, should_stop)
        return self._reply(ids, replace(options or ReplyOptions(), **changes), ChannelSplitter(), began, own)

    def check_options(self, options: ReplyOptions) -> None:
        """Raise InvalidOption where the model cannot think as `options` say, or its chat template does not read one of
        their arguments."""
        self._text.check_template_arguments(options.template_args)
        if options.think and self._text.thinking is None:
            raise InvalidOption(
                f"think is {options.think}, and {self._text.name} is not known to think.",
                "Leave it out, or use a model whose chat template has thoughts.",
            )

    def fitting_options(self, options: ReplyOptions) -> tuple[ReplyOptions, list[str]]:
        """Return `options` with what the model has of the thoughts that they ask for, or what is nearest to it, and the
        names of those that it has not, or not so."""
        arguments, thinks, left_out = self._text.fitting_arguments(options.template_args)
        think = thinks if thinks is False or (thinks and not options.think) else options.think
        if think and self._text.thinking is None:
            think, left_out = None, [*left_out, "think"]
        return replace(options, template_args=arguments, think=think), left_out

    def _draft_ids(self, ids: Ids, prompt: str | Sequence[Message] | None, should_stop: ShouldStop) -> Ids | None:
        """Return the prompt for a draft model with another tokenizer, None without one; see `draft_ids`."""
        if self._fit.translation is None or self._parts.draft is None:
            return None
        text = self._text.detokenize(ids).decode("utf-8", "replace")
        return draft_ids(self._parts.draft, text, prompt, self.context_length, should_stop)

    def _reply(
        self, ids: Ids, options: ReplyOptions, channels: ChannelSplitter, began: float, draft_prompt: Ids | None,
        first: Sequence[Notice | Explanation] = (), heads: Sequence[str] = (),
    ) -> Reply:  # fmt: skip
        sampling = options.sampling(self.sampling, len(ids))
        sampling = replace(sampling, constraint=self._constraint(ids, options, channels))
        check_sampling(self._parts, sampling)
        if options.logprobs is not None:
            reporting(self._parts, options)  # raises now if they are not available
        reply = Reply(
            partial(write, self._parts, ids, options, sampling, channels, draft_prompt=draft_prompt, heads=heads),
            prompt_tokens=len(ids),
            seed=sampling.seed,
            prepared=perf_counter() - began,
            first=first,
        )
        self._replies.add(reply)
        return reply

    def _constraint(self, ids: Ids, options: ReplyOptions, channels: ChannelSplitter) -> Constraint | None:
        """Return the constraint of a reply to `ids` (n,): behind its thought, where there is one; a call that must come
        follows at once. Raises InvalidOption where the schema cannot be used."""
        toolbox = self._toolbox(options) if options.tools else None
        called = None if toolbox is None else toolbox.schema()
        schema = options.json_schema if called is None else called
        if schema is None:
            return None
        self._text.grammar(schema)
        after: list[int] = []
        opened = called is not None and toolbox is not None and toolbox.opening()
        if not opened and channels.thinks and (markup := self._text.thinking) is not None:
            if markup.channels:
                after = self._text.tokenize("<|channel|>final<|message|>", special=True).tolist()
            elif channels.channel is Channel.THINKING or options.think:
                after = self._text.tokenize(markup.closing, special=True).tolist()
        return Constraint(schema, len(ids), tuple(after))

    def remember(self, conversations: Sequence[tuple[str, str]]) -> None:
        """Add past questions and replies, the oldest first, to retrieve drafts from. They stay in this process. The
        pair's own replies are added anyway."""
        self._retrieval.remember(conversations)

    def forget_prompts(self) -> None:
        """Remove from the disk what models have read, and do not keep what these have read so far: the user took some
        of it back. What they hold once they have read another prompt is kept again."""
        self._prompts.forget()

    def curve(self) -> CostCurve:
        """Return the cost curve of the verifier (of the draft model without one): seconds of a decode by its number of
        rows. It is measured now, within seconds, unless it was before, and kept for later processes."""
        self._check_open()
        with self._idle.suspended():
            return self._retrieval.measure()

    def wait_until_measured(self) -> None:
        """Wait for what is measured and hashed in the background between replies."""
        self._idle.wait()

    def profile(
        self,
        prompts: Sequence[str | Sequence[Message]],
        *,
        gamma: int = BUDGET_CHUNK,
        max_tokens: int = 96,
        layers: tuple[int, ...] | None = None,
        context_lookup: bool = True,
        early_exit: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Profile:
        """Profile the pair on `prompts`, verifying every token, and use the profile from now on, without saving it.

        `layers` are those whose attention is importance. `context_lookup`: also find the confidence below which the
        context's token is the better draft. `early_exit`: also measure where it pays to leave the draft model
        early, which loads parts of it beside it. `progress` is called with the number of finished prompts and of all.
        If it is interrupted, a later call with the same prompts and arguments continues. `Profile.save` saves a
        profile; `keep_profile` saves it where later processes find it.

        Raises:
            InvalidOption: one of the two models is missing, they have different tokenizers, or there are too few
                prompts.
            PromptTooLong, InputNotText: from one of the prompts.
            ProfileUnusable: the verifier does not report its model's hash.
            VerifierLost: the verifier was lost meanwhile.
            ProfileStopped: it was interrupted from the keyboard.
        """
        self._check_open()
        if self._fit.translation is not None:
            raise InvalidOption(
                "The models have different tokenizers, so every draft is verified, and there is no budget to profile"
                " for.",
                "Choose two models with one tokenizer.",
            )
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        with self._idle.suspended():
            return profile_pair(
                self._parts, ids, gamma=gamma, most=max_tokens, layers=layers, context_lookup=context_lookup,
                early_exit=early_exit, progress=progress,
            )  # fmt: skip

    def hash_models(self, progress: Progress | None = None) -> None:
        """Compute the hashes of the models' files now, which a profile and a budget need; otherwise that is done in the
        background. `progress` is called with a file's name and the share of it that is read. Raise OSError if a file
        cannot be read."""
        for model in (self._parts.draft, None if self._parts.linked else self._text):
            if model is not None:
                on_progress = partial(progress, model.path.name) if progress else None
                self._idle.file_hash(model.path).compute(progress=on_progress)

    def keep_profile(self, profile: Profile) -> Path:
        """Save `profile` as this pair's, where later processes find it, and return the file.

        Raises:
            InvalidOption: one of the two models is missing.
            OSError: it cannot be written.
        """
        if self._parts.knowledge is None:
            raise InvalidOption("A profile needs both a draft model and a verifier, and one is missing.", "Open both.")
        return self._parts.knowledge.use(profile)

    def prompt_ids(
        self, prompt: str | Sequence[Message], options: ReplyOptions | None = None, should_stop: ShouldStop = never,
        tell: Callable[[str], None] = lambda _: None,
    ) -> Ids:  # fmt: skip
        """Return the token ids of the prompt, shape (n,), for a reply with `options`; `tell` is called with what the
        chat template wants changed. Raises what `reply` raises for a prompt."""
        options = options or ReplyOptions()
        arguments = options.template_arguments()
        used = not isinstance(prompt, str) and any(turn.tool_calls or turn.role == "tool" for turn in prompt)
        if not (options.tools or used):
            return chat_ids(self._text, prompt, self.context_length, should_stop, arguments, tell)
        toolbox = self._toolbox(options)
        turns = toolbox.messages(compose(prompt) if isinstance(prompt, str) else prompt)
        ids = chat_ids(self._text, turns, self.context_length, should_stop, arguments | toolbox.arguments(), tell)
        if not (opening := toolbox.opening()):
            return ids
        markup = self._text.thinking
        if markup is not None and channels_of(self._text, ids).channel is Channel.THINKING:
            if options.think:
                raise InvalidOption(
                    f"tool_choice is {options.tool_choice}, so that the reply begins with a call, and think asks for a"
                    " thought.",
                    "Leave think out, or leave the choice to the model.",
                )
            opening = f"{markup.closing}\n\n{opening}"  # behind an empty thought
        return check_length(np.concatenate((ids, self._text.tokenize(opening, special=True))), self.context_length)

    def calls(
        self, reply: Iterable[Token], options: ReplyOptions, cut: Callable[[], bool] = lambda: False
    ) -> Iterator[Token | ToolCall]:
        """Yield the tokens of a `reply` with `options`, and the calls of its tools, whose tokens have no text then.
        `cut` returns, after the last token, whether the reply broke off there."""
        return split_calls(reply, self._toolbox(options), self._text.control_text, cut)

    def _toolbox(self, options: ReplyOptions) -> Toolbox:
        verifier = self._parts.verifier
        return Toolbox.of(self._text, options, grammars=verifier is None or verifier.capabilities.grammars)

    def count_tokens(self, text: str, most: int | None = None) -> int:
        """Return how many tokens `text` has in the model's tokenizer. Raises PromptTooLong where these are more than
        `most`, and TextRefused."""
        return len(self._text.tokenize(text, most=most))

    def longer_context(self, tokens: int) -> str:
        """Return what to do for a prompt and its reply that take `tokens`, more than the context holds."""
        if self._parts.linked:
            return "Shorten it, or open the verifier with a longer context."
        return longer_context({model.name: (model.header, model.n_ctx_train) for model in self._models()}, tokens)

    def _models(self) -> list[Model]:
        """Return the models in this process."""
        return list({id(model): model for model in (self._parts.draft, self._text) if model is not None}.values())

    @property
    def name(self) -> str:
        """Return the name of the model that decides the text, the verifier or the draft model without one: as `edgellm
        ls` has it on the machine that computes it."""
        verifier = self._parts.verifier
        return name_of(self._text.path) if verifier is None or self._remote is None else verifier.capabilities.name

    @property
    def text_model(self) -> Model | None:
        """Return the model that decides the text, whose tokenizer and chat template are used; None where it is in
        another process."""
        return None if self._parts.linked else self._text

    @property
    def draft_name(self) -> str | None:
        return None if self._parts.draft is None else self._parts.draft.name

    @property
    def verifier_name(self) -> str | None:
        return None if self._parts.verifier is None else self._parts.verifier.capabilities.name

    @property
    def notices(self) -> tuple[str, ...]:
        """What to tell a user about the models, one sentence each: a default that was left out, different tokenizers,
        a stock server that sees the prompts, fewer replies at once than were asked for, and what was switched off
        because llama.cpp computes it wrongly."""
        translation = "" if self._fit.translation is None else f"{self._fit.translation.reason}."
        avoided = (
            f"llama.cpp computes {_AVOIDED[fault]} of {model.name} wrongly; that is avoided, which is slower."
            for model in self._models()
            for fault in sorted(model.faults & _AVOIDED.keys())
        )
        remote = () if self._remote is None else self._remote.notices
        return tuple(filter(None, (self._fit.notice, translation, *remote, self._fewer, *avoided)))

    @property
    def memory(self) -> PairMemory:
        """Return the bytes that the pair takes, with contexts for all `replies`."""
        left = max(0, self.replies - self._opened())
        return replace(self._memory, unopened=Counter({name: left * size for name, size in self._each.items()}))

    @property
    def verifier_reason(self) -> str:
        """Return why "auto" chose the verifier; "" if it was named."""
        return self._remote.reason if self._remote is not None else ""

    @property
    def verifier_at(self) -> str:
        """Return the verifier's address; "" if it is in this process."""
        return self._remote.address if self._remote is not None else ""

    @property
    def verifier_up(self) -> Callable[[], bool] | None:
        """Return a function that returns whether the verifier is reachable; None if it is in this process."""
        return self._remote.up if self._remote is not None else None

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, which need not be whole UTF-8 characters."""
        return self._text.piece(token)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidOption("This pair is closed.", "Open it again.")

    def close(self) -> None:
        """Cancel running replies, and free the memory."""
        self._closed = True
        for reply in list(self._replies):
            reply.close()
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


def generate(
    prompt: str,
    *,
    context: Sequence[str] = (),
    history: Sequence[Message] = (),
    system: str | None = None,
    draft: Named | None = DEFAULT,
    verifier: Named | None = DEFAULT,
    threads: int | None = None,
    **options: Any,
) -> Reply:
    """Return one reply, by default from the pair that `LLM.open` opens:
    `for token in generate("What is photosynthesis?")`.

    `options` are fields of `ReplyOptions`. The models are loaded for this reply and closed after it: open an `LLM` for
    several. Raises what `LLM.open` and `LLM.reply` raise.
    """
    chosen = ReplyOptions(**options)
    pair = LLM.open(draft, verifier, threads=threads)
    try:
        reply = pair.reply(compose(prompt, context=context, history=history, system=system), chosen)
    except BaseException:
        pair.close()
        raise
    reply.add_done_callback(pair.close)
    return reply
