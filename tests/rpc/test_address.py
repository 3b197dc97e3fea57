"""Addresses, and the rule that nobody but this machine is spoken to yet."""

from __future__ import annotations

import pytest

from edgellm.errors import InvalidOption, PairingRequired
from edgellm.rpc.address import Address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50151", "127.0.0.1", 50151), (" 127.0.0.1:1 ", "127.0.0.1", 1), ("[::1]:65535", "::1", 65535),
        ("localhost:50151", "127.0.0.1", 50151), ("LOCALHOST:50151", "127.0.0.1", 50151),
        ("desk.local:80", "desk.local", 80), ("192.168.1.20:0", "192.168.1.20", 0),
    ],
)  # fmt: skip
def test_reads_an_address(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port) == (host, port)
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "text",
    [
        "", ":", "127.0.0.1", "127.0.0.1:", ":50151", "::1:50151", "[::1]", "[::1]50151", "[fe80::1%eth0]:1", "a b:1",
        "host:1:2", "127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:５", "127.0.0.1:123456", "256.0.0.1:1", "127.1:1",
        "-a:1", "a/b:1", "unix:/tmp/x", "dns:127.0.0.1:5", "[127.0.0.1:5",
    ],
)  # fmt: skip
def test_refuses_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidOption):
        Address.parse(text)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_is_allowed(host: str) -> None:
    assert Address.of(host, 1).require_loopback().loopback


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.20", "10.0.0.1", "8.8.8.8", "fe80::1", "desk.local"])
def test_everything_else_needs_pairing_first(host: str) -> None:
    with pytest.raises(PairingRequired, match="Pair the devices first"):
        Address.of(host, 50151).require_loopback()
