"""Text to tokens, so that no text kills the process, or keeps it busy for long without a way to stop.

llama.cpp runs most pre-tokenizers through a recursive `std::regex`: a match of some 26,000 characters overflows a stack
of 8 MiB and kills the process. Its search for special tokens takes quadratic time in their number. So a text of some
length goes to a thread with a larger stack, and a long one to a process of its own, which can be killed.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import repeat
from pathlib import Path

import numpy as np

from edgellm.engine import native
from edgellm.engine.native import ShouldStop, lib, never
from edgellm.engine.vocabulary import Ids
from edgellm.errors import EngineFailed, PromptTooLong, Stopped, TextRefused
from edgellm.isolation.child import Child, ChildFailed, ChildKind, LimitExceeded, Limits
from edgellm.isolation.serving import Functions, Report
from edgellm.system import address_space, limit

DEPTH = 1_000
"""Characters for which any thread's stack is enough: each takes 316 bytes of a stack of maybe 512 KiB."""
LONG = 32_768
"""Characters beyond which a text goes to another process, which takes some tenths of a second to start."""
_STACK_OF_LONG = 2**24  # bytes
_ALWAYS_APART = frozenset(("whitespace", "superbpe"))
"""Pre-tokenizers (`tokenizer.ggml.pre`) with which llama.cpp aborts at a space, or takes cubic time for digits."""

_LIKELY = 4  # characters per token in ordinary text: a text with more per allowed token may be too long
_MOST_OF_A_BYTE = 4  # bytes of a text for which a byte of a token may stand: a mark of a space, an unknown character
_TAKES_SPACE = lib.LLAMA_TOKEN_ATTR_LSTRIP | lib.LLAMA_TOKEN_ATTR_RSTRIP
CONTROL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_SPECIAL = CONTROL | lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_INT, _POINTER, _TEXT, _FLAG = ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool
_tokenize = native.bind(lib.llama_tokenize, _INT, _POINTER, _TEXT, _INT, _POINTER, _INT, _FLAG, _FLAG)
attributes = native.bind_nonblocking(lib.llama_vocab_get_attr, ctypes.c_int, ctypes.c_void_p, ctypes.c_int32)

STACK = 256 * 2**20
"""Bytes of stack for a long text: enough for a match of 800,000 characters. Memory is taken only as it is used."""
MEMORY = 2**30  # bytes beyond what the vocabulary needs
SECONDS = 1.0  # processor time for any text
BYTES_A_SECOND = 250_000  # text per further second: a third of the slowest rate measured
KIND = ChildKind("edgellm.engine.chat.tokenizing", "tokenises long texts", idle=120.0)


