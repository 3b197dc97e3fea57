"""This device's identity and its paired devices, and the TLS credentials that follow from them.

gRPC checks a certificate against the paired ones, which are its only roots. That alone is not relied on: the server
checks the fingerprint of the client's certificate for every call (`auth_interceptor`), and as gRPC does not let a
client see the server's certificate, the server proves its identity with a signature (`handshake`)."""

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

_SETTLE_SECONDS = 0.1  # time for new connections to finish with a replaced configuration


@dataclass(frozen=True, slots=True)
class Trust:
    """This device's identity and its list of paired devices."""

    identity: Identity
    peers: Peers

    @classmethod
    def load(cls, folder: Path | None = None) -> Self:
        """Return the trust of this user on this machine; create an identity at the first call. Raise TrustUnusable."""
        return cls(Identity.load(folder), Peers(folder))

    def require_peers(self) -> list[Peer]:
        """Return the paired devices, at least one. Raise PairingRequired without."""
        if not (peers := self.peers.all()):
            raise PairingRequired(
                "No device is paired with this one, and only paired devices may connect.",
                "Pair the devices first: run `edgellm pair` here, and the command that it shows on the other device.",
            )
        return peers

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for mutual TLS with the devices that are paired at the time of each connection. gRPC asks
        for the configuration before each connection, one at a time. A new configuration replaces the old one, which
        gRPC frees at once, even if other connections are about to use it, and that crashes the process. So it gets a
        configuration only when the list has changed, and after a pause much longer than their microseconds of use."""
        sent = self._roots()

        def changed_configuration() -> grpc.ServerCertificateConfiguration | None:
            nonlocal sent
            roots = self._roots()
            if roots == sent:
                return None
            sleep(_SETTLE_SECONDS)
            sent = roots
            return self._configuration(roots)

        return grpc.dynamic_ssl_server_credentials(self._configuration(sent), changed_configuration, True)  # type: ignore[arg-type]

    def channel_credentials(self, device: DeviceID | None) -> grpc.ChannelCredentials:
        """Return credentials for mutual TLS with one paired device, or with any, which must then prove its identity."""
        peer = None if device is None else self.peers.get(device)
        pem = self.identity.certificate.pem
        return grpc.ssl_channel_credentials(
            self._roots() if peer is None else peer.certificate.pem, self.identity.key_pem, pem
        )

    def _configuration(self, roots: bytes) -> grpc.ServerCertificateConfiguration:
        own = (self.identity.key_pem, self.identity.certificate.pem)
        return grpc.ssl_server_certificate_configuration([own], roots)

    def _roots(self) -> bytes:
        peers: list[Peer] = []
        with suppress(TrustUnusable):  # without a readable list there are none
            peers = self.peers.all()
        return b"".join([self.identity.certificate.pem, *(peer.certificate.pem for peer in peers)])
