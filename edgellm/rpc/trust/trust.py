"""This device among those it trusts, and the TLS that follows from that.

gRPC checks a certificate against the paired ones, which are its only roots. That alone is not relied on: the server
looks at the fingerprint of what the client has shown for every call (`auth_interceptor`), and as gRPC does not let a
client see the server's certificate, the server proves with a signature which device it is (`handshake`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import sleep
from typing import Self

import grpc

from edgellm.errors import PairingRequired, TrustUnusable
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.identity import Identity
from edgellm.rpc.trust.peer_store import Peer, Peers

_SETTLE = 0.1  # seconds in which connections that have begun are done with the list that will be replaced


@dataclass(frozen=True, slots=True)
class Trust:
    """Who this device is, and whom it knows."""

    identity: Identity
    peers: Peers

    @classmethod
    def here(cls, folder: Path | None = None) -> Self:
        """Of this user on this machine; an identity is made at the first call. Raises TrustUnusable."""
        return cls(Identity.here(folder), Peers(folder))

    def require_peers(self) -> list[Peer]:
        """The paired devices, where there are any.

        Raises:
            PairingRequired: there is none, so nobody could be spoken to.
        """
        peers = self.peers.all()
        if not peers:
            raise PairingRequired(
                "No device is paired with this one, and a stranger is neither asked nor answered.",
                "Pairing comes first: run `edgellm pair` here, and what it shows on the other device.",
            )
        return peers

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return mutual TLS with whoever is paired at the moment of each connection.

        gRPC asks before each connection, one at a time, and what it is told replaces what it had, which it frees at
        once: also under connections that have asked already and are about to use it, and that ends the process. So it
        is told what is new alone, and only after a pause, long beside the microseconds in which they use it.
        """
        told = self._roots()

        def news() -> grpc.ServerCertificateConfiguration | None:
            nonlocal told
            roots = self._roots()
            if roots == told:
                return None
            sleep(_SETTLE)
            told = roots
            return self._configuration(roots)

        return grpc.dynamic_ssl_server_credentials(self._configuration(told), news, True)  # type: ignore[arg-type]

    def channel_credentials(self, device: DeviceID | None) -> grpc.ChannelCredentials:
        """Mutual TLS with one paired device, or with any of them, which then must say who it is."""
        peer = None if device is None else self.peers.get(device)
        pem = self.identity.certificate.pem
        return grpc.ssl_channel_credentials(
            self._roots() if peer is None else peer.certificate.pem, self.identity.key_pem, pem
        )

    def _configuration(self, roots: bytes) -> grpc.ServerCertificateConfiguration:
        own = (self.identity.key_pem, self.identity.certificate.pem)
        return grpc.ssl_server_certificate_configuration([own], roots)

    def _roots(self) -> bytes:
        """The paired certificates. This device's own is with them so that a copy of it can be told what it is."""
        peers: list[Peer] = []
        with suppress(TrustUnusable):  # then there are none
            peers = self.peers.all()
        return b"".join([self.identity.certificate.pem, *(peer.certificate.pem for peer in peers)])
