"""The text side of a loaded model: its vocabulary, tokens and chat template."""

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from edgellm.engine import native
from edgellm.engine.chat.prompt import ChatTemplate, ThinkingMarkup, find_markup
from edgellm.engine.chat.template import Message, TemplateRenderer
from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.gguf.reader import ModelFile, tokenizer_entries
from edgellm.engine.native import ShouldStop, lib, never
from edgellm.engine.vocabulary import (
    ALWAYS_APART,
    CONTROL,
    DEPTH,
    LONG,
    MOST_OF_A_BYTE,
    Ids,
    LongTexts,
    Vocabulary,
    attributes,
    in_thread,
    tokenized,
)
from edgellm.errors import EngineFailed, InvalidOption, ModelUnsupported, PromptTooLong

if TYPE_CHECKING:
    from edgellm.engine.grammar.matcher import Grammar

_KINDS = 2 * lib.LLAMA_TOKEN_ATTR_BYTE - 1  # attributes of a token's kind; higher bits tell how its text is stripped
_ROLE = re.compile(rb"user|assistant|system|tool|model")  # templates put names such as <|user|> together
_LONGEST_PIECE = 256  # bytes; a longer piece takes a second call
_INT, _POINTER, _FLAG = ctypes.c_int32, ctypes.c_void_p, ctypes.c_bool
_piece = native.bind_nonblocking(lib.llama_token_to_piece, _INT, _POINTER, _INT, _POINTER, _INT, _INT, _FLAG)
_is_eog = native.bind_nonblocking(lib.llama_vocab_is_eog, _FLAG, _POINTER, _INT)


