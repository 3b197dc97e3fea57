"""A model's tokenizer as a GGUF file of its own: the metadata that llama.cpp needs to load a vocabulary, no tensors."""

from __future__ import annotations

from dataclasses import replace

from edgellm.engine.gguf.reader import ModelFile
from edgellm.engine.gguf.tokens import token_count
from edgellm.engine.gguf.writer import portions, raw_entries, text
from edgellm.errors import ModelUnsupported

MAX_TOKENIZER = 64 * 2**20
"""Bytes of such a file, at most: that of 262,144 tokens of Gemma 4 has 16 MB."""
_ARCHITECTURE, _NAME, _PREFIX = "general.architecture", "general.name", "tokenizer."
_UNREAD = "tokenizer.huggingface.json"  # the same once more, which llama.cpp does not read
_ALIGNMENT = 32  # where no entry says otherwise


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
