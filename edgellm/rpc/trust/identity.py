"""The identity of this device: a P-256 key and a self-signed certificate, in a file that only the user can read.

The certificate's hash is the ID of the device, with a short form that people can read aloud and type.

The web server has a certificate of its own (`web_certificate`), so that a browser's trust in it means nothing for
pairing."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgellm.errors import InvalidOption, NotPaired, TrustUnusable
from edgellm.state import lock_folder, read_private, write_private
from edgellm.system import data_dir

# 32 characters without look-alikes: I and L are read as 1, O as 0, B as 8.
ALPHABET = "0123456789ACDEFGHJKMNPQRSTUVWXYZ"
_LOOK_ALIKES = str.maketrans("ILOB", "1108", "- \t\n")
_SHORT_LENGTH = 7  # characters of the short form, without its check character


@dataclass(frozen=True, slots=True, order=True)
class DeviceID:
    """The SHA-256 of a certificate's DER bytes, or of a phone's key. Two devices are the same exactly when these are
    equal. The full form is in hex. The short form, for screens, is 7 characters and a check character: 35 bits are
    enough to distinguish a user's devices, but not a basis for trust."""

    digest: bytes

    def __post_init__(self) -> None:
        if len(self.digest) != 32:
            raise InvalidOption(f"A device ID has 32 bytes, not {len(self.digest)}.", _EXAMPLE)

    @classmethod
    def of(cls, certificate: bytes) -> Self:
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


DAYS = 397  # days: some browsers refuse longer validity
SERVER_NAME = "edgellm"  # name in every certificate: TLS needs a name, and the device's own stays private
_RENEW = timedelta(days=30)
_PEM, _DER = serialization.Encoding.PEM, serialization.Encoding.DER
_ECDSA = ec.ECDSA(hashes.SHA256())
_USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def web_certificate(folder: Path, hosts: Sequence[str]) -> tuple[Path, Path]:
    """Return the files of a certificate for `hosts` (names or IP addresses) and of its key, in PEM; create them if none
    fits or the certificate expires soon. Raise TrustUnusable."""
    certificate, private = folder / "certificate.pem", folder / "certificate-key.pem"
    with lock_folder(folder):
        if not _fits(read_private(certificate) or b"", read_private(private) or b"", hosts):
            key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
            made = _self_signed(
                key, x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edgellm HTTP")]), dict.fromkeys(hosts),
                (now - timedelta(days=1), now + timedelta(days=DAYS - 1)),  # clocks differ
                {
                    x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]): False,
                    x509.SubjectKeyIdentifier.from_public_key(key.public_key()): False,
                },
            )  # fmt: skip
            write_private(private, _private_pem(key))
            write_private(certificate, made.public_bytes(_PEM))
    return certificate, private


def _fits(pem: bytes, private: bytes, hosts: Sequence[str]) -> bool:
    try:
        found, key = x509.load_pem_x509_certificate(pem), serialization.load_pem_private_key(private, None)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.ExtensionNotFound):
        return False
    is_current = found.not_valid_after_utc - datetime.now(UTC) > _RENEW
    return is_current and set(map(_general_name, hosts)) <= set(names) and key.public_key() == found.public_key()


