"""Text for a screen, without characters that control the terminal."""

from __future__ import annotations

import codecs
from types import MappingProxyType

from edgellm.errors import InputNotText


def _harmless() -> dict[int, str]:
    table = {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}  # ESC is shown as ␛
    table[ord("\r")] = ""  # would let later text overwrite earlier text
    table[0x7F] = "␡"
    table |= dict.fromkeys(range(0x80, 0xA0), "\ufffd")
    table |= dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\ufffd")  # reverse the reading order
    return table | {0x2028: "\n", 0x2029: "\n"}


_HARMLESS = MappingProxyType(_harmless())


def harmless(text: str) -> str:
    """Return `text` with every control character made visible; line ends and tabs stay."""
    return text.translate(_HARMLESS)


def one_line(text: str) -> str:
    """Return `text` as `harmless` does, on one line."""
    return " ".join(harmless(text).split())


def decode(data: bytes, name: str) -> str:
    """Decode a user's input.

    Raises:
        InputNotText: it is not UTF-8; says where.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding = "UTF-16" if utf16 else "ISO-8859-1"
        raise InputNotText(
            f"{name} is not UTF-8 text: byte {error.start} is 0x{data[error.start]:02x}.",
            f"Convert it first, such as with: iconv -f {encoding} -t UTF-8",
        ) from error


def size(count: int) -> str:
    """Return a number of bytes in a suitable unit: 0 B, 12.3 kB, 4.0 MB, 1.2 GB."""
    amount, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 1000:
            break
        amount, unit = amount / 1000, larger
    return f"{count} B" if unit == "B" else f"{amount:.1f} {unit}"


def ago(seconds: float) -> str:
    """Return how long ago something was, for people to read."""
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"