class VocabTokenizer:
    """The tokenizer of one loaded vocabulary."""

    def __init__(self, vocab: int, path: Path, kind: str, pre: str, pieces: Callable[[], Sequence[bytes]]):
        """Set up; `vocab` is llama.cpp's pointer, `path` its file. `kind` and `pre` are the
        file's `tokenizer.ggml.model` and `tokenizer.ggml.pre`; `pieces` returns the bytes of every token."""
        self._vocab, self._path, self._pieces = vocab, path, pieces
        self._exact = kind in ("gpt2", "llama")  # every byte of a text is in one of its tokens
        self._most_here = LONG if kind in ("gpt2", "llama", "gemma4") and pre not in _ALWAYS_APART else 0
        self._lock = threading.Lock()

    def encode(
        self, text: str, *, special: bool = False, most: int | None = None, should_stop: ShouldStop = never
    ) -> Ids:
        """Return the ids of `text`, shape (n,), without BOS or EOS. `special`: control tokens in it are parsed as such.

        Raises:
            PromptTooLong: the text has more than `most` tokens; raised as soon as that is certain.
            TextRefused: llama.cpp fails on the text, or takes too long over it.
            Stopped: `should_stop` returned True.
        """
        self.check_length(text, most)
        data = text.encode("utf-8", "replace")
        if len(text) > self._most_here:
            ids = self._encode_elsewhere(data, special, should_stop)
        elif len(text) > DEPTH:
            ids = in_thread(self._vocab, data, special, _STACK_OF_LONG)
        else:
            ids = tokenized(self._vocab, data, special)
        if most is not None and len(ids) > most:
            raise PromptTooLong.of(len(ids), most)
        return ids

    def check_length(self, text: str, most: int | None) -> None:
        """Raise PromptTooLong where `text` certainly has more than `most` tokens, without tokenising it."""
        if most is None or not self._exact or len(text) <= max(_LIKELY * most, LONG) or self._takes_space:
            return  # the text may fit, or tokenising takes no time
        fewest = len(text.encode("utf-8", "replace")) // (_MOST_OF_A_BYTE * max(map(len, self._pieces())))
        if fewest > most:
            raise PromptTooLong.of(f"at least {fewest}", most)

    def close(self) -> None:
        """End the process for long texts."""
        with self._lock:
            if "_child" in vars(self):
                self._child.close()

    @cached_property
    def _child(self) -> Child:
        # A crash is an answer here, and a debugger would take seconds.
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "CUDA_VISIBLE_DEVICES": ""}
        return Child(KIND, str(self._path), str(lib.llama_vocab_n_tokens(self._vocab)), environment=environment)

    def _encode_elsewhere(self, data: bytes, special: bool, should_stop: ShouldStop) -> Ids:
        """Return the ids of a long text in UTF-8, as another process finds them; one text at a time."""
        what = f"A text of {len(data)} bytes cannot be tokenised"
        size = np.dtype(np.int32).itemsize * (len(data) + 16)
        limits = Limits(size, SECONDS + len(data) / BYTES_A_SECOND, STACK + MEMORY)
        while not self._lock.acquire(timeout=0.05):
            if should_stop():
                raise Stopped
        try:
            answer = self._child.call("tokenize", limits, data, should_stop, special=special)
        except LimitExceeded as error:
            next_step = "Shorten it, or remove encoded data and names of control tokens."
            raise TextRefused(f"{what}: {error}.", next_step) from None
        except ChildFailed as error:
            next_step = "Break up or remove long runs of one kind, such as encoded data or rows of dashes."
            raise TextRefused(f"{what}: llama.cpp fails on it, and {error}.", next_step) from None
        finally:
            self._lock.release()
        return np.frombuffer(answer.data, dtype=np.int32).copy()

    @cached_property
    def _takes_space(self) -> bool:
        """Return whether a special token takes adjacent white space along, which is then in no token."""
        size = lib.llama_vocab_n_tokens(self._vocab)
        found = map(attributes, repeat(self._vocab, size), range(size))
        return any(attribute & _SPECIAL and attribute & _TAKES_SPACE for attribute in found)


def tokenized(vocab: int, data: bytes, special: bool) -> Ids:
    """Return what llama.cpp makes of a text in one call."""
    capacity = len(data) + 16
    while True:
        ids = np.empty(capacity, dtype=np.int32)
        n = _tokenize(vocab, data, len(data), ids.ctypes.data, capacity, False, special)
        if n >= 0:
            return ids[:n].copy()
        if -n <= capacity:
            raise EngineFailed(f"llama.cpp cannot tokenise {len(data)} bytes of text.", "Shorten the text.")
        capacity = -n


_stack_size = threading.Lock()


def in_thread(vocab: int, data: bytes, special: bool, stack: int) -> Ids:
    """Return `tokenized` of a text, by a thread with a stack of so many bytes."""
    with ThreadPoolExecutor(1) as pool:
        with _stack_size:
            threading.stack_size(stack)
            found = pool.submit(tokenized, vocab, data, special)
            threading.stack_size(0)
        return found.result()


def functions(_report: Report, path: str, n_vocab: str) -> Functions:
    """Load the vocabulary of a model file, in the child, and return the function `tokenize`, whose answer is int32."""
    native.start()
    params = lib.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    vocab = lib.llama_model_get_vocab(model) if model else 0
    if not model or lib.llama_vocab_n_tokens(vocab) != int(n_vocab):
        raise EngineFailed("The vocabulary cannot be loaded a second time.", "Check that the model file still exists.")
    limit("RLIMIT_CORE", 0)
    if (size := address_space()) is not None:
        limit("RLIMIT_AS", size + STACK + MEMORY)

    def tokenize(text: memoryview, special: bool) -> bytes:
        return in_thread(vocab, bytes(text), special, STACK).tobytes()

    return {"tokenize": tokenize}
