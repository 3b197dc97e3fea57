"""Tokenises in a separate process texts that could crash this one, or keep it busy for long.

llama.cpp's tokenizer cannot be interrupted, and overflows its stack on a long enough stretch of text with many
pre-tokenizers. A process can be killed. It is started for the first such text and kept for the next.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, cast

import numpy as np
import psutil

import edgellm
from edgellm.engine.native import ShouldStop
from edgellm.engine.tokenizing.child import READY, REPLY, REQUEST
from edgellm.engine.vocabulary import Ids
from edgellm.errors import EngineFailed, Stopped, TextRefused

SECONDS = 1.0  # of the processor, whatever the text
BYTES_A_SECOND = 250_000  # for further seconds: a third of the slowest rate measured with a text that works
STARTING = 30.0  # seconds of the processor until the vocabulary is loaded
_LOOK = 0.02  # seconds between two looks at whether the caller has given up
_FIRST_LOOK = 0.001


class TokenizerProcess:
    """One process over the vocabulary of one model file; one text at a time."""

    def __init__(self, path: Path, n_vocab: int) -> None:
        """Start the process. `tokenize` can be called at once, and returns when the vocabulary is loaded."""
        self._n_vocab = n_vocab
        self._ready = False
        root = str(Path(edgellm.__file__).parent.parent)
        found = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(found),
            "GGML_NO_BACKTRACE": "1",  # a crash is an answer here, and a debugger would take seconds
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "edgellm.engine.tokenizing.child", str(path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
            start_new_session=True,  # Ctrl-C is for the caller, who decides
        )  # fmt: skip
        self._used = psutil.Process(self._process.pid)
        self._end = weakref.finalize(self, _end, self._process)

    @property
    def alive(self) -> bool:
        """Whether the process can be given a text."""
        return self._process.poll() is None

    def tokenize(self, data: bytes, special: bool, stopped: ShouldStop) -> Ids:
        """Return the ids of a text in UTF-8, shape (n,).

        Raises:
            Stopped: `stopped` returned True. The process is gone.
            TextRefused: the text took too much time, or crashed the process, which is gone.
            EngineFailed: the vocabulary could not be loaded again, or llama.cpp cannot tokenise the text.
            BrokenPipeError: the process had gone before it was given the text.
        """
        if not self._ready:
            size = self._exchange(b"", self._read_ready, STARTING, stopped, "The vocabulary")
            if size != self._n_vocab:
                self.close()
                raise EngineFailed("The vocabulary cannot be loaded a second time.", "Is the model file still there?")
            self._ready = True
        allowed = SECONDS + len(data) / BYTES_A_SECOND
        header = REQUEST.pack(len(data), special)
        ids = self._exchange(header + data, self._read_ids, allowed, stopped, f"A text of {len(data)} bytes")
        if ids is None:
            raise EngineFailed(f"llama.cpp cannot tokenise {len(data)} bytes of text.", "Shorten the text.")
        return cast(Ids, ids)

    def close(self) -> None:
        """End the process, even if it is at work."""
        self._end()

    def _exchange(
        self, request: bytes, read: Callable[[IO[bytes]], object], allowed: float, stopped: ShouldStop, what: str
    ) -> object:
        """Write `request` and return what `read` makes of the reply, within `allowed` seconds of the processor."""
        pipes = self._process.stdin, self._process.stdout
        heard: list[object] = []
        over = threading.Event()

        def talk() -> None:
            try:
                cast(IO[bytes], pipes[0]).write(request)
                cast(IO[bytes], pipes[0]).flush()
                heard.append(read(cast(IO[bytes], pipes[1])))
            except (OSError, ValueError, EOFError):
                pass  # the process has ended, which is handled below
            finally:
                over.set()

        began = self._seconds()
        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        wait = _FIRST_LOOK
        try:
            while not over.wait(wait):
                wait = min(2 * wait, _LOOK)
                if stopped():
                    raise Stopped("Tokenising was stopped.")
                if self._seconds() - began > allowed:
                    raise TextRefused(
                        f"{what} takes more than {allowed:.1f} s of the processor to tokenise.",
                        "Shorten it, or take encoded data and names of control tokens out of it.",
                    )
        except BaseException:
            self._process.kill()
            thread.join()
            raise
        if heard:
            return heard[0]
        self._process.kill()  # it has ended, or its reply cannot be read
        thread.join()
        self._process.wait()
        if self._process.returncode == 0:
            raise BrokenPipeError
        raise TextRefused(
            f"{what} cannot be tokenised: llama.cpp fails on it ({_why(self._process.returncode)}).",
            "Break up long stretches of one kind, such as encoded data or rows of dashes, or leave them out.",
        )

    def _seconds(self) -> float:
        try:
            used = self._used.cpu_times()
        except psutil.Error:
            return 0.0
        return float(used.user + used.system)

    def _read_ready(self, replies: IO[bytes]) -> int:
        kind, size = (REPLY.unpack(_whole(replies, REPLY.size))[0] for _ in range(2))
        return size if kind == READY else 0

    def _read_ids(self, replies: IO[bytes]) -> Ids | None:
        (count,) = REPLY.unpack(_whole(replies, REPLY.size))
        return None if count < 0 else np.frombuffer(_whole(replies, 4 * count), dtype=np.int32).copy()


class TokenizerProcesses:
    """As many processes as there are texts at the same time; one of them is kept for the next text."""

    def __init__(self, path: Path, n_vocab: int) -> None:
        """Start no process yet. `n_vocab` is the size of the vocabulary, which a process must find again."""
        self._path, self._n_vocab = path, n_vocab
        self._kept: TokenizerProcess | None = None
        self._closed = False
        self._lock = threading.Lock()

    def tokenize(self, data: bytes, special: bool, stopped: ShouldStop) -> Ids:
        """Return the ids of a text in UTF-8, shape (n,). Raises as `TokenizerProcess.tokenize`."""
        with self._lock:
            process, self._kept = self._kept, None
        if process is not None and process.alive:
            try:
                return self._use(process, data, special, stopped)
            except BrokenPipeError:  # it was idle for a while, and has just ended
                process = None
        try:
            return self._use(TokenizerProcess(self._path, self._n_vocab), data, special, stopped)
        except BrokenPipeError:
            raise EngineFailed("The process that tokenises ended at once.", "Run it again.") from None

    def _use(self, process: TokenizerProcess, data: bytes, special: bool, stopped: ShouldStop) -> Ids:
        try:
            ids = process.tokenize(data, special, stopped)
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


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # some data was still to be written
                pipe.close()


def _whole(replies: IO[bytes], size: int) -> bytes:
    data = replies.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _why(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
