"""The engine's array types, and the meaning of token ids, with a cheap way for two sides to compare theirs."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]


def common_prefix(a: Ids, b: Ids) -> int:
    """Return how many tokens `a` (n,) and `b` (m,) share from the start."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:  # the common case among many sessions, and the cheap one
        return 0
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n


BLOCK = 256


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes and the kind of every token id.

    `fingerprint` is the SHA-256 over all of them in hexadecimal. `block_hashes` holds 8 bytes per 256 tokens: two sides
    whose fingerprints differ exchange these, and then the tokens of the first differing block. `pieces` shows control
    tokens as text (`<|im_end|>`); a kind is the bit that llama.cpp gives to normal, control, byte tokens and so on.
    """

    size: int
    fingerprint: str
    block_hashes: tuple[bytes, ...]
    pieces: tuple[bytes, ...]
    kinds: bytes

    @classmethod
    def of(cls, pieces: Sequence[bytes], kinds: bytes) -> Vocabulary:
        """Return the hashed vocabulary of `pieces` and their `kinds`, one of each per token id."""
        whole, blocks = hashlib.sha256(), []
        for start in range(0, len(pieces), BLOCK):
            block = b"".join(
                struct.pack("<IB", len(piece), kind) + piece
                for piece, kind in zip(pieces[start : start + BLOCK], kinds[start : start + BLOCK], strict=True)
            )
            whole.update(block)
            blocks.append(hashlib.blake2b(block, digest_size=8).digest())
        return cls(len(pieces), whole.hexdigest(), tuple(blocks), tuple(pieces), kinds)

    def token_bytes(self, token: int) -> bytes:
        """Return the text of a token, control tokens included. It need not be whole UTF-8."""
        return self.pieces[token]

    def first_difference(self, other: Vocabulary) -> int | None:
        """Return the lowest id on which the two disagree (the shorter one's size, where it is a prefix of the longer);
        None where they are equal."""
        if self.fingerprint == other.fingerprint:
            return None
        for i in range(min(self.size, other.size)):
            if self.pieces[i] != other.pieces[i] or self.kinds[i] != other.kinds[i]:
                return i
        return min(self.size, other.size)

    def first_different_block(self, hashes: Sequence[bytes]) -> int | None:
        """Return the first block of 256 tokens whose hash differs from the given one; None where all are equal."""
        for i, (mine, theirs) in enumerate(zip(self.block_hashes, hashes, strict=False)):
            if mine != theirs:
                return i
        return None if len(hashes) == len(self.block_hashes) else min(len(hashes), len(self.block_hashes))
