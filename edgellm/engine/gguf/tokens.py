"""The texts of a file's tokens, read without loading it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from edgellm.engine.gguf.reader import GgufArray, GgufHeader, ModelFile

TOKENS = "tokenizer.ggml.tokens"
PADDING = 256
"""Entries that one vocabulary may have more than another, or name in another way: they mean nothing."""
_PORTION = 1 << 20


def token_count(header: GgufHeader) -> int:
    """Return how many tokens a file has; 0 where it has no vocabulary."""
    described = header.metadata.get(TOKENS)
    return described.count if isinstance(described, GgufArray) else 0


def token_texts(file: ModelFile) -> Sequence[bytes]:
    """Return the texts of all tokens; none where the file has no vocabulary."""
    described = file.header.metadata.get(TOKENS)
    if not isinstance(described, GgufArray):
        return ()
    with file.path.open("rb") as source:
        source.seek(described.offset)
        data, at, found = b"", 0, []
        for _ in range(described.count):
            if at + 8 > len(data):
                data, at = data[at:] + source.read(_PORTION), 0
            (length,) = struct.unpack_from("<Q", data, at)
            while at + 8 + length > len(data):
                data, at = data[at:] + source.read(max(_PORTION, length)), 0
            found.append(data[at + 8 : at + 8 + length])
            at += 8 + length
    return found
