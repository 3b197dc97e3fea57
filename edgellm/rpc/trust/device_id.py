"""Device IDs: the SHA-256 of a device's certificate, in a form that people can read aloud and type."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Self

from edgellm.errors import InvalidOption

# 32 characters without look-alikes: I and L are read as 1, O as 0, B as 8.
ALPHABET = "0123456789ACDEFGHJKMNPQRSTUVWXYZ"
_LOOK_ALIKES = str.maketrans("ILOB", "1108", "- \t\n")
_VALUE = {char: value for value, char in enumerate(ALPHABET)}

_GROUP = 13  # characters in front of one check character, in the full form
_SHORT_LENGTH = 7  # characters of the short form
_LENGTH = 52  # characters for 256 bits


@dataclass(frozen=True, slots=True, order=True)
class DeviceID:
    """The SHA-256 of a certificate's DER bytes. Two devices are the same exactly when these are equal. The full form is
    8 groups of 7 characters, with a check character in every second group. The short form, for screens, is the first 7
    characters and a check character, 35 bits: enough to distinguish a user's devices, but not a basis for trust."""

    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != 32:
            raise InvalidOption(f"A device ID has 32 bytes, not {len(self.digest)}.", _EXAMPLE)

    @classmethod
    def of(cls, certificate: bytes) -> Self:
        """Return the ID of the device with this certificate, in DER."""
        return cls(hashlib.sha256(certificate).digest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the ID in `text`: the full form, in any case and grouping, and with look-alike characters. Raise
        InvalidOption for anything else; says in which group it is mistyped."""
        chars = _normalize(text)
        if len(chars) != _LENGTH + _LENGTH // _GROUP:
            raise InvalidOption(f"{text!r} has {len(chars)} characters; a device ID has 56.", _EXAMPLE)
        parts = [chars[start : start + _GROUP + 1] for start in range(0, len(chars), _GROUP + 1)]
        for number, part in enumerate(parts):
            if part[-1] != _check(part[:-1]):
                raise InvalidOption(
                    f"The device ID is mistyped in group {2 * number + 1} or {2 * number + 2}.", _COMPARE
                )
        value = 0
        for char in "".join(part[:-1] for part in parts):
            value = value * 32 + _VALUE[char]
        if value & 0xF:
            raise InvalidOption("The device ID is mistyped in its last group.", _COMPARE)
        return cls((value >> 4).to_bytes(32, "big"))

    @property
    def short(self) -> str:
        """Return the short form, such as K7QF-2MX9."""
        chars = self._all()[:_SHORT_LENGTH]
        chars += _check(chars)
        return f"{chars[:4]}-{chars[4:]}"

    def __str__(self) -> str:
        chars = self._all()
        checked = "".join(part + _check(part) for part in (chars[at : at + _GROUP] for at in range(0, _LENGTH, _GROUP)))
        return "-".join(checked[at : at + 7] for at in range(0, len(checked), 7))

    def _all(self) -> str:
        value = int.from_bytes(self.digest, "big") << 4
        return "".join(ALPHABET[(value >> shift) & 31] for shift in range(5 * (_LENGTH - 1), -1, -5))


def parse_short(text: str) -> str:
    """Return the short form as `DeviceID.short` writes it, from text typed as loosely as `DeviceID.parse` allows."""
    chars = _normalize(text)
    if len(chars) != _SHORT_LENGTH + 1:
        raise InvalidOption(f"{text!r} has {len(chars)} characters; a short device ID has 8.", _EXAMPLE)
    if chars[-1] != _check(chars[:-1]):
        raise InvalidOption(f"The device ID {text!r} is mistyped.", _COMPARE)
    return f"{chars[:4]}-{chars[4:]}"


def _normalize(text: str) -> str:
    chars = text.upper().translate(_LOOK_ALIKES)
    for char in chars:
        if char not in _VALUE:
            raise InvalidOption(f"{text!r} is not a device ID: {char!r} does not occur in device IDs.", _EXAMPLE)
    return chars


def _check(chars: str) -> str:
    """Return the check character: the sum of a^(i+1)·x_i over GF(32), with a a root of x⁵+x²+1. As a has order 31 and
    there are fewer characters, every single wrong character and every exchange of two changes it."""
    total = 0
    for char in chars:
        total = (total ^ _VALUE[char]) << 1
        total ^= 0b100101 if total & 32 else 0
    return ALPHABET[total]


_EXAMPLE = "`edgellm peers` shows the IDs of the devices that you have paired."
_COMPARE = "Compare it with the other screen."
