"""A grammar applied to tokens by llama.cpp's sampler, which only says what may follow the text so far.

llama.cpp ends the process where it is given a token that the grammar forbids. So each token is tried before it is
accepted, whoever it comes from.
"""

from __future__ import annotations

import ctypes
from time import thread_time

import numpy as np
import numpy.typing as npt

from edgellm.engine import native
from edgellm.engine.native import lib
from edgellm.engine.vocabulary import Ids
from edgellm.errors import EngineFailed, InvalidOption

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data
_MOST_SECONDS = 0.5  # of the processor, for one token: an ambiguous grammar would take ever more time and memory


class _Candidates(ctypes.Structure):
    """llama_token_data_array."""

    _fields_ = (("data", ctypes.c_void_p), ("size", ctypes.c_size_t), ("selected", ctypes.c_int64),
                ("sorted", ctypes.c_bool))  # fmt: skip


_make = native.bind(lib.llama_sampler_init_grammar, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p)
_clone = native.bind(lib.llama_sampler_clone, ctypes.c_void_p, ctypes.c_void_p)
_apply = native.bind(lib.llama_sampler_apply, None, ctypes.c_void_p, ctypes.c_void_p)
_accept = native.bind(lib.llama_sampler_accept, None, ctypes.c_void_p, ctypes.c_int32)
_free = native.bind(lib.llama_sampler_free, None, ctypes.c_void_p)


class Grammar:
    """The grammar of one reply, with its state after the text that was asked about last. For one thread at a time."""

    def __init__(self, parent: native.Owned, vocabulary: int, gbnf: str) -> None:
        """Compile `gbnf` for the `vocabulary` (llama.cpp's) of the model `parent`.

        Raises:
            InvalidOption: llama.cpp does not take the grammar.
        """
        pointer = _make(vocabulary, gbnf.encode(), b"root")
        if not pointer:
            raise InvalidOption("llama.cpp does not take the schema's grammar.", "Simplify the schema.")
        self._parent = parent
        self._start = native.Owned(pointer, _free, parent)  # before any token
        self._checked, self._checked_ids = self._start, np.empty(0, dtype=np.int32)
        self._state, self._ids = self._copied(self._start), self._checked_ids

    def allowed(self, text: Ids, candidates: Ids) -> npt.NDArray[np.bool_]:
        """Return which of `candidates` (k,) may follow the reply's `text` (n,), which follows the grammar itself; (k,).

        Raises:
            EngineFailed: the text breaks the grammar.
            InvalidOption: the grammar takes too long.
        """
        self._advance(text)
        return self._try(candidates)

    def _advance(self, text: Ids) -> None:
        """Bring the state behind `text`."""
        n = len(self._ids)
        if len(text) < n or not np.array_equal(text[:n], self._ids):
            same = int(np.argmin(np.append(text[: len(self._ids)] == self._ids[: len(text)], False)))
            if len(self._checked_ids) > same:
                self._checked, self._checked_ids = self._start, self._checked_ids[:0]
            self._state, self._ids = self._copied(self._checked), self._checked_ids
            self._accept(text[len(self._ids) : same])
            self._checked, self._checked_ids = self._copied(self._state), self._ids
        self._accept(text[len(self._ids) :])

    def _accept(self, tokens: Ids) -> None:
        done = 0
        try:
            for token in tokens.tolist():
                began = thread_time()
                if not self._try(tokens[done : done + 1])[0]:
                    raise EngineFailed(f"Token {token} of a reply breaks its grammar.", "Report this.")
                _accept(self._state.pointer, token)
                done += 1
                if thread_time() - began > _MOST_SECONDS:
                    raise InvalidOption("The JSON schema is too ambiguous to follow.", "Simplify it.")
        finally:
            self._ids = np.concatenate((self._ids, tokens[:done]))

    def _try(self, candidates: Ids) -> npt.NDArray[np.bool_]:
        data = np.zeros(len(candidates), dtype=_CANDIDATE)
        data["id"] = candidates
        array = _Candidates(data.ctypes.data, len(data), -1, False)
        _apply(self._state.pointer, ctypes.addressof(array))
        found: npt.NDArray[np.bool_] = data["logit"] == 0.0
        return found

    def _copied(self, state: native.Owned) -> native.Owned:
        return native.Owned(_clone(state.pointer), _free, self._parent)
