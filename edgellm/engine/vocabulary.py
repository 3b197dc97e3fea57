"""The engine's array types, the meaning of token ids, and text to tokens, so that no text kills the process, or keeps
it busy for long without a way to stop.

llama.cpp runs most pre-tokenizers through a recursive `std::regex`: a match of some 26,000 characters overflows a stack
of 8 MiB and kills the process. Its search for special tokens takes quadratic time in their number. So a text of some
length goes to a thread with a larger stack, and a long one to a process of its own, which can be killed.
"""

import ctypes
import hashlib
import os
import re
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.engine import native
from edgellm.engine.native import ShouldStop, lib
from edgellm.errors import EngineFailed, Stopped, TextRefused
from edgellm.isolation.child import Child, ChildFailed, ChildKind, LimitExceeded, Limits
from edgellm.isolation.serving import Functions, Report
from edgellm.system import address_space, limit

Ids: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]


def common_prefix(a: Ids, b: Ids) -> int:
    """Return how many tokens `a` (n,) and `b` (m,) share from the start."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:  # the common and cheap case among many sessions
        return 0
    differ = a[:n] != b[:n]
    at = int(differ.argmax())
    return at if differ[at] else n


_UNUSED, _CONTROL, _BYTE = lib.LLAMA_TOKEN_ATTR_UNUSED, lib.LLAMA_TOKEN_ATTR_CONTROL, lib.LLAMA_TOKEN_ATTR_BYTE
_NORMAL, _DEFINED = lib.LLAMA_TOKEN_ATTR_NORMAL, lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_WRITTEN = _NORMAL | _BYTE
_FILLER = re.compile(rb"\[PAD\d*\]|<unused_?\d+>|<\|?(?:dummy|reserved|placeholder|extra)[\w-]*\|?>")


Entry: TypeAlias = tuple[bytes, int]
"""The text and the kind of a token."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes and the kind of every token id.

    `fingerprint` is the SHA-256 over all tokens in hexadecimal. `pieces` shows control tokens as text (`<|im_end|>`); a
    kind is the bit that llama.cpp gives to normal, control, byte tokens and so on. `required` are the ids that a
    conversation needs: those that end a generation, and the control tokens that the chat template writes.
    """

    size: int = field(compare=False)
    fingerprint: str
    pieces: tuple[bytes, ...] = field(compare=False)
    kinds: bytes = field(compare=False)
    required: frozenset[int] = frozenset()

    @classmethod
    def of(cls, pieces: Sequence[bytes], kinds: bytes, required: frozenset[int] = frozenset()) -> "Vocabulary":
        """Return the hashed vocabulary of `pieces` and their `kinds`, one of each per token id."""
        whole = hashlib.sha256()
        for piece, kind in zip(pieces, kinds, strict=True):
            whole.update(struct.pack("<IB", len(piece), kind) + piece)
        return cls(len(pieces), whole.hexdigest(), tuple(pieces), kinds, required)

    def different(self, other: "Vocabulary") -> int | None:
        """Return the lowest id that means different things in two vocabularies; None where both are of one tokenizer,
        and the ids that only one of them has are padding. Models of one family often differ in how many unused tokens
        they have, what those are called, and of which kind they are."""
        if self.fingerprint == other.fingerprint:
            return None
        unequal = (i for i, (a, b) in enumerate(zip(self.pieces, other.pieces, strict=False)) if a != b)
        beyond = range(min(self.size, other.size), max(self.size, other.size))
        conflicts = (
            token for token in chain(unequal, beyond)
            if self.conflicts(token, other.entry(token)) or token in other.required
        )  # fmt: skip
        return next(conflicts, None)

    def written(self) -> dict[bytes, int]:
        """Return the texts that stand for themselves in ordinary texts, each with its lowest token, if possible not a
        single byte's."""
        found: dict[bytes, int] = {}
        for single in (False, True):
            for token, (piece, kind) in enumerate(zip(self.pieces, self.kinds, strict=True)):
                if piece and bool(kind & _BYTE) == single and (kind & _DEFINED or _is_written(piece, kind)):
                    found.setdefault(piece, token)
        return found

    def markup(self) -> list[int]:
        """Return the ids that no value in a reply holds: control tokens, unused tokens, and marks of its parts."""
        return [
            token for token, (piece, kind) in enumerate(zip(self.pieces, self.kinds, strict=True))
            if kind & (_UNUSED | _CONTROL) or (kind & _DEFINED and piece[:1] == b"<" and piece[-1:] == b">")
        ]  # fmt: skip

    def entry(self, token: int) -> Entry | None:
        """Return the text and the kind of a token, None beyond the vocabulary."""
        return (self.pieces[token], self.kinds[token]) if token < self.size else None

    def conflicts(self, token: int, theirs: Entry | None) -> bool:
        """Return whether `token`, which is `theirs` in another vocabulary (None: missing there), shows that the two are
        of different tokenizers: its texts differ, and it is required, or either is written in ordinary texts."""
        ours = self.entry(token)
        if ours is not None and theirs is not None and ours[0] == theirs[0]:
            return False
        return token in self.required or any(one is not None and _is_written(*one) for one in (ours, theirs))


