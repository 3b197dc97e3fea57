"""A model in memory: its text side (vocabulary, tokens, chat template) and its file's description of it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, cast

import numpy as np

from edgellm.engine import llama_api, native
from edgellm.engine.chat.effort import fitting
from edgellm.engine.chat.messages import Message
from edgellm.engine.chat.prompt import ChatTemplate, Tokenizer
from edgellm.engine.chat.template import Template
from edgellm.engine.chat.thinking import ThinkingMarkup, find_markup
from edgellm.engine.gguf.reader import GgufArray, ModelFile, attention_layers
from edgellm.engine.gguf.tokens import tokenizer_hash
from edgellm.engine.grammar import Grammar
from edgellm.engine.hardware import ON_PROCESSOR, Hardware, offload_devices, placement
from edgellm.engine.native import ShouldStop, lib, never
from edgellm.engine.speculators.eagle3 import Eagle3Model, check_eagle3
from edgellm.engine.speculators.mtp import MtpModel
from edgellm.engine.speculators.speculator import SpeculatorModel
from edgellm.engine.speculators.support import drafter_file, mtp_support
from edgellm.engine.tokenizing.tokenizer import VocabTokenizer, attributes
from edgellm.engine.trial.probe import (
    EAGLE3,
    MTP,
    Probe,
    TrialChild,
    require_loadable,
)
from edgellm.engine.vocabulary import Ids, Vocabulary
from edgellm.errors import EngineFailed, InvalidOption, ModelUnsupported

# the bits of llama.cpp's token attributes for a token's kind; the others tell how its text is stripped
_KINDS = 0x3F
_ROLE = re.compile(rb"user|assistant|system|tool|model")  # templates put names such as <|user|> together
_LONGEST_PIECE = 256  # longer ones take a second call
_HIDDEN = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_piece = native.bind_nonblocking(
    lib.llama_token_to_piece,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_int32,
    ctypes.c_bool,
)


class Model:
    """A loaded GGUF. Several contexts may share it; its memory is freed once it and all of them are closed.

    `size_bytes` is the length of its file or files, `n_ctx_train` the positions that it was trained for, `is_f32`
    whether every weight is float32.
    """

    def __init__(
        self,
        file: ModelFile,
        owned: native.Owned,
        template: Template | None,
        hardware: Hardware,
        faults: Sequence[str] = (),
        *,
        speculator: SpeculatorModel | None = None,
    ) -> None:
        """Set up a model that `load` has loaded; not for other callers."""
        self.hardware = hardware
        self.faults = frozenset(faults)
        """Which trials of `engine.trial.self_test` fail: what llama.cpp computes wrongly is avoided."""
        self._speculator = speculator
        self.file, self.path, self.header = file, file.path, file.header
        self.text_only = self.few_outputs = False
        self._owned: native.Owned | None = owned
        pointer = owned.pointer
        self._vocab = lib.llama_model_get_vocab(pointer)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self._vocab)
        self.has_vocabulary = bool(lib.llama_vocab_type(self._vocab) != lib.LLAMA_VOCAB_TYPE_NONE)
        """Whether the file carries a tokenizer; a shard of later layers does not."""
        self.n_layer: int = lib.llama_model_n_layer(pointer)
        self.window = max(0, int(lib.llama_model_n_swa(pointer)))
        """Positions of the sliding window that some layers attend to; 0 without one."""
        self.n_embd: int = lib.llama_model_n_embd(pointer)
        several = lib.llama_model_rope_type(pointer) in (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)
        self.position_planes = 4 if several else 1
        """Positions of a row: several in models of images and text."""
        self.n_ctx_train: int = lib.llama_model_n_ctx_train(pointer)
        self.n_params = sum(t.n_elements for t in self.header.tensors)
        self.size_bytes = self.header.file_size
        self.is_f32 = all(t.kind == lib.GGML_TYPE_F32 for t in self.header.tensors)
        self.architecture = self.header.architecture
        layers = hardware.gpu_layers or 0
        self.offloaded = layers != 0 and bool(offload_devices(hardware.devices))
        """Whether some layers are on a graphics card."""
        self.head_offloaded = self.offloaded and not 0 < layers <= self.n_layer
        self.placement = placement(hardware)
        """Where the model computes, as part of the name of what is measured there; "" for the processor."""
        self.attention_layers = attention_layers(self.header)
        """Layers with attention, from 0."""
        self._head_is_plain: bool | None = None
        self.metadata = _metadata(file)
        self.name = file.name
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        self._ends: dict[int, bool] = {}  # of the tokens asked for: whether they end a reply
        self._tokenizer = VocabTokenizer(
            self._vocab, self.path, self.name, self.metadata.get("tokenizer.ggml.model", ""),
            self.metadata.get("tokenizer.ggml.pre", "default"), lambda: self.vocabulary.pieces,
        )  # fmt: skip
        self._template = template

    @property
    def speculator(self) -> SpeculatorModel | None:
        """What is loaded to draft from the model's states, its MTP layer or an EAGLE-3 head; None without either."""
        return self._speculator

    @property
    def head_is_plain(self) -> bool | None:
        """Whether a single product turns the last norm's output into logits; None: not known yet."""
        return self._head_is_plain

    def record_head_is_plain(self, plain: bool) -> None:
        """Remember whether the head is plain, as the first late decode has found out."""
        self._head_is_plain = plain

    @classmethod
    def load(
        cls,
        source: Path | ModelFile,
        *,
        hardware: Hardware = ON_PROCESSOR,
        progress: Callable[[float], None] | None = None,
        text_only: bool = False,
        probe: bool = True,
        chat: bool = False,
        dry: bool = False,
        few_outputs: bool = False,
        speculates: bool = False,
        eagle3: ModelFile | None = None,
        embeds: bool = False,
        faults: Sequence[str] = (),
        trial: TrialChild | None = None,
    ) -> Model:
        """Load a model, whose header is checked first if only its path is given; of a split one, its first part's.

        `hardware` also tells contexts over the model what they use by default. `progress` is called with shares from 0
        to 1; an exception that it raises stops the loading. With `text_only` no
        weights are loaded: the model tokenises, but no context can be opened over it. A model whose header is new on
        this machine is loaded in a child process first, unless `probe` is False: see `engine.trial.probe`. With `chat`
        the process that renders its chat template starts meanwhile, so that the first `chat_prompt` need not wait. With
        `dry` nothing is allocated, neither here nor by contexts: llama.cpp only logs what it would take; with
        `few_outputs` for as many rows of logits as are asked for, and not for all rows of a batch.

        With `speculates` what drafts from the model's states is loaded, too: the EAGLE-3 head `eagle3`, if it is given,
        or else the layer that predicts further tokens (MTP), if it can be used; see `engine.speculators`. `embeds`: the
        trial embeds a text instead. `faults`: the trials that are known to fail, where `probe` is False.

        `trial` is a child process that tries the model already, from `start_trial`.

        Raises:
            ModelNotFound, ModelCorrupt, ModelUnsupported: as for `ModelFile.open`.
            ModelUnsupported: llama.cpp cannot use it, ends the process over it, it does not generate text, it only
                drafts for another model, or the EAGLE-3 head does not fit it.
            EngineFailed: the child process cannot be started, or was ended from outside.
        """
        native.start()
        file = source if isinstance(source, ModelFile) else ModelFile.open(source)
        if kind := drafter_file(file.header):
            raise ModelUnsupported(
                f"{file.path.name} is {kind}: it drafts from another model's states, and writes no text by itself.",
                "Name it as the draft model, with the verifier that it was made for, in one process and on no mesh."
                if file.header.architecture == EAGLE3
                else "Name a whole model; MTP layers inside a model's own file are used. edgellm show tells.",
            )
        if eagle3 is not None:
            check_eagle3(eagle3, file)
        asked = probe_of(file, hardware, text_only=text_only, eagle3=eagle3, embeds=embeds)
        mtp = asked.mtp
        verdict = require_loadable(asked, _first_half(progress), trial) if probe else None
        if verdict is not None and verdict.new:
            progress = _second_half(progress)
        template = _template(file)
        try:
            if chat and template is not None:
                template.start()
            faults = verdict.faults if verdict is not None else faults
            mtp = speculates and mtp and MTP not in faults
            owned = llama_api.load_model(file.path, hardware, text_only=text_only, progress=progress, dry=dry, mtp=mtp)
            if lib.llama_model_has_encoder(owned.pointer) or not lib.llama_model_has_decoder(owned.pointer):
                raise ModelUnsupported(f"{file.path} is an encoder.", "Use a model that generates text.")
            speculator: SpeculatorModel | None = MtpModel(owned, file.header.architecture) if mtp else None
            if speculates and eagle3 is not None and EAGLE3 not in faults:
                speculator = Eagle3Model.load(eagle3, file, hardware, dry=dry)
            model = cls(file, owned, template, hardware, faults, speculator=speculator)
        except BaseException:
            if template is not None:
                template.close()
            raise
        model.text_only, model.few_outputs = text_only, dry and few_outputs
        return model

    @property
    def vocab_pointer(self) -> Any:
        """The native vocabulary, for llama.cpp's own functions."""
        self._check_vocabulary()
        return self._vocab

    @property
    def owned(self) -> native.Owned:
        """The native model, for contexts to hold."""
        self._check_open()
        if self.text_only:
            raise InvalidOption(
                f"Only the vocabulary of {self.name} is loaded.", "Load the whole model to compute with it."
            )
        return cast(native.Owned, self._owned)

    def _check_open(self) -> None:
        if self._owned is None:
            raise EngineFailed(f"The model {self.name} is closed.", "Load the model again.")
        native.process_exit.block_if_exiting()

    def _check_vocabulary(self) -> None:
        """Raise without a vocabulary, as llama.cpp would end the process when asked for a token's text or kind."""
        self._check_open()
        if not self.has_vocabulary:
            raise ModelUnsupported(f"{self.name} contains no tokenizer.", "Use a whole model file.")

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Bytes and kind of every token (computed once, in some tenths of a second for 150,000 tokens).

        Raises:
            ModelUnsupported: the file carries no tokenizer.
        """
        self._check_vocabulary()
        vocab = self._vocab
        buffer = np.empty(_LONGEST_PIECE, dtype=np.uint8)
        data, address = buffer.data, buffer.ctypes.data
        pieces = []
        for token in range(self.n_vocab):
            n = _piece(vocab, token, address, _LONGEST_PIECE, 0, True)
            pieces.append(bytes(data[:n]) if n >= 0 else self._text(token))
        kinds = bytes(
            attribute & _KINDS for attribute in map(attributes, repeat(vocab, self.n_vocab), range(self.n_vocab))
        )
        return Vocabulary.of(pieces, kinds, self._required(pieces, kinds))

    def share_vocabulary(self, other: Model) -> None:
        """Have the vocabulary of `other` in place of an equal one of this model's own, where both files describe the
        same tokenizer: an array of 150,000 texts is read and kept once. Raises ModelUnsupported without a tokenizer."""
        self._check_vocabulary()
        if self.n_vocab == other.n_vocab and tokenizer_hash(self.file) == tokenizer_hash(other.file):
            self.vocabulary = other.vocabulary

    def _required(self, pieces: Sequence[bytes], kinds: bytes) -> frozenset[int]:
        """Return the ids that end a generation, and the control tokens that the chat template writes."""
        template = self.metadata.get("tokenizer.chat_template", "").encode()
        control = (i for i, kind in enumerate(kinds) if kind & lib.LLAMA_TOKEN_ATTR_CONTROL)
        return frozenset(
            i for i in control if self.is_eog(i) or (pieces[i] and (pieces[i] in template or _ROLE.search(pieces[i])))
        )

    def grammar(self, schema: str) -> Grammar:
        """Return the grammar of replies that are valid by a JSON `schema`. Raises InvalidOption as `Grammar` does, and
        ModelUnsupported without a tokenizer or a token that ends a reply."""
        vocabulary = self.vocabulary
        if not self._all_ends:
            raise ModelUnsupported(f"No token of {self.name} ends a reply.", "Use another model for a JSON schema.")
        return Grammar(vocabulary, self._all_ends, schema)

    @cached_property
    def _all_ends(self) -> tuple[int, ...]:
        return tuple(filter(self.is_eog, self.vocabulary.markup()))

    def tokenize(
        self, text: str, *, special: bool = False, most: int | None = None, should_stop: ShouldStop = never
    ) -> Ids:
        """Return the ids of `text`, shape (n,), without BOS or EOS. `special` parses control tokens such as
        `<|im_end|>` in it; `should_stop` tells whether the caller has given up.

        Raises:
            ModelUnsupported: the file carries no tokenizer.
            PromptTooLong: the text has more than `most` tokens.
            TextRefused: llama.cpp fails on the text, or takes too long over it.
            Stopped: `should_stop` said so.
        """
        self._check_vocabulary()
        return self._tokenizer.encode(text, special=special, most=most, should_stop=should_stop)

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; control tokens add none. They need not be whole UTF-8.

        Raises:
            InvalidOption: no token has this id.
        """
        if not 0 <= token < self.n_vocab:
            raise InvalidOption(f"{token} is not a token of {self.name}.", f"Ids are 0 to {self.n_vocab - 1}.")
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self._text(token, special=False)
        return piece

    def control_text(self, token: int) -> bytes:
        """Return the text of a token, also of a control token, which adds nothing to a text."""
        return self._text(token)

    def detokenize(self, ids: Ids | Sequence[int]) -> bytes:
        """Return the bytes of all tokens, joined."""
        return b"".join(self.piece(int(token)) for token in ids)

    def is_eog(self, token: int) -> bool:
        """Return whether generation ends with this token."""
        known = self._ends.get(token)
        if known is None:  # the call releases the GIL, which another thread may keep
            self._check_open()
            known = self._ends[token] = bool(lib.llama_vocab_is_eog(self._vocab, token))
        return known

    @property
    def end_of_turn(self) -> int | None:
        """The token that usually ends a turn; None where the vocabulary names none."""
        self._check_open()
        ends = (lib.llama_vocab_eot(self._vocab), lib.llama_vocab_eos(self._vocab))
        return next((end for end in ends if end >= 0), None)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        arguments: Mapping[str, object] = MappingProxyType({}),
        most: int | None = None,
        should_stop: ShouldStop = never,
        tell: Callable[[str], None] = lambda _: None,
    ) -> Ids:
        """Return the ids of the conversation in the model's chat template, shape (n,), ready for the assistant's turn.
        `arguments` are given to the template; those that it does not read have no effect. `tell` is called with what
        was changed in a conversation that the template does not want as it is.

        Raises:
            InvalidOption: an unknown role, no message, or an argument that cannot be written as JSON.
            ModelUnsupported: the model has no chat template, or the template refuses the conversation.
            EngineFailed: the process that renders the template could not be started, or was ended from outside.
            PromptTooLong, TextRefused, Stopped: as `tokenize` does.
        """
        self._check_vocabulary()
        return self._begun(self._chat_template.prompt(messages, arguments, most, should_stop, tell))

    @property
    def chat_template_source(self) -> str:
        """The source of the chat template; empty without one."""
        return "" if self._template is None else self._template.source

    def use_chat_template(self, source: str, model: str) -> None:
        """Render conversations by `source` from now on, the chat template of `model`, for which this one drafts."""
        if source == self.chat_template_source:
            return
        if self._template is not None:
            self._template.close()
        self._template = Template(source, model)
        self._template.start()
        for known in ("_chat_template", "thinking"):
            vars(self).pop(known, None)

    def check_template_arguments(self, arguments: Mapping[str, object]) -> None:
        """Check that the chat template reads all `arguments`.

        Raises:
            InvalidOption: it does not read one of them; names those that it reads.
            ModelUnsupported, EngineFailed: as `chat_prompt` does.
        """
        self._check_vocabulary()
        self._chat_template.check(arguments)

    def fitting_arguments(self, arguments: Mapping[str, object]) -> tuple[dict[str, object], bool | None, list[str]]:
        """Return what `effort.fitting` does for this model's chat template. Raises what `chat_prompt` raises."""
        if not arguments:
            return {}, None, []
        self._check_vocabulary()
        return fitting(arguments, self._chat_template, self.thinking is not None)

    @property
    def describes_tools(self) -> bool:
        """Whether the chat template describes tools to the model; False without a template."""
        return self._template is not None and self._chat_template.describes_tools

    @cached_property
    def thinking(self) -> ThinkingMarkup | None:
        """The markup of the model's thoughts; None if it is not known to think."""
        return find_markup(self.chat_template_source, lambda text: len(self.tokenize(text, special=True)) == 1)

    def plain_prompt(self, text: str, *, most: int | None = None, should_stop: ShouldStop = never) -> Ids:
        """Return the ids of `text`, shape (n,), with BOS before it, if the model wants one. Names of control tokens
        mean those tokens. Raises as `tokenize`."""
        return self._begun(self.tokenize(text, special=True, most=most, should_stop=should_stop))

    def _begun(self, ids: Ids) -> Ids:
        bos = lib.llama_vocab_bos(self._vocab)
        wants_bos = lib.llama_vocab_get_add_bos(self._vocab) and bos >= 0
        if wants_bos and (len(ids) == 0 or ids[0] != bos):
            ids = np.concatenate([np.array([bos], dtype=np.int32), ids])
        return ids

    def close(self) -> None:
        """Let go of the native model; contexts that are still open keep it alive until they are closed."""
        self._owned = self._speculator = None
        self._tokenizer.close()
        if self._template is not None:
            self._template.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            raise ModelUnsupported(f"{self.name} has no chat template.", "Use an instruction-tuned model.")
        bos, eos = (self._special_text(f(self._vocab)) for f in (lib.llama_vocab_bos, lib.llama_vocab_eos))
        tokenizer = Tokenizer(
            encode=lambda text, special, most, should_stop: self.tokenize(
                text, special=special, most=most, should_stop=should_stop
            ),
            check_length=self._tokenizer.check_length,
            text=self._special_text,
            is_control=lambda token: bool(self._attributes(token) & _HIDDEN),
        )
        return ChatTemplate(self._template, bos, eos, tokenizer, self._template.model)

    def _attributes(self, token: int) -> int:
        self._check_vocabulary()
        return int(attributes(self._vocab, token))

    def _special_text(self, token: int) -> str:
        return self._text(token).decode("utf-8", "replace") if token >= 0 else ""

    def _text(self, token: int, special: bool = True) -> bytes:
        self._check_vocabulary()
        size = _LONGEST_PIECE
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = _piece(self._vocab, token, ctypes.addressof(buffer), size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


def _metadata(file: ModelFile) -> Mapping[str, str]:
    """Return the header's numbers and texts, as texts."""
    entries = file.header.metadata.items()
    return MappingProxyType({k: str(v) for k, v in entries if not isinstance(v, (tuple, GgufArray))})


def _template(file: ModelFile) -> Template | None:
    source = _metadata(file).get("tokenizer.chat_template")
    return Template(source, file.name) if source else None


def probe_of(
    file: ModelFile, hardware: Hardware, *, text_only: bool = False, eagle3: ModelFile | None = None,
    embeds: bool = False,
) -> Probe:  # fmt: skip
    """Return what a trial of a model in a child process has to try; the arguments are as for `Model.load`."""
    mtp = not text_only and eagle3 is None and mtp_support(file.header).usable
    return Probe(file.paths, file.parts, hardware, text_only, mtp, embeds, eagle3)


def _first_half(progress: Callable[[float], None] | None) -> Callable[[float], None] | None:
    return None if progress is None else lambda share: progress(share / 2)


def _second_half(progress: Callable[[float], None] | None) -> Callable[[float], None] | None:
    return None if progress is None else lambda share: progress((1 + share) / 2)
