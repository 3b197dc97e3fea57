"""Tokenising in a separate process texts that could crash this process, or keep it busy for long.

llama.cpp's tokenizer cannot be interrupted, and overflows its stack on a long enough stretch of text with many
pre-tokenizers. A process can be killed. It loads only the vocabulary; it is started for the first such text and kept
for the next.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import numpy as np

from edgellm.engine.native import ShouldStop, lib, start
from edgellm.engine.vocabulary import Ids
from edgellm.errors import EngineFailed, TextRefused
from edgellm.isolation.child import Child, ChildFailed, ChildKind, LimitExceeded, Limits
from edgellm.isolation.serving import Functions, Report
from edgellm.system import address_space, limit

STACK = 256 * 2**20
"""Bytes of stack for one text: enough for a match of 800,000 characters. Memory is taken only as it is used."""
MEMORY = 2**30  # bytes beyond what the vocabulary needs
SECONDS = 1.0  # processor time for any text
BYTES_A_SECOND = 250_000  # text per further second: a third of the slowest rate measured
_ID = 4  # bytes
KIND = ChildKind("edgellm.engine.tokenizing.processes", "tokenises long texts", idle=120.0)


class TokenizerProcesses:
    """Processes for texts, one for each at the same time; one process is kept for the next text."""

    def __init__(self, path: Path, n_vocab: int) -> None:
        """Start no process yet. `n_vocab` is the size of the vocabulary, which a process must find again."""
        self._words = str(path), str(n_vocab)
        self._kept: Child | None = None
        self._closed = False
        self._lock = threading.Lock()

    def tokenize(self, data: bytes, special: bool, should_stop: ShouldStop) -> Ids:
        """Return the ids of a text in UTF-8, shape (n,). `special`: control tokens in it are parsed as such.

        Raises:
            Stopped: `should_stop` returned True. The process is gone.
            TextRefused: the text took too much time, or crashed the process, which is gone.
            EngineFailed: the vocabulary could not be loaded again, or the process was ended from outside.
        """
        with self._lock:
            child, self._kept = self._kept or Child(KIND, *self._words, environment=_environment()), None
        what = f"A text of {len(data)} bytes cannot be tokenised"
        limits = Limits(_ID * (len(data) + 16), SECONDS + len(data) / BYTES_A_SECOND, STACK + MEMORY)
        try:
            answer = child.call("tokenize", limits, data, should_stop, special=special)
        except LimitExceeded as error:
            next_step = "Shorten it, or remove encoded data and names of control tokens."
            raise TextRefused(f"{what}: {error}.", next_step) from None
        except ChildFailed as error:
            next_step = "Break up or remove long runs of one kind, such as encoded data or rows of dashes."
            raise TextRefused(f"{what}: llama.cpp fails on it, and {error}.", next_step) from None
        finally:
            with self._lock:
                kept = child.alive and self._kept is None and not self._closed
                self._kept = child if kept else self._kept
            if not kept:
                child.close()
        return np.frombuffer(answer.data, dtype=np.int32).copy()

    def close(self) -> None:
        """End the process that is kept."""
        with self._lock:
            self._closed, child, self._kept = True, self._kept, None
        if child is not None:
            child.close()


def _environment() -> dict[str, str]:
    # A crash is an answer here, and a debugger would take seconds.
    return {**os.environ, "GGML_NO_BACKTRACE": "1", "CUDA_VISIBLE_DEVICES": ""}


def functions(_report: Report, path: str, n_vocab: str) -> Functions:
    """Load the vocabulary of a model file, in the child, and return the function `tokenize`, whose answer is int32."""
    start()
    params = lib.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    vocab = lib.llama_model_get_vocab(model) if model else None
    if not model or lib.llama_vocab_n_tokens(vocab) != int(n_vocab):
        raise EngineFailed("The vocabulary cannot be loaded a second time.", "Check that the model file still exists.")
    limit("RLIMIT_CORE", 0)
    if (size := address_space()) is not None:
        limit("RLIMIT_AS", size + STACK + MEMORY)

    def tokenize(text: memoryview, special: bool) -> bytes:
        ids: list[bytes] = []
        thread = threading.Thread(target=_tokenize, args=(vocab, bytes(text), special, ids))
        threading.stack_size(STACK)
        thread.start()
        threading.stack_size(0)
        thread.join()
        return ids[0]

    return {"tokenize": tokenize}


def _tokenize(vocab: int, text: bytes, special: bool, ids: list[bytes]) -> None:
    """Append the ids of `text`, or nothing where llama.cpp does not tokenise it."""
    capacity = len(text) + 16
    while True:
        made = np.empty(capacity, dtype=np.int32)
        address = made.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        n = lib.llama_tokenize(vocab, text, len(text), address, capacity, False, special)
        if n >= 0:
            ids.append(made[:n].tobytes())
            return
        if -n <= capacity:
            return
        capacity = -n
