"""Identities that edgellm would never make, for the tests of what must not get in."""

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from edgellm.rpc.trust.identity import SERVER_NAME, Certificate, Identity, _subject
from edgellm.rpc.trust.trust import Known, Peer, Peers, Trust, read_rights


def certified(
    *, ca: bool = False, issuer: Identity | None = None, curve: str = "P-256", subject: str | None = None,
    constraints: bool = True,
) -> Identity:  # fmt: skip
    """A key and a certificate for it, signed by `issuer` or by itself."""
    key = ec.generate_private_key(ec.SECP384R1() if curve == "P-384" else ec.SECP256R1())
    name = _subject(key.public_key())
    if subject is not None:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    signer, signed_by = key, name
    if issuer is not None:
        signer, signed_by = issuer.key, x509.load_der_x509_certificate(issuer.certificate.der).subject
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(signed_by)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime(1970, 1, 1, tzinfo=UTC))
        .not_valid_after(datetime(9999, 12, 31, tzinfo=UTC))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(SERVER_NAME)]), critical=False)
    )
    if constraints:
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    made = builder.sign(signer, hashes.SHA256())
    return Identity(key, Certificate(made.public_bytes(serialization.Encoding.DER)))


class Gullible(Peers):
    """A list that has somehow taken in whom it never should."""

    def __init__(self, folder: Path, *more: Peer) -> None:
        super().__init__(folder)
        self.more = {peer.id: peer for peer in more}

    def _read(self) -> Known:
        return super()._read() | self.more


def device(folder: Path, identity: Identity | None = None) -> Trust:
    """A device with a folder, and an identity, of its own."""
    return Trust(identity or Identity.new(), Peers(folder))


def known(trust: Trust, name: str, rights: str = "verify") -> Peer:
    """A device as others list it."""
    return Peer(name, trust.identity.certificate, read_rights(rights.split()))


def befriend(one: Trust, other: Trust, rights: str = "verify", name: str = "one") -> None:
    """As if the two had been paired, `one` by this `name`, and `other`; each has these rights at the other."""
    one.peers.add(known(other, "other", rights))
    other.peers.add(known(one, name, rights))