class TextModel:
    """A loaded vocabulary and chat template."""

    def __init__(self, file: ModelFile, owned: native.Owned, renderer: TemplateRenderer | None) -> None:
        """Set up over a native model, loaded from `file`, and the renderer of the file's chat template."""
        self.file = file
        found = [(str(path.resolve()), path.stat()) for path in file.paths]
        self.loaded_from = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found]
        """The files as they were loaded: their paths, sizes in bytes, and times of change."""
        self._owned: native.Owned | None = owned
        self._vocab = lib.llama_model_get_vocab(owned.pointer)
        self.n_vocab: int = lib.llama_vocab_n_tokens(self._vocab)
        self.has_vocabulary = bool(lib.llama_vocab_type(self._vocab) != lib.LLAMA_VOCAB_TYPE_NONE)
        """The file carries a tokenizer; a shard of later layers does not."""
        described = file.header.metadata
        self._pieces: list[bytes | None] = [None] * self.n_vocab
        kind, pre = described.get("tokenizer.ggml.model"), described.get("tokenizer.ggml.pre")
        self._exact = kind in ("gpt2", "llama")  # every byte of a text is in one of its tokens
        self._most_here = LONG if kind in ("gpt2", "llama", "gemma4") and pre not in ALWAYS_APART else 0
        self._renderer = renderer

    @property
    def path(self) -> Path:
        """The file, or the first one of several."""
        return self.file.path

    @property
    def header(self) -> GgufHeader:
        """The header of the whole model."""
        return self.file.header

    @property
    def name(self) -> str:
        """The model's name."""
        return self.file.name

    @property
    def vocab_pointer(self) -> Any:
        """The native vocabulary, for llama.cpp's own functions."""
        self._check_vocabulary()
        return self._vocab

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
        """Bytes and kind of every token (computed once, in some tenths of a second for 150,000 tokens). Raises
        ModelUnsupported: the file carries no tokenizer."""
        self._check_vocabulary()
        vocab = self._vocab
        buffer = np.empty(_LONGEST_PIECE, dtype=np.uint8)
        data, address = buffer.data, buffer.ctypes.data
        pieces = []
        for token in range(self.n_vocab):
            n = _piece(vocab, token, address, _LONGEST_PIECE, 0, True)
            pieces.append(bytes(data[:n]) if n >= 0 else self.control_text(token))
        kinds = bytes(
            attribute & _KINDS for attribute in map(attributes, repeat(vocab, self.n_vocab), range(self.n_vocab))
        )
        return Vocabulary.of(pieces, kinds, self._required(pieces, kinds))

    def has_tokenizer_of(self, other: "TextModel") -> bool:
        """Return whether both files describe the same tokenizer, so that no vocabulary has to be read to compare them.
        Raises ModelUnsupported without a tokenizer."""
        self._check_vocabulary()
        return self.n_vocab == other.n_vocab and tokenizer_entries(self.file) == tokenizer_entries(other.file)

    def _required(self, pieces: Sequence[bytes], kinds: bytes) -> frozenset[int]:
        """Return the ids that end a generation, and the control tokens that the chat template writes."""
        template = str(self.header.metadata.get("tokenizer.chat_template", "")).encode()
        control = (i for i, kind in enumerate(kinds) if kind & lib.LLAMA_TOKEN_ATTR_CONTROL)
        return frozenset(
            i for i in control if self.is_eog(i) or (pieces[i] and (pieces[i] in template or _ROLE.search(pieces[i])))
        )

    def grammar(self, schema: str) -> "Grammar":
        """Return the grammar of replies that are valid by a JSON `schema`. Raises InvalidOption as `Grammar` does, and
        ModelUnsupported without a tokenizer or a token that ends a reply."""
        from edgellm.engine.grammar.matcher import Grammar  # imports llguidance

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
        `<|im_end|>` in it; `should_stop` tells whether the caller has given up. Raises ModelUnsupported: the file
        carries no tokenizer; PromptTooLong: the text has more than `most` tokens; raised as soon as that is certain;
        TextRefused: llama.cpp fails on the text, or takes too long over it; Stopped: `should_stop` said so."""
        self._check_vocabulary()
        self.check_length(text, most)
        data = text.encode("utf-8", "replace")
        if len(text) > self._most_here:
            ids = self._long_texts.tokenized(data, special, should_stop)
        elif len(text) > DEPTH:
            ids = in_thread(self._vocab, data, special)
        else:
            ids = tokenized(self._vocab, data, special)
        if most is not None and len(ids) > most:
            raise PromptTooLong.of(len(ids), most)
        return ids

    @cached_property
    def _long_texts(self) -> LongTexts:
        return LongTexts(self.path, self.n_vocab)

    def check_length(self, text: str, most: int | None) -> None:
        """Raise PromptTooLong where `text` certainly has more than `most` tokens, without tokenising it."""
        if most is None or not self._exact or len(text) <= LONG:  # tokenising a shorter one takes no time
            return
        fewest = len(text.encode("utf-8", "replace")) // (MOST_OF_A_BYTE * max(map(len, self.vocabulary.pieces)))
        if fewest > most:
            raise PromptTooLong.of(fewest, most, "at least ")

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token adds to a text; control tokens add none. They need not be whole UTF-8. Raises
        InvalidOption: no token has this id."""
        if not 0 <= token < self.n_vocab:
            raise InvalidOption(f"{token} is not a token of {self.name}.", f"Ids are 0 to {self.n_vocab - 1}.")
        piece = self._pieces[token]
        if piece is None:
            piece = self._pieces[token] = self.control_text(token, special=False)
        return piece

    def detokenize(self, ids: Ids | Sequence[int]) -> bytes:
        """Return the bytes of all tokens, joined."""
        return b"".join(self.piece(int(token)) for token in ids)

    def is_eog(self, token: int) -> bool:
        """Return whether generation ends with this token."""
        self._check_open()
        return bool(_is_eog(self._vocab, token))

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
        """Return the ids of `ChatTemplate.prompt`, shape (n,), with BOS before them, if the model wants one. Raises as
        that does, and ModelUnsupported: the model has no chat template."""
        self._check_vocabulary()
        return self._begun(self.template.prompt(messages, arguments, most, should_stop, tell))

    @property
    def chat_template_source(self) -> str:
        """The source of the chat template; empty without one."""
        return "" if self._renderer is None else self._renderer.source

    def use_chat_template(self, source: str, model: str) -> None:
        """Render conversations by `source` from now on: the chat template of `model`, the verifier."""
        if source == self.chat_template_source:
            return
        if self._renderer is not None:
            self._renderer.close()
        self._renderer = TemplateRenderer(source, model)
        self._renderer.start()
        for known in ("template", "thinking"):
            vars(self).pop(known, None)

    @property
    def describes_tools(self) -> bool:
        """Return whether the chat template describes tools to the model; False without a template."""
        return self._renderer is not None and self.template.describes_tools

    @cached_property
    def thinking(self) -> ThinkingMarkup | None:
        """The markup of the model's thoughts; None if it is not known to think."""
        return find_markup(self.chat_template_source, lambda text: len(self.tokenize(text, special=True)) == 1)

    def plain_prompt(self, text: str, *, most: int | None = None, should_stop: ShouldStop = never) -> Ids:
        """Return the ids of `text`, shape (n,), with BOS before it, if the model wants one. Names of control tokens
        mean those tokens."""
        return self._begun(self.tokenize(text, special=True, most=most, should_stop=should_stop))

    def _begun(self, ids: Ids) -> Ids:
        bos = lib.llama_vocab_bos(self._vocab)
        wants_bos = lib.llama_vocab_get_add_bos(self._vocab) and bos >= 0
        if wants_bos and (len(ids) == 0 or ids[0] != bos):
            ids = np.concatenate([np.array([bos], dtype=np.int32), ids])
        return ids

    def close(self) -> None:
        """Release the native model; open contexts keep it alive until they are closed."""
        self._owned = None
        if "_long_texts" in vars(self):
            self._long_texts.close()
        if self._renderer is not None:
            self._renderer.close()

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises ModelUnsupported: the model has none, or no vocabulary."""
        self._check_vocabulary()
        if self._renderer is None:
            hint = "Use an instruction-tuned model; this one only continues texts, as at /v1/completions."
            raise ModelUnsupported(f"{self.name} has no chat template.", hint)
        bos, eos = (self._special_text(f(self._vocab)) for f in (lib.llama_vocab_bos, lib.llama_vocab_eos))
        return ChatTemplate(self._renderer, self, bos, eos)

    def control_name(self, token: int) -> str:
        """Return the text of a control token; "" for any other token."""
        self._check_vocabulary()
        return self._special_text(token) if attributes(self._vocab, token) & CONTROL else ""

    def _special_text(self, token: int) -> str:
        return self.control_text(token).decode("utf-8", "replace") if token >= 0 else ""

    def control_text(self, token: int, special: bool = True) -> bytes:
        """Return the text of a token, if `special` also of a control token, which adds nothing to a text."""
        self._check_vocabulary()
        size = _LONGEST_PIECE
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = _piece(self._vocab, token, ctypes.addressof(buffer), size, 0, special)
            if n >= 0:
                return buffer.raw[:n]
            size = -n


def renderer_of(file: ModelFile) -> TemplateRenderer | None:
    """Return the renderer of a file's chat template, None without one."""
    source = str(file.header.metadata.get("tokenizer.chat_template") or "")
    return TemplateRenderer(source, file.name) if source else None
