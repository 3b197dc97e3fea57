"""What a device is called: the SHA-256 of its certificate, written so that people can read it aloud and type it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Self

from edgellm.errors import InvalidOption

# 32 signs; of those that look alike one is left: I and L are read as 1, O as 0, B as 8.
SIGNS = "0123456789ACDEFGHJKMNPQRSTUVWXYZ"
_LOOK_ALIKES = str.maketrans("ILOB", "1108", "- \t\n")
_VALUE = {sign: value for value, sign in enumerate(SIGNS)}

_PART = 13  # signs in front of one check sign, in the full form
_SHORT = 7  # in the short form
_SIGNS = 52  # that hold 256 bits


@dataclass(frozen=True, slots=True, order=True)
class DeviceID:
    """The SHA-256 of a certificate's DER bytes. Two devices are the same exactly when these are equal.

    In full it is 8 groups of 7 signs, with a check sign in every second group. The short form, for screens, is the
    first 7 signs and a check sign, 35 bits: good for telling one's own devices apart, and never what trust hangs on.
    """

    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != 32:
            raise InvalidOption(f"A device ID has 32 bytes, and this one {len(self.digest)}.", _EXAMPLE)

    @classmethod
    def of(cls, certificate: bytes) -> Self:
        """Return the ID of the device with this certificate, in DER."""
        return cls(hashlib.sha256(certificate).digest())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the full form, in any case and grouping; look-alike signs are accepted for each other.

        Raises:
            InvalidOption: the text is not a device ID, or is mistyped; says in which group.
        """
        signs = _signs(text)
        if len(signs) != _SIGNS + _SIGNS // _PART:
            raise InvalidOption(f"{text!r} has {len(signs)} signs, and a device ID has 56.", _EXAMPLE)
        parts = [signs[start : start + _PART + 1] for start in range(0, len(signs), _PART + 1)]
        for number, part in enumerate(parts):
            if part[-1] != _check(part[:-1]):
                raise InvalidOption(f"The device ID is mistyped in group {2 * number + 1} or {2 * number + 2}.", _LOOK)
        value = 0
        for sign in "".join(part[:-1] for part in parts):
            value = value * 32 + _VALUE[sign]
        if value & 0xF:
            raise InvalidOption("The device ID does not end as one can.", _LOOK)
        return cls((value >> 4).to_bytes(32, "big"))

    @property
    def short(self) -> str:
        """The short form, such as K7QF-2MX9."""
        signs = self._all()[:_SHORT]
        signs += _check(signs)
        return f"{signs[:4]}-{signs[4:]}"

    def __str__(self) -> str:
        signs = self._all()
        checked = "".join(part + _check(part) for part in (signs[at : at + _PART] for at in range(0, _SIGNS, _PART)))
        return "-".join(checked[at : at + 7] for at in range(0, len(checked), 7))

    def _all(self) -> str:
        value = int.from_bytes(self.digest, "big") << 4
        return "".join(SIGNS[(value >> shift) & 31] for shift in range(5 * (_SIGNS - 1), -1, -5))


def parse_short(text: str) -> str:
    """Return the short form as `DeviceID.short` writes it, from text typed as loosely as `DeviceID.parse` allows.

    Raises:
        InvalidOption: the text is not a short ID, or is mistyped.
    """
    signs = _signs(text)
    if len(signs) != _SHORT + 1:
        raise InvalidOption(f"{text!r} has {len(signs)} signs, and a short device ID has 8.", _EXAMPLE)
    if signs[-1] != _check(signs[:-1]):
        raise InvalidOption(f"The device ID {text!r} is mistyped.", _LOOK)
    return f"{signs[:4]}-{signs[4:]}"


def _signs(text: str) -> str:
    signs = text.upper().translate(_LOOK_ALIKES)
    for sign in signs:
        if sign not in _VALUE:
            raise InvalidOption(f"{text!r} is no device ID: {sign!r} is in none.", _EXAMPLE)
    return signs


def _check(signs: str) -> str:
    """Return the check sign: the sum of a^(i+1)·x_i over GF(32), with a a root of x⁵+x²+1. As a has order 31 and there
    are fewer signs, every single wrong sign and every exchange of two signs changes it."""
    total = 0
    for sign in signs:
        total = _times_a(total ^ _VALUE[sign])
    return SIGNS[total]


def _times_a(value: int) -> int:
    value <<= 1
    return value ^ 0b100101 if value & 32 else value


_EXAMPLE = "`edgellm peers` shows the IDs of the devices that you have paired."
_LOOK = "Compare it with the other screen."
