"""A pair of models, and replies from it."""

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Self

from edgellm.engine import Message, Model
from edgellm.engine.memory_fit import free_memory
from edgellm.engine.native import ShouldStop, never
from edgellm.engine.trial.probe import EAGLE3, MTP
from edgellm.errors import InvalidOption, ProfileUnusable
from edgellm.llm.engine import PairEngine
from edgellm.llm.messages import PromptWriter, channels_of, compose, draft_ids, plain_ids, turn_openings
from edgellm.llm.model_loading import EngineConfig, PairMemory, Progress
from edgellm.llm.pair_stats import find_profile
from edgellm.llm.reply import WantedReply, check_reply, write
from edgellm.spec.drafting.cost_curve import CostCurve
from edgellm.spec.gates.profile import Profile
from edgellm.spec.params import ReplyOptions, mechanism
from edgellm.spec.protocols import Verifier
from edgellm.spec.stream import ChannelSplitter, Reply
from edgellm.spec.types import Explanation, Ids, Notice
from edgellm.storage.model_files import DEFAULT, Named, name_of

_STEP = 1024  # tokens; proposed contexts are multiples of this
_SPECULATORS = {EAGLE3: "EAGLE-3 head", MTP: "MTP layer"}


class LLM:
    """A draft model and a verifier: opened once, for many replies, also several at a time.

    `context_length` is the number of tokens that prompt and reply can have together, `replies` how many replies at once
    surely fit in memory, and `sampling` that of the model that decides the text, for options that a reply leaves open.
    `name` is that model's, as in `edgellm ls` on its machine. Of a verifier in other processes, `verifier_at` is the
    address, `verifier_up` returns whether it is reachable, and `verifier_reason` is why "auto" chose it.
    """

    def __init__(
        self, engine: PairEngine | Model, draft: Model | None = None,
        verifier: Verifier | None = None, **settings: Any,
    ) -> None:  # fmt: skip
        """Take over an engine, which is closed with the pair; `open` is the usual way. Loaded models and a verifier of
        your own stay open: the tokenizer and chat template of the first model are used, and `settings` are as for
        `open`."""
        if not isinstance(engine, PairEngine):
            text, engine = engine, PairEngine(EngineConfig(**settings))
            with engine.closed_on_error():
                engine.attach(text, draft, verifier)
        self.engine, self._text_model = engine, engine.text_model
        self.context_length, self.replies, self.sampling = engine.context, engine.placement.replies, engine.sampling
        far, draft, verifies = engine.elsewhere, engine.draft, engine.verifier
        self.draft_name = None if draft is None else draft.name
        self.verifier_name = None if verifies is None else verifies.capabilities.name
        self.verifier_at = "" if far is None else far.address
        self.verifier_up = None if far is None else far.up
        self.verifier_reason = "" if far is None else far.reason
        here = engine.text_model.file.known_as or name_of(engine.text_model.path)
        self.name = self.verifier_name if self.verifier_name and self.verifier_at else here
        grammars = verifies is None or verifies.capabilities.grammars
        self.prompt_writer = PromptWriter(engine.text_model, engine.context, grammars)
        self._replies: weakref.WeakSet[Reply] = weakref.WeakSet()
        self._closed = False

    @classmethod
    def open(
        cls, draft: Named | None = DEFAULT, verifier: Named | None = DEFAULT, *, progress: Progress | None = None,
        **settings: Any,
    ) -> Self:  # fmt: skip
        """Load the models and compare their vocabularies.

        `settings` are further fields of `EngineConfig`; `notices` tells where a default was left out or replaced.
        `progress` is called with a model's name and its loaded share.
        """
        return cls(PairEngine.open(EngineConfig(draft, verifier, **settings), progress))

    def reply(
        self, prompt: str | Sequence[Message], options: ReplyOptions | None = None, *,
        should_stop: ShouldStop = never, **changes: Any,
    ) -> Reply:  # fmt: skip
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
        self.prompt_writer.check(options)
        preface: list[Notice | Explanation] = []
        told: list[str] = []
        if options.truncation == "auto" and not isinstance(prompt, str):
            ids, prompt, preface = self.prompt_writer.fitting_ids(prompt, options, should_stop, told.append)
        else:
            ids = self.prompt_writer.ids(prompt, options, should_stop, told.append)
        preface += [Explanation(None, one) for one in dict.fromkeys(told)]
        openings: tuple[str, ...] = ()
        if self.engine.linked:  # The draft model may have to go on alone.
            openings = turn_openings(self._text_model.detokenize(ids).decode("utf-8", "replace"), prompt)
        wanted = self._wanted(ids, options, channels_of(self._text_model, ids), prompt, should_stop)
        return self._reply(replace(wanted, turn_openings=openings), began, preface)

    def complete(
        self, prompt: str | Sequence[int], options: ReplyOptions | None = None, *,
        should_stop: ShouldStop = never, **changes: Any,
    ) -> Reply:  # fmt: skip
        """Return a continuation of `prompt` without the chat template; otherwise like `reply`, including its errors.

        In a text, names of control tokens such as <|im_start|> are parsed as those tokens.
        """
        began = perf_counter()
        self._check_open()
        ids = plain_ids(self._text_model, prompt, self.context_length, should_stop)
        options = replace(options or ReplyOptions(), **changes)
        return self._reply(self._wanted(ids, options, ChannelSplitter(), None, should_stop), began)

    def _wanted(
        self, ids: Ids, options: ReplyOptions, channels: ChannelSplitter, prompt: str | Sequence[Message] | None,
        should_stop: ShouldStop,
    ) -> WantedReply:  # fmt: skip
        """Return the reply to `ids` (n,), with the prompt for a draft model with another tokenizer; raise InvalidOption
        where the verifier cannot write it."""
        draft, draft_prompt = self.engine.draft, None
        if self.engine.fit.translation is not None and draft is not None:
            text = self._text_model.detokenize(ids).decode("utf-8", "replace")
            draft_prompt = draft_ids(draft, text, prompt, self.context_length, should_stop)
        sampling = options.sampling(self.sampling, len(ids))
        sampling = replace(sampling, constraint=self.prompt_writer.constraint(ids, options, channels))
        if self.engine.verifier is not None:
            sampling = self.engine.verifier.capabilities.choice.nearest(sampling)
        check_reply(self.engine, options, sampling)
        return WantedReply(ids, options, sampling, channels, draft_prompt)

    def _reply(self, wanted: WantedReply, began: float, preface: Sequence[Notice | Explanation] = ()) -> Reply:
        reply = Reply(
            partial(write, self.engine, wanted), prompt_tokens=len(wanted.prompt), seed=wanted.sampling.seed,
            prepared=perf_counter() - began, preface=preface,
        )  # fmt: skip
        self._replies.add(reply)
        return reply

    def remember(self, conversations: Sequence[tuple[str, str]]) -> None:
        """Add past questions and replies, the oldest first, to retrieve drafts from. They stay in this process. The
        pair's own replies are added anyway."""
        self.engine.drafting.remember(conversations)

    def forget_prompts(self) -> None:
        """Delete saved prompts, and do not save what models have read so far: the user took some of it back. Prompts
        read later are saved as usual."""
        self.engine.saved_prompts.forget()

    def curve(self) -> CostCurve:
        """Return the cost curve of the verifier, else of the draft model: seconds of a decode by its number of rows.
        The first call measures it within seconds, also for later processes."""
        self._check_open()
        with self.engine.idle.suspended():
            return self.engine.drafting.measure()

    def wait_until_measured(self) -> None:
        """Wait for the measuring and hashing in the background."""
        self.engine.idle.wait()

    def profile(
        self, prompts: Sequence[str | Sequence[Message]], *, progress: Callable[[int, int], None] | None = None,
        **options: Any,
    ) -> Profile:  # fmt: skip
        """Profile the pair on `prompts`, verifying every token, and use the profile from now on, without saving it.

        `options` are fields of `profiling.ProfileOptions`. `progress` is called with the number of finished prompts and
        of all. After an interruption, a later call with the same prompts and options continues. `Profile.save` saves a
        profile; `keep_profile` saves it where later processes find it.
        Raises InvalidOption: a model is missing, they have different tokenizers, or there are too few prompts;
        PromptTooLong, InputNotText: from a prompt; ProfileUnusable: the verifier does not report its model's hash;
        VerifierLost: the verifier was lost; ProfileStopped: it was interrupted from the keyboard.
        """
        self._check_open()
        if self.engine.fit.translation is not None:
            raise InvalidOption(
                "The models have different tokenizers, so every draft is verified, and there is no budget to profile"
                " for.",
                "Choose two models with one tokenizer.",
            )
        ids, fitting = [self.prompt_writer.ids(prompt) for prompt in prompts], mechanism("fitting")
        with self.engine.idle.suspended():
            found: Profile = fitting.profile_pair(
                self.engine, ids, fitting.ProfileOptions(**options), progress or (lambda _done, _total: None)
            )
        return found

    def hash_models(self, progress: Progress | None = None) -> None:
        """Compute the hashes of the models' files now, which a profile and a budget need, not in the background.
        `progress` is called with a file's name and its read share. Raise OSError if a file cannot be read."""
        for model in (self.engine.draft, None if self.engine.linked else self._text_model):
            if model is not None:
                on_progress = partial(progress, model.name) if progress else None
                self.engine.idle.file_hash(model.path).compute(progress=on_progress)

    def keep_profile(self, profile: Profile) -> Path:
        """Save `profile` as this pair's, where later processes find it, and return the file. Raises InvalidOption: one
        of the two models is missing, or the pair has a profile of more chunks; OSError: it cannot be written."""
        if self.engine.knowledge is None:
            raise InvalidOption("A profile needs both a draft model and a verifier, and one is missing.", "Open both.")
        with suppress(ProfileUnusable):
            known = find_profile(*self.engine.knowledge.hashes())
            if known is not None and known.terms.chunks > profile.terms.chunks:
                raise InvalidOption(
                    f"The pair has a profile of {known.terms.chunks} chunks, which is not replaced by this one of"
                    f" {profile.terms.chunks}.",
                    "Give more prompts, or keep it apart in a file: --output FILE (Profile.save).",
                )
        return self.engine.knowledge.use(profile)

    def count_tokens(self, text: str, most: int | None = None) -> int:
        """Return how many tokens `text` has. Raises PromptTooLong if these are more than `most`, and TextRefused."""
        return len(self._text_model.tokenize(text, most=most))

    def longer_context(self, tokens: int) -> str:
        """Return advice for a prompt and its reply of `tokens`, more than the context holds."""
        if self.engine.linked:
            return "Shorten it, or open the verifier with a longer context."
        models = self.engine.models
        least = min(models, key=lambda model: model.n_ctx_train)
        if tokens > least.n_ctx_train:
            return f"Shorten it: {least.name} was trained for {least.n_ctx_train} tokens."
        n_ctx = min(least.n_ctx_train, (tokens // _STEP + 1) * _STEP)
        size, free = n_ctx * sum(model.header.cache_bytes_per_token for model in models), free_memory()
        room = f"{free / 1e9:.1f} GB"
        if size > free:
            much = f"{size / 1e9:.1f} GB"
            return f"Shorten it: the keys and values of {n_ctx} tokens take up to {much}, and {room} are free."
        return f"Give --ctx-size {n_ctx}: its keys and values take up to {size / 1e6:.0f} MB of {room} free."

    @property
    def text_model(self) -> Model | None:
        """Return the model that decides the text, whose tokenizer and chat template are used, if in this process."""
        return None if self.engine.linked else self._text_model

    @property
    def notices(self) -> tuple[str, ...]:
        """Return notices for the user about the models, a sentence each: a default that was left out, different
        tokenizers, a stock server that sees the prompts, fewer replies at once than requested, and speculators that
        are not used because they end the process."""
        translation = "" if self.engine.fit.translation is None else f"{self.engine.fit.translation.reason}."
        unused = (
            f"llama.cpp ends the process over the {_SPECULATORS[kind]} of {model.name}, which is not used."
            for model in self.engine.models
            for kind in sorted(model.faults & _SPECULATORS.keys())
        )
        far = () if self.engine.elsewhere is None else self.engine.elsewhere.notices
        draft, text, bigger = self.engine.draft, self.engine.text_model, ""
        if draft is not None and self.engine.elsewhere is None and draft.n_params > text.n_params:
            bigger = (
                f"The draft model {draft.name} is bigger than {text.name}, which writes the text: it saves no time."
            )
        known = (self.engine.fit.notice, translation, bigger, *far, self.engine.placement.reason, *unused)
        return tuple(filter(None, known))

    @property
    def memory(self) -> PairMemory:
        """Return the bytes that the pair takes, with contexts for all `replies`."""
        return self.engine.memory

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, which need not be whole UTF-8 characters."""
        return self._text_model.piece(token)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidOption("This pair is closed.", "Open it again.")

    def close(self) -> None:
        """Cancel running replies, and free the memory."""
        self._closed = True
        for reply in list(self._replies):
            reply.close()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


def generate(
    prompt: str, *, context: Sequence[str] = (), history: Sequence[Message] = (), system: str | None = None,
    draft: Named | None = DEFAULT, verifier: Named | None = DEFAULT, threads: int | None = None, **options: Any,
) -> Reply:  # fmt: skip
    """Return one reply, by default from the pair that `LLM.open` opens:
    `for token in generate("What is photosynthesis?")`.

    `options` are fields of `ReplyOptions`. The models are loaded for this reply and closed after it: open an `LLM` for
    several.
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
