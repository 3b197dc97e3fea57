"""A file's tokenizer: read without loading the model, and written as a file of its own."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import replace

from edgellm.engine.gguf.reader import GgufArray, GgufHeader, ModelFile, raw_entries
from edgellm.engine.gguf.writer import entry, portions
from edgellm.errors import ModelUnsupported

TOKENS = "tokenizer.ggml.tokens"
PADDING = 256
"""Greatest number of padding entries by which two vocabularies of one tokenizer may differ."""
MAX_TOKENIZER = 64 * 2**20
"""Most bytes of a tokenizer's file: Gemma 4, with 262,144 tokens, has 16 MB."""
_PREFIX = "tokenizer."
_UNREAD = "tokenizer.huggingface.json"  # a copy that llama.cpp does not read


def token_count(header: GgufHeader) -> int:
    """Return how many tokens a file has; 0 where it has no vocabulary."""
    described = header.metadata.get(TOKENS)
    return described.count if isinstance(described, GgufArray) else 0


def _entries(file: ModelFile) -> dict[str, bytes]:
    with file.path.open("rb") as source:
        return raw_entries([source], file.parts[0])


def tokenizer_hash(file: ModelFile) -> bytes:
    """Return a hash of all that a file says about its tokenizer, its chat template included."""
    digest = hashlib.sha256()
    for key, raw in sorted(_entries(file).items()):
        if key.startswith(_PREFIX):
            said = raw[8 + len(key.encode()) :]  # the type, and the value
            digest.update(struct.pack("<QQ", len(key), len(said)) + key.encode() + said)
    return digest.digest()


def token_texts(file: ModelFile) -> Sequence[bytes]:
    """Return the texts of all tokens; none where the file has no vocabulary."""
    if not (count := token_count(file.parts[0])):
        return ()
    raw = _entries(file)[TOKENS]
    at, found = 24 + len(TOKENS), []  # behind the key, the types and the count
    for _ in range(count):
        begin = at + 8
        at = begin + int(struct.unpack_from("<Q", raw, at)[0])
        found.append(raw[begin:at])
    return found


def tokenizer_file(file: ModelFile, name: str = "") -> bytes:
    """Return the bytes of a GGUF file with the tokenizer and the chat template of `file`, under its name or another.
    Raises ModelUnsupported: it has no tokenizer, or one of more than `MAX_TOKENIZER` bytes; OSError: it cannot be
    read."""
    header, entries = file.parts[0], _entries(file)
    if not token_count(header):
        raise ModelUnsupported(f"{file.path} contains no tokenizer.", "Use a whole model file.")
    kept = [raw for key, raw in entries.items() if key == "general.architecture"]
    kept.append(entry("general.name", name or file.name))
    kept += (raw for key, raw in entries.items() if key.startswith(_PREFIX) and key != _UNREAD)
    data = b"".join(portions(replace(header, alignment=32), kept, ()))  # GGUF's default
    if len(data) > MAX_TOKENIZER:
        what = f"The tokenizer of {file.path} has {len(data)} bytes; {MAX_TOKENIZER} are possible."
        raise ModelUnsupported(what, "Use another model.")
    return data
