"""Tokenises in a separate process texts that could crash this one, or keep it busy for long.

llama.cpp's tokenizer cannot be interrupted, and overflows its stack on a long enough stretch of text with many
pre-tokenizers. A process can be killed. It is started for the first such text and kept for the next.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np

from edgellm.engine.native import ShouldStop
from edgellm.engine.tokenizing.child import MEMORY, PLAIN, SIZE, SPECIAL, STACK
from edgellm.engine.vocabulary import Ids
from edgellm.errors import EngineFailed, TextRefused
from edgellm.isolation.child_process import ChildFailed, ChildProcess, LimitExceeded, Limits

SECONDS = 1.0  # of the processor, whatever the text
BYTES_A_SECOND = 250_000  # for further seconds: a third of the slowest rate measured with a text that works
_STARTING = Limits(seconds=30.0, memory=2**40, answer=SIZE.size)  # until the vocabulary is loaded
_ID = 4  # bytes


class TokenizerProcess:
    """One process over the vocabulary of one model file; one text at a time."""

    def __init__(self, path: Path, n_vocab: int) -> None:
        """Start the process. `tokenize` can be called at once, and returns when the vocabulary is loaded."""
        self._n_vocab = n_vocab
        self._ready = False
        environment = {
            **os.environ,
            "GGML_NO_BACKTRACE": "1",  # a crash is an answer here, and a debugger would take seconds
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._child = ChildProcess("edgellm.engine.tokenizing.child", str(path), environment=environment)

    @property
    def alive(self) -> bool:
        """Whether the process can be given a text."""
        return self._child.alive

    def tokenize(self, data: bytes, special: bool, should_stop: ShouldStop) -> Ids:
        """Return the ids of a text in UTF-8, shape (n,).

        Raises:
            Stopped: `should_stop` returned True. The process is gone.
            TextRefused: the text took too much time, or crashed the process, which is gone.
            EngineFailed: the vocabulary could not be loaded again, or the process was ended from outside.
            BrokenPipeError: the process had gone before it was given the text.
        """
        if not self._ready:
            self._wait_for_vocabulary(should_stop)
        what = f"A text of {len(data)} bytes cannot be tokenised"
        limits = Limits(SECONDS + len(data) / BYTES_A_SECOND, STACK + MEMORY, _ID * (len(data) + 16))
        try:
            answer = self._child.ask((SPECIAL if special else PLAIN) + data, limits, should_stop)
        except LimitExceeded as error:
            raise TextRefused(
                f"{what}: {error}.", "Shorten it, or remove encoded data and names of control tokens."
            ) from None
        except ChildFailed as error:
            raise TextRefused(
                f"{what}: llama.cpp fails on it, and {error}.",
                "Break up or remove long runs of one kind, such as encoded data or rows of dashes.",
            ) from None
        return np.frombuffer(answer, dtype=np.int32).copy()

    def close(self) -> None:
        """End the process, even if it is at work."""
        self._child.close()

    def _wait_for_vocabulary(self, should_stop: ShouldStop) -> None:
        with suppress(ChildFailed):
            self._ready = self._child.ask(b"", _STARTING, should_stop) == SIZE.pack(self._n_vocab)
        if not self._ready:
            self.close()
            raise EngineFailed(
                "The vocabulary cannot be loaded a second time.", "Check that the model file still exists."
            )


class TokenizerProcesses:
    """As many processes as there are texts at the same time; one of them is kept for the next text."""

    def __init__(self, path: Path, n_vocab: int) -> None:
        """Start no process yet. `n_vocab` is the size of the vocabulary, which a process must find again."""
        self._path, self._n_vocab = path, n_vocab
        self._kept: TokenizerProcess | None = None
        self._closed = False
        self._lock = threading.Lock()

    def tokenize(self, data: bytes, special: bool, should_stop: ShouldStop) -> Ids:
        """Return the ids of a text in UTF-8, shape (n,). Raises as `TokenizerProcess.tokenize`."""
        with self._lock:
            process, self._kept = self._kept, None
        if process is not None and process.alive:
            try:
                return self._use(process, data, special, should_stop)
            except BrokenPipeError:  # it was idle for a while, and has just ended
                process = None
        try:
            return self._use(TokenizerProcess(self._path, self._n_vocab), data, special, should_stop)
        except BrokenPipeError:
            raise EngineFailed("The tokenizer process exited at once.", "Try again.") from None

    def _use(self, process: TokenizerProcess, data: bytes, special: bool, should_stop: ShouldStop) -> Ids:
        try:
            ids = process.tokenize(data, special, should_stop)
        except BaseException:
            process.close()
            raise
        with self._lock:
            if self._kept is None and not self._closed:
                self._kept = process
                return ids
        process.close()
        return ids

    def close(self) -> None:
        """End the process that is kept."""
        with self._lock:
            self._closed, process, self._kept = True, self._kept, None
        if process is not None:
            process.close()
