"""A file's tokenizer: read without loading the model, and written as a file of its own."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from edgellm.engine.gguf.reader import GgufArray, GgufHeader, ModelFile
from edgellm.engine.gguf.writer import portions, raw_entries, text
from edgellm.errors import ModelUnsupported

TOKENS = "tokenizer.ggml.tokens"
PADDING = 256
"""Greatest number of padding entries by which two vocabularies of one tokenizer may differ."""
_PORTION = 1 << 20


def token_count(header: GgufHeader) -> int:
    """Return how many tokens a file has; 0 where it has no vocabulary."""
    described = header.metadata.get(TOKENS)
    return described.count if isinstance(described, GgufArray) else 0


def tokenizer_hash(file: ModelFile) -> bytes:
    """Return a hash of all that a file says about its tokenizer, its chat template included."""
    header, found = file.parts[0], hashlib.sha256()
    places = [*sorted((at, key) for key, at in header.value_offsets.items()), (header.infos_offset + 12, "")]
    spans = {
        key: (at - 4, following - 12 - len(name.encode()))  # each value follows its name and type
        for (at, key), (following, name) in pairwise(places)
    }
    with file.path.open("rb") as source:
        for key in sorted(spans):
            if key.startswith("tokenizer."):
                begin, end = spans[key]
                source.seek(begin)
                found.update(struct.pack("<QQ", len(key), end - begin) + key.encode() + source.read(end - begin))
    return found.digest()


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


MAX_TOKENIZER = 64 * 2**20
"""Most bytes of a tokenizer's file: Gemma 4, with 262,144 tokens, has 16 MB."""
_ARCHITECTURE, _NAME, _PREFIX = "general.architecture", "general.name", "tokenizer."
_UNREAD = "tokenizer.huggingface.json"  # a copy that llama.cpp does not read
_ALIGNMENT = 32  # bytes; GGUF's default


def tokenizer_file(file: ModelFile, name: str = "") -> bytes:
    """Return the bytes of a GGUF file with the tokenizer and the chat template of `file`, under its name or another.

    Raises:
        ModelUnsupported: it has no tokenizer, or one of more than `MAX_TOKENIZER` bytes.
        OSError: it cannot be read.
    """
    header = file.parts[0]
    if not token_count(header):
        raise ModelUnsupported(f"{file.path} contains no tokenizer.", "Use a whole model file.")
    with file.path.open("rb") as source:
        entries = raw_entries(source, header)
    kept = [entries[_ARCHITECTURE]] if _ARCHITECTURE in entries else []
    kept.append(text(_NAME, name or file.name))
    kept += (raw for key, raw in entries.items() if key.startswith(_PREFIX) and key != _UNREAD)
    if (size := sum(map(len, kept))) > MAX_TOKENIZER - 2 * _ALIGNMENT:  # the header and padding
        raise ModelUnsupported(
            f"The tokenizer of {file.path} has {size} bytes; {MAX_TOKENIZER} are possible.", "Use another model."
        )
    return b"".join(portions(replace(header, alignment=_ALIGNMENT), kept, ()))
