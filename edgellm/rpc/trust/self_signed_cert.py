"""A certificate for the HTTP door: signed by itself, for the names by which it is called.

It is not the device's identity: a browser that is told to trust it is told nothing about pairing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from edgellm.storage.private_files import locked, read_private, write_private

DAYS = 397  # not all browsers accept longer ones
_RENEW = timedelta(days=30)
_PEM = serialization.Encoding.PEM


def web_certificate(folder: Path, hosts: Sequence[str]) -> tuple[Path, Path]:
    """Return the files of a certificate for `hosts` (names or IP addresses) and of its key, in PEM; create them if none
    fits or the certificate expires soon.

    Raises:
        TrustUnusable: they cannot be read or written.
    """
    certificate, private = folder / "certificate.pem", folder / "certificate-key.pem"
    with locked(folder):
        if not _fits(read_private(certificate), hosts) or not _is_key(read_private(private), read_private(certificate)):
            made, key = _made(hosts)
            write_private(private, key)
            write_private(certificate, made)
    return certificate, private


def _fits(pem: bytes | None, hosts: Sequence[str]) -> bool:
    if pem is None:
        return False
    try:
        found = x509.load_pem_x509_certificate(pem)
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return False
    lasts = found.not_valid_after_utc - datetime.now(UTC) > _RENEW
    return lasts and {_name(host) for host in hosts} <= set(names)


def _is_key(pem: bytes | None, certificate: bytes | None) -> bool:
    try:
        key = serialization.load_pem_private_key(pem or b"", None)
        return key.public_key() == x509.load_pem_x509_certificate(certificate or b"").public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False


def _made(hosts: Sequence[str]) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edgellm HTTP")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks differ
        .not_valid_after(now + timedelta(days=DAYS - 1))
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in dict.fromkeys(hosts)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(_PEM), private


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
