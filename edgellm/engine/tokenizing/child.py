"""The process for texts that could crash the tokenizer: `python -m edgellm.engine.tokenizing.child MODEL`.

It loads only the vocabulary, and answers requests on its standard input until that ends, or none comes for a while. A
text that overflows its stack or its memory ends this process, and no other.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from contextlib import suppress
from typing import BinaryIO

import numpy as np

from edgellm.engine.native import lib, start

STACK = 256 * 2**20
"""Bytes of stack for one text: enough for a match of 800,000 characters. Memory is taken only as it is used."""
MEMORY = 2**30  # bytes beyond what the vocabulary needs
IDLE = 120.0  # seconds without a request
REQUEST = struct.Struct("<Q?")  # bytes of the text, and whether control tokens are parsed
READY, FAILED = -1, -2  # in place of a count of ids; READY once, followed by the size of the vocabulary
REPLY = struct.Struct("<q")


def main(path: str) -> None:
    """Serve requests for the vocabulary of the model file at `path`."""
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a library's output is no reply
    start()
    params = lib.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        sys.exit(1)
    vocab = lib.llama_model_get_vocab(model)
    _send(replies, REPLY.pack(READY) + REPLY.pack(lib.llama_vocab_n_tokens(vocab)))
    _limit_memory()
    while True:
        idle = threading.Timer(IDLE, os._exit, (0,))
        idle.daemon = True
        idle.start()
        header = requests.read(REQUEST.size)
        idle.cancel()
        if len(header) < REQUEST.size:
            return
        size, special = REQUEST.unpack(header)
        text = requests.read(size)
        reply = [REPLY.pack(FAILED)]
        thread = threading.Thread(target=_tokenize, args=(vocab, text, special, reply))
        threading.stack_size(STACK)
        thread.start()
        threading.stack_size(0)
        thread.join()
        _send(replies, reply[-1])


def _tokenize(vocab: int, text: bytes, special: bool, reply: list[bytes]) -> None:
    room = len(text) + 16
    while True:
        ids = np.empty(room, dtype=np.int32)
        address = ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        n = lib.llama_tokenize(vocab, text, len(text), address, room, False, special)
        if n >= 0:
            reply.append(REPLY.pack(n) + ids[:n].tobytes())
            return
        if -n <= room:
            return
        room = -n


def _send(replies: BinaryIO, data: bytes) -> None:
    replies.write(data)
    replies.flush()


def _limit_memory() -> None:
    """Limit this process to STACK + MEMORY bytes more than it has now, where the operating system can do so."""
    try:
        import resource
    except ImportError:
        return
    try:
        with open("/proc/self/statm", "rb") as pages:  # noqa: PTH123
            now = int(pages.read().split()[0]) * resource.getpagesize()
    except OSError:
        return
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (now + STACK + MEMORY, now + STACK + MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main(sys.argv[1])
