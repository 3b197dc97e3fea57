"""Device IDs: the SHA-256 of a device's certificate, and a short form that people can read aloud and type."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Self

from edgellm.errors import InvalidOption

# 32 characters without look-alikes: I and L are read as 1, O as 0, B as 8.
ALPHABET = "0123456789ACDEFGHJKMNPQRSTUVWXYZ"
_LOOK_ALIKES = str.maketrans("ILOB", "1108", "- \t\n")
_SHORT_LENGTH = 7  # characters of the short form, without its check character


@dataclass(frozen=True, slots=True, order=True)
class DeviceID:
    """The SHA-256 of a certificate's DER bytes. Two devices are the same exactly when these are equal. The full form is
    in hex. The short form, for screens, is 7 characters and a check character: 35 bits are enough to distinguish a
    user's devices, but not a basis for trust."""

    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != 32:
            raise InvalidOption(f"A device ID has 32 bytes, not {len(self.digest)}.", _EXAMPLE)

    @classmethod
    def of(cls, certificate: bytes) -> Self:
        """Return the ID of the device with this certificate, in DER."""
        return cls(hashlib.sha256(certificate).digest())

    @property
    def short(self) -> str:
        """Return the short form, such as K7QF-2MX9."""
        value = int.from_bytes(self.digest[:5], "big") >> 5
        return _grouped("".join(ALPHABET[(value >> shift) & 31] for shift in range(5 * (_SHORT_LENGTH - 1), -1, -5)))

    def __str__(self) -> str:
        return self.digest.hex()


def parse_short(text: str) -> str:
    """Return the short form as `DeviceID.short` writes it, from text in any case and grouping, and with look-alike
    characters. Raise InvalidOption for anything else."""
    chars = text.upper().translate(_LOOK_ALIKES)
    if len(chars) != _SHORT_LENGTH + 1 or not set(chars) <= set(ALPHABET):
        raise InvalidOption(f"{text!r} is not a short device ID, of 8 characters.", _EXAMPLE)
    if (found := _grouped(chars[:-1])) != f"{chars[:4]}-{chars[4:]}":
        raise InvalidOption(f"The device ID {text!r} is mistyped.", "Compare it with the other screen.")
    return found


def _grouped(chars: str) -> str:
    """Return the characters with a check character: the sum of a^(i+1)·x_i over GF(32), with a a root of x⁵+x²+1. As a
    has order 31 and there are fewer characters, every single wrong character and every exchange of two changes it."""
    total = 0
    for char in chars:
        total = (total ^ ALPHABET.index(char)) << 1
        total ^= 0b100101 if total & 32 else 0
    return f"{chars[:4]}-{chars[4:]}{ALPHABET[total]}"


_EXAMPLE = "`edgellm peers` shows the IDs of the devices that you have paired."
