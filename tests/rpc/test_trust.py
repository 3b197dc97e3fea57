"""What gRPC is told of the paired devices, connection by connection."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from edgellm.rpc.address import Address
from edgellm.rpc.channel import open_channel
from edgellm.rpc.trust.trust import Trust
from tests.rpc.doors import in_loop, serving, steal
from tests.rpc.strangers import befriend, device


@in_loop
async def test_the_list_is_replaced_when_it_has_changed_and_after_a_pause(
    host: Trust, guest: Trust, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC frees what it replaces, perhaps under a connection that is about to use it: then the process ends."""
    made: list[bytes] = []
    pauses: list[float] = []
    genuine = grpc.ssl_server_certificate_configuration

    def configuration(own: list[tuple[bytes, bytes]], roots: bytes) -> grpc.ServerCertificateConfiguration:
        made.append(roots)
        return genuine(own, roots)

    monkeypatch.setattr(grpc, "ssl_server_certificate_configuration", configuration)
    monkeypatch.setattr("edgellm.rpc.trust.trust.sleep", pauses.append)

    async def enter(address: Address, trust: Trust) -> None:
        assert await steal(open_channel(address, trust))

    async with serving(host) as address:
        for _ in range(3):
            await enter(address, guest)
        assert (len(made), pauses) == (1, [])
        other = device(tmp_path / "other")
        befriend(host, other)
        for _ in range(3):
            await enter(address, other)
            await enter(address, guest)
        assert (len(made), len(pauses)) == (2, 1)
        assert other.identity.certificate.pem in made[1]
