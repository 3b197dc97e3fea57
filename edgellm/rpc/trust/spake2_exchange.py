"""SPAKE2 with key confirmation: two devices find out whether both know the code, and nobody who listens learns it.

The password-authenticated key exchange is bound to both certificates: it takes their fingerprints for the identities of
its two sides, and what each side proves afterwards covers the certificates as it has seen them. Somebody in the middle
who puts in a certificate of his own leaves the two sides with different keys.

Knowing the code is not owning a certificate: certificates are public. Each side therefore also signs the transcript
with its certificate's private key, so that nobody pairs, or renames, a device whose key they do not hold.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from spake2 import SPAKE2_A, SPAKE2_B

from edgellm.errors import PairingFailed
from edgellm.rpc.trust.identity import Certificate, Identity
from edgellm.rpc.trust.pairing_code import Code

_LABEL = b"edgellm pairing 2"
_SIGNED = {"A": b"edgellm pairing 2 signature A\0", "B": b"edgellm pairing 2 signature B\0"}
_NONCE = bytes(12)  # each key seals one message
_KEY = 32  # bytes


class Exchange:
    """One side of one try: `spake` goes out, `agree` takes the other's, then each checks what the other confirms.

    Side A is the device on which the code is typed; it confirms first, so that a guess costs the window.
    """

    def __init__(self, side: Literal["A", "B"], code: Code, own: Identity) -> None:
        self._side, self._own = side, own
        self._other: Certificate | None = None
        self._spake = (SPAKE2_A if side == "A" else SPAKE2_B)(code.password)
        self.spake: bytes = self._spake.start()
        self._transcript = b""
        self._mac: dict[str, bytes] = {}
        self._seal: dict[str, bytes] = {}

    def agree(self, other: Certificate, spake: bytes) -> None:
        """Derive the keys from the code and from everything that both sides have seen.

        Raises:
            PairingFailed: the other side's message is not a SPAKE2 message.
        """
        self._other = other
        mine, theirs = (self._own.certificate, self.spake), (other, spake)
        (cert_a, spake_a), (cert_b, spake_b) = (mine, theirs) if self._side == "A" else (theirs, mine)
        self._spake.idA, self._spake.idB = cert_a.id.digest, cert_b.id.digest
        try:
            shared = self._spake.finish(spake)
        except Exception as error:  # noqa: BLE001 - whatever the library says of a stranger's bytes
            raise PairingFailed(f"The other side sent no SPAKE2 message ({type(error).__name__}).", _AGAIN) from None
        parts = (_LABEL, cert_a.der, cert_b.der, spake_a, spake_b)
        self._transcript = hashlib.sha256(b"".join(len(part).to_bytes(4, "little") + part for part in parts)).digest()
        keys = HKDF(hashes.SHA256(), 4 * _KEY, None, self._transcript).derive(shared)
        mac_a, mac_b, seal_a, seal_b = (keys[at : at + _KEY] for at in range(0, 4 * _KEY, _KEY))
        self._mac, self._seal = {"A": mac_a, "B": mac_b}, {"A": seal_a, "B": seal_b}

    def confirm(self, words: bytes) -> tuple[bytes, bytes, bytes]:
        """Return the MAC that proves knowledge of the key, `words` encrypted with it, and the signature that proves
        ownership of this side's certificate."""
        sealed = ChaCha20Poly1305(self._seal[self._side]).encrypt(_NONCE, words, self._transcript)
        return self._tag(self._side, sealed), sealed, self._own.sign(self._statement(self._side, sealed))

    def check(self, mac: bytes, sealed: bytes, signature: bytes) -> bytes:
        """Return the other side's decrypted words.

        Raises:
            PairingFailed: the other side does not know the code, has seen other certificates, or does not hold the
                private key of the certificate that it has shown.
        """
        other = "B" if self._side == "A" else "A"
        if not hmac.compare_digest(mac, self._tag(other, sealed)):
            raise PairingFailed(*_WRONG)
        if self._other is None or not self._other.signed(signature, self._statement(other, sealed)):
            raise PairingFailed(*_NOT_ITS_OWN)
        try:
            return ChaCha20Poly1305(self._seal[other]).decrypt(_NONCE, sealed, self._transcript)
        except InvalidTag:
            raise PairingFailed(*_WRONG) from None

    def done(self) -> bytes:
        """Return side A's last MAC, which says that A has checked B's confirmation."""
        return self._tag("A", b"done")

    def check_done(self, mac: bytes) -> None:
        """Check side A's last MAC. Raises PairingFailed if it is wrong."""
        if not hmac.compare_digest(mac, self.done()):
            raise PairingFailed(*_WRONG)

    def _statement(self, side: str, sealed: bytes) -> bytes:
        """Return what `side` signs: everything that both have seen, and its own words (its name and rights)."""
        return _SIGNED[side] + self._transcript + hashlib.sha256(sealed).digest()

    def _tag(self, side: str, words: bytes) -> bytes:
        return hmac.digest(self._mac[side], self._transcript + words, "sha256")


_AGAIN = "Run `edgellm pair` again for a new code."
_WRONG = ("The code is wrong, or somebody in between has changed what was said; nothing was paired.", _AGAIN)
_NOT_ITS_OWN = (
    "The other device knows the code, but does not hold the key of the certificate it shows; nothing was paired.",
    "Somebody may be posing as another device. Pair only with a device in front of you, with a new code.",
)
