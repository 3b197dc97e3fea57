"""A decoder that turns bytes into characters as they complete."""

from __future__ import annotations

import codecs


class Utf8:
    """Decodes a stream of byte pieces that need not end where characters do; wrong bytes become U+FFFD."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> str:
        """Return the characters that `piece` completes."""
        return self._decoder.decode(piece)

    @property
    def half_done(self) -> bool:
        """Return whether the pieces so far end within a character."""
        return bool(self._decoder.getstate()[0])

    def end(self) -> str:
        """Return what is left of a character that never became whole."""
        return self._decoder.decode(b"", final=True)
