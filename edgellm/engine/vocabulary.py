"""The engine's array types, and the meaning of token ids."""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.engine.gguf.reader import ModelFile, raw_entries
from edgellm.engine.native import lib

Ids: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]


def common_prefix(a: Ids, b: Ids) -> int:
    """Return how many tokens `a` (n,) and `b` (m,) share from the start."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:  # the common and cheap case among many sessions
        return 0
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


_UNUSED, _CONTROL, _BYTE = lib.LLAMA_TOKEN_ATTR_UNUSED, lib.LLAMA_TOKEN_ATTR_CONTROL, lib.LLAMA_TOKEN_ATTR_BYTE
_NORMAL, _DEFINED = lib.LLAMA_TOKEN_ATTR_NORMAL, lib.LLAMA_TOKEN_ATTR_USER_DEFINED
_WRITTEN = _NORMAL | _BYTE
_FILLER = re.compile(rb"\[PAD\d*\]|<unused_?\d+>|<\|?(?:dummy|reserved|placeholder|extra)[\w-]*\|?>")


Entry: TypeAlias = tuple[bytes, int]
"""The text and the kind of a token."""


@dataclass(frozen=True, slots=True)
class VocabularyMatch:
    """The outcome of comparing two vocabularies.

    `different` is the lowest id that means different things; None where both are of one tokenizer. Then both have the
    ids below `shared`, and ids beyond are padding.
    """

    shared: int
    different: int | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes and the kind of every token id.

    `fingerprint` is the SHA-256 over all tokens in hexadecimal. `pieces` shows control tokens as text (`<|im_end|>`); a
    kind is the bit that llama.cpp gives to normal, control, byte tokens and so on. `required` are the ids that a
    conversation needs: those that end a generation, and the control tokens that the chat template writes.
    """

    size: int = field(compare=False)
    fingerprint: str
    pieces: tuple[bytes, ...] = field(compare=False)
    kinds: bytes = field(compare=False)
    required: frozenset[int] = frozenset()

    @classmethod
    def of(cls, pieces: Sequence[bytes], kinds: bytes, required: frozenset[int] = frozenset()) -> Vocabulary:
        """Return the hashed vocabulary of `pieces` and their `kinds`, one of each per token id."""
        whole = hashlib.sha256()
        for piece, kind in zip(pieces, kinds, strict=True):
            whole.update(struct.pack("<IB", len(piece), kind) + piece)
        return cls(len(pieces), whole.hexdigest(), tuple(pieces), kinds, required)

    def match(self, other: Vocabulary) -> VocabularyMatch:
        """Compare two vocabularies: models of one family often differ in how many unused tokens they have, what those
        are called, and of which kind they are."""
        shared = min(self.size, other.size)
        if self.fingerprint == other.fingerprint:
            return VocabularyMatch(shared)
        longest = max(self.size, other.size)
        unequal = (i for i, (a, b) in enumerate(zip(self.pieces, other.pieces, strict=False)) if a != b)
        for token in chain(unequal, range(shared, longest)):
            if self.conflicts(token, other.entry(token)) or token in other.required:
                return VocabularyMatch(shared, token)
        return VocabularyMatch(shared)

    def written(self) -> dict[bytes, int]:
        """Return the texts that stand for themselves in ordinary texts, each with its lowest token, if possible not a
        single byte's."""
        found: dict[bytes, int] = {}
        for single in (False, True):
            for token, (piece, kind) in enumerate(zip(self.pieces, self.kinds, strict=True)):
                if piece and bool(kind & _BYTE) == single and (kind & _DEFINED or _is_written(piece, kind)):
                    found.setdefault(piece, token)
        return found

    def markup(self) -> list[int]:
        """Return the ids that no value in a reply holds: control tokens, unused tokens, and marks of its parts."""
        return [
            token for token, (piece, kind) in enumerate(zip(self.pieces, self.kinds, strict=True))
            if kind & (_UNUSED | _CONTROL) or (kind & _DEFINED and piece[:1] == b"<" and piece[-1:] == b">")
        ]  # fmt: skip

    def entry(self, token: int) -> Entry | None:
        """Return the text and the kind of a token, None beyond the vocabulary."""
        return (self.pieces[token], self.kinds[token]) if token < self.size else None

    def conflicts(self, token: int, theirs: Entry | None) -> bool:
        """Return whether `token`, which is `theirs` in another vocabulary (None: missing there), shows that the two are
        of different tokenizers: its texts differ, and it is required, or either is written in ordinary texts."""
        ours = self.entry(token)
        if ours is not None and theirs is not None and ours[0] == theirs[0]:
            return False
        return token in self.required or any(one is not None and _is_written(*one) for one in (ours, theirs))


def _is_written(piece: bytes, kind: int) -> bool:
    """Return whether a token occurs in ordinary texts, and not only as padding or as a control token."""
    return bool(kind & _WRITTEN) and not kind & (_UNUSED | _CONTROL) and not _FILLER.fullmatch(piece)


TOKENIZER = "tokenizer."
"""Prefix of the entries of a file that describe its tokenizer."""


def tokenizer_hash(file: ModelFile) -> bytes:
    """Return a hash of all that a file says about its tokenizer, its chat template included."""
    digest = hashlib.sha256()
    with file.path.open("rb") as source:
        entries = raw_entries([source], file.parts[0])
    for key, raw in sorted(entries.items()):
        if key.startswith(TOKENIZER):
            said = raw[8 + len(key.encode()) :]  # the type, and the value
            digest.update(struct.pack("<QQ", len(key), len(said)) + key.encode() + said)
    return digest.digest()
