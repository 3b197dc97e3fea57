"""The process for texts that could crash the tokenizer: `python -m edgellm.engine.tokenizing.child MODEL`.

It loads only the vocabulary. A text that overflows its stack or its memory ends this process, and no other.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading

import numpy as np

from edgellm.engine.native import lib, start
from edgellm.isolation.serving import Answer, serve
from edgellm.system import address_space, limit

STACK = 256 * 2**20
"""Bytes of stack for one text: enough for a match of 800,000 characters. Memory is taken only as it is used."""
MEMORY = 2**30  # bytes beyond what the vocabulary needs
IDLE = 120.0  # seconds without a request
SPECIAL, PLAIN = b"+", b"-"  # before a text: whether control tokens in it are parsed
SIZE = struct.Struct("<q")  # of the vocabulary: the answer to an empty request


def prepare() -> Answer:
    """Load the vocabulary of the model file that is this process's argument, and return the function that tokenises.

    A request is SPECIAL or PLAIN and a text in UTF-8; the answer is its ids, as int32.
    """
    start()
    params = lib.llama_model_default_params()
    params.vocab_only, params.n_gpu_layers = True, 0
    model = lib.llama_model_load_from_file(os.fsencode(sys.argv[1]), params)
    if not model:
        raise SystemExit
    vocab = lib.llama_model_get_vocab(model)
    limit("RLIMIT_CORE", 0)
    if (size := address_space()) is not None:
        limit("RLIMIT_AS", size + STACK + MEMORY)

    def answer(request: bytes) -> bytes:
        if not request:
            return SIZE.pack(lib.llama_vocab_n_tokens(vocab))
        ids: list[bytes] = []
        thread = threading.Thread(target=_tokenize, args=(vocab, request[1:], request[:1] == SPECIAL, ids))
        threading.stack_size(STACK)
        thread.start()
        threading.stack_size(0)
        thread.join()
        return ids[0]

    return answer


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


if __name__ == "__main__":
    serve(prepare, IDLE)