def _is_written(piece: bytes, kind: int) -> bool:
    """Return whether a token occurs in ordinary texts, and not only as padding or as a control token."""
    return bool(kind & _WRITTEN) and not kind & (_UNUSED | _CONTROL) and not _FILLER.fullmatch(piece)


DEPTH = 1_000
"""Characters for which any thread's stack is enough: each takes 316 bytes of a stack of maybe 512 KiB."""
LONG = 32_768
"""Characters beyond which a text goes to another process, which takes some tenths of a second to start."""
ALWAYS_APART = frozenset(("whitespace", "superbpe"))
"""Pre-tokenizers (`tokenizer.ggml.pre`) with which llama.cpp aborts at a space, or takes cubic time for digits."""
MOST_OF_A_BYTE = 4
"""Bytes of a text for which a byte of a token may stand: a mark of a space, an unknown character."""

CONTROL = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
_INT, _POINTER, _TEXT, _FLAG = ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_bool
_tokenize = native.bind(lib.llama_tokenize, _INT, _POINTER, _TEXT, _INT, _POINTER, _INT, _FLAG, _FLAG)
attributes = native.bind_nonblocking(lib.llama_vocab_get_attr, ctypes.c_int, ctypes.c_void_p, ctypes.c_int32)

STACK = 256 * 2**20
"""Bytes of stack for a long text: enough for a match of 800,000 characters. Memory is taken only as it is used."""
MEMORY = 2**30  # bytes beyond what the vocabulary needs
SECONDS = 1.0  # processor time for any text
BYTES_A_SECOND = 250_000  # text per further second: a third of the slowest rate measured
KIND = ChildKind("edgellm.engine.vocabulary", "tokenises long texts", idle=120.0)


class LongTexts:
    """The process that tokenises long texts by the vocabulary of a model file; one text at a time."""

    def __init__(self, path: Path, n_vocab: int) -> None:
        """Set up, without starting it."""
        # A crash is an answer here, and a debugger would take seconds.
        environment = {**os.environ, "GGML_NO_BACKTRACE": "1", "CUDA_VISIBLE_DEVICES": ""}
        self._child = Child(KIND, str(path), str(n_vocab), environment=environment)
        self._lock = threading.Lock()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._child.close()

    def tokenized(self, data: bytes, special: bool, should_stop: ShouldStop) -> Ids:
        """Return the ids of a text in UTF-8. Raises as `TextModel.tokenize` does."""
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


def tokenized(vocab: int, data: bytes, special: bool) -> Ids:
    """Return what llama.cpp makes of a text in one call."""
    ids = np.empty(2 * len(data) + 16, dtype=np.int32)  # some vocabularies put a mark of a space before each part
    n = _tokenize(vocab, data, len(data), ids.ctypes.data, len(ids), False, special)
    if n < 0:
        raise EngineFailed(f"llama.cpp cannot tokenise {len(data)} bytes of text.", "Shorten the text.")
    return ids[:n].copy()


_stack_size = threading.Lock()


def in_thread(vocab: int, data: bytes, special: bool) -> Ids:
    """Return `tokenized` of a text, by a thread with a stack of `STACK` bytes."""
    with ThreadPoolExecutor(1) as pool:
        with _stack_size:
            threading.stack_size(STACK)
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
        return in_thread(vocab, bytes(text), special).tobytes()

    return {"tokenize": tokenize}
