"""Text to tokens, so that no text kills the process, or keeps it busy for long without a way to stop.

Short texts go straight to llama.cpp. Longer ones are cut where the ids stay the same, and parts that cannot be cut go
to a process of their own. The ids are always llama.cpp's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import repeat
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.engine import native
from edgellm.engine.abort_flag import ShouldStop, never
from edgellm.engine.native import lib
from edgellm.engine.tokenizing.processes import TokenizerProcesses
from edgellm.engine.tokenizing.slicing import Slicer, Special
from edgellm.engine.types import Ids
from edgellm.errors import EngineFailed, ModelUnsupported, PromptTooLong, Stopped

_LIKELY = 4  # characters per token in ordinary text: a text with more of them per allowed token may be too long
_UNKNOWN = 4  # bytes at most of an unknown character, which is one token
_TAKES_SPACE = lib.LLAMA_TOKEN_ATTR_LSTRIP | lib.LLAMA_TOKEN_ATTR_RSTRIP
_CONTROL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = _CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_SPACE = b" \t\n\v\f\r"
_ESCAPED_SPACE = "\u2581".encode()  # stands for a space in some vocabularies, and may occur in a text itself
_tokenize = native.bind(
    lib.llama_tokenize,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_int32,
    ctypes.c_void_p,
    ctypes.c_int32,
    ctypes.c_bool,
    ctypes.c_bool,
)
attributes = native.at_once(lib.llama_vocab_get_attr, ctypes.c_int, ctypes.c_void_p, ctypes.c_int32)
_text = native.at_once(lib.llama_vocab_get_text, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int32)


class VocabTokenizer:
    """The tokenizer of one loaded vocabulary."""

    def __init__(self, vocab: int, path: Path, name: str, kind: str, pre: str, pieces: Callable[[], Sequence[bytes]]):
        """Set up; `vocab` is llama.cpp's pointer, `path` its file and `name` the model's. `kind` and `pre` are the
        file's `tokenizer.ggml.model` and `tokenizer.ggml.pre`; `pieces` returns the bytes of every token."""
        self._vocab, self._name, self._pieces = vocab, name, pieces
        self._none = lib.llama_vocab_type(vocab) == lib.LLAMA_VOCAB_TYPE_NONE
        self._exact = kind in ("gpt2", "llama")  # every byte of a text is in one of its tokens
        self._slicer = Slicer(kind, pre, partial(_specials, vocab))
        self._processes = TokenizerProcesses(path, lib.llama_vocab_n_tokens(vocab))

    def encode(self, text: str, *, special: bool = False, most: int | None = None, stopped: ShouldStop = never) -> Ids:
        """Return the ids of `text`, shape (n,), without BOS or EOS. `special`: control tokens in it are parsed as such.

        Raises:
            ModelUnsupported: the file carries no tokenizer.
            PromptTooLong: the text has more than `most` tokens; raised as soon as that is certain.
            TextRefused: llama.cpp fails on the text, or takes too long over it.
            Stopped: `stopped` returned True.
        """
        if self._none:
            raise ModelUnsupported(f"{self._name} carries no tokenizer.", "Use a whole model file.")
        if len(text) <= self._slicer.whole:
            return self._here(text.encode("utf-8", "replace"), special)
        self.check_length(text, most)
        found: list[Ids] = []
        count = 0
        for part in self._slicer.slices(text, special):
            if stopped():
                raise Stopped("Tokenising was stopped.")
            data = part.text.encode("utf-8", "replace")
            ids = self._here(data, special) if part.bounded else self._processes.tokenize(data, special, stopped)
            found.append(ids)
            count += len(ids)
            if most is not None and count > most:
                raise _too_long(f"more than {most}", most)
        return np.concatenate(found) if len(found) > 1 else found[0]

    def check_length(self, text: str, most: int | None) -> None:
        """Raise PromptTooLong where `text` certainly has more than `most` tokens, without tokenising it."""
        if most is None or not self._exact or len(text) <= max(_LIKELY * most, self._slicer.whole):
            return  # it may fit, or tokenising it takes no time
        data = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8)
        fewest = int(np.bincount(data, minlength=256) @ self._shares)
        if fewest > most:
            raise _too_long(f"at least {fewest}", most)

    def close(self) -> None:
        """End the processes; not to be called while a text is being tokenised."""
        self._processes.close()

    def _here(self, data: bytes, special: bool) -> Ids:
        room = len(data) + 16
        while True:
            ids = np.empty(room, dtype=np.int32)
            n = _tokenize(self._vocab, data, len(data), ids.ctypes.data, room, False, special)
            if n >= 0:
                return ids[:n].copy()
            if -n <= room:
                raise EngineFailed(f"llama.cpp cannot tokenise {len(data)} bytes of text.", "Shorten the text.")
            room = -n

    @cached_property
    def _shares(self) -> npt.NDArray[np.float64]:
        """The least share of a token that each byte value takes up, shape (256,).

        A byte is 1/n of a token where no token that holds it has more than n bytes, so the shares of a token's bytes
        add up to 1 at most. A byte that may vanish counts as 0: no token is that byte alone, or a special token takes
        it along.
        """
        shares = np.zeros(256)
        alone = set()
        waiting = set(range(256))
        for piece in sorted(self._pieces(), key=len, reverse=True):
            if len(piece) == 1:
                alone.add(piece[0])
            if new := waiting.intersection(piece):
                shares[list(new)] = 1.0 / max(_UNKNOWN, len(piece))
                waiting -= new
        shares[list(set(range(256)) - alone)] = 0.0
        shares[list(_ESCAPED_SPACE)] = 0.0
        if _specials(self._vocab) is None:
            shares[list(_SPACE)] = 0.0
        return shares


def _specials(vocab: int) -> list[Special] | None:
    """Return the texts that llama.cpp looks for first; None where one of them takes adjacent white space along."""
    size = lib.llama_vocab_n_tokens(vocab)
    found = []
    for token, attribute in enumerate(map(attributes, repeat(vocab, size), range(size))):
        if attribute & _SPECIAL:
            if attribute & _TAKES_SPACE:
                return None
            try:
                found.append(Special(_text(vocab, token).decode(), bool(attribute & _CONTROL)))
            except UnicodeDecodeError:
                return None
    return found


def _too_long(count: str, most: int) -> PromptTooLong:
    return PromptTooLong(
        f"The prompt has {count} tokens, and the context holds {most + 1} with the reply.",
        "Shorten the prompt, its context files or the history.",
    )