def _self_signed(
    key: ec.EllipticCurvePrivateKey, name: x509.Name, hosts: Iterable[str], period: tuple[datetime, datetime],
    extensions: Mapping[x509.ExtensionType, bool],
) -> x509.Certificate:  # fmt: skip
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(period[0])
        .not_valid_after(period[1])
        .add_extension(x509.SubjectAlternativeName([_general_name(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical=critical)
    return builder.sign(key, hashes.SHA256())


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def trust_folder() -> Path:
    """Return the folder of the identity and the list of paired devices. It need not exist."""
    return data_dir() / "trust"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A device's certificate, checked to be one that edgellm makes."""

    der: bytes

    @classmethod
    def of(cls, der: bytes) -> Self:
        """Return the certificate if it signs nothing but itself: anything signed by a certificate authority among the
        paired devices would pass TLS, and a copied subject would hide another device's certificate. Raise NotPaired."""
        try:
            found = x509.load_der_x509_certificate(der)
            key = found.public_key()
            constraints = found.extensions.get_extension_for_class(x509.BasicConstraints).value
            found.verify_directly_issued_by(found)
        except Exception as error:  # noqa: BLE001 - the library has an error of its own for every oddity
            raise _rejected(f"it is damaged or not self-signed ({type(error).__name__})") from None
        if constraints.ca:
            raise _rejected("it may sign other certificates")
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise _rejected("its key is not on the curve P-256")
        if found.subject != _subject(key):
            raise _rejected("its subject does not follow from its key")
        return cls(der)

    @classmethod
    def of_pem(cls, pem: bytes) -> Self:
        return cls.of(_to_der(pem))

    @property
    def pem(self) -> bytes:
        return x509.load_der_x509_certificate(self.der).public_bytes(_PEM)

    @property
    def id(self) -> DeviceID:
        return DeviceID.of(self.der)

    def signed(self, signature: bytes, message: bytes) -> bool:
        key = x509.load_der_x509_certificate(self.der).public_key()
        try:
            key.verify(signature, message, _ECDSA)  # type: ignore[union-attr,call-arg,arg-type]  # `of` saw its kind
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, slots=True)
class Identity:
    """This device's key and certificate."""

    key: ec.EllipticCurvePrivateKey
    certificate: Certificate

    @classmethod
    def new(cls) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        usage = dict.fromkeys(_USAGES, False) | {"digital_signature": True}
        certificate = _self_signed(
            key, _subject(key.public_key()), [SERVER_NAME],
            (datetime(1970, 1, 1, tzinfo=UTC),  # home devices lose their clocks
             datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)),  # X.509's "no end"
            {x509.KeyUsage(**usage): True},
        )  # fmt: skip
        return cls(key, Certificate(certificate.public_bytes(_DER)))

    @classmethod
    def load(cls, folder: Path | None = None) -> Self:
        """Return this device's identity; create it at the first call."""
        path = (folder or trust_folder()) / "identity.pem"
        with lock_folder(path.parent):
            if (stored := read_private(path)) is None:
                identity = cls.new()
                write_private(path, identity.key_pem + identity.certificate.pem)
                return identity
        try:
            key, certificate = serialization.load_pem_private_key(stored, None), Certificate.of_pem(stored)
            public = x509.load_der_x509_certificate(certificate.der).public_key()
            if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != public:
                raise ValueError("key and certificate do not match")
        except (ValueError, TypeError, UnsupportedAlgorithm, NotPaired) as error:
            raise TrustUnusable(
                f"The identity of this device in {path} is damaged: {str(getattr(error, 'what', error)).rstrip('.')}.",
                "Move the file away: a new one will be created, and every device must be paired again.",
            ) from None
        return cls(key, certificate)

    @property
    def id(self) -> DeviceID:
        return self.certificate.id

    @property
    def key_pem(self) -> bytes:
        return _private_pem(self.key)

    def sign(self, message: bytes) -> bytes:
        """Return an ECDSA signature over SHA-256, in DER."""
        return self.key.sign(message, _ECDSA)


def pem_id(pem: bytes) -> DeviceID:
    return DeviceID.of(_to_der(pem))


def _to_der(pem: bytes) -> bytes:
    try:
        return x509.load_pem_x509_certificate(pem).public_bytes(_DER)
    except Exception:  # noqa: BLE001 - as above
        raise _rejected("it is damaged") from None


def _subject(key: ec.EllipticCurvePublicKey) -> x509.Name:
    """Return a subject unique to the key: TLS looks up a trusted certificate by its subject."""
    spki = key.public_bytes(_DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    name = f"{SERVER_NAME}-{hashlib.sha256(spki).hexdigest()[:32]}"
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _rejected(what: str) -> NotPaired:
    return NotPaired(
        f"The other device's certificate was not made by edgellm: {what}.", "Pair with a device that runs edgellm."
    )
