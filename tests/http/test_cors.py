"""What the user may allow: one host or one origin at a time."""

from __future__ import annotations

import pytest

from edgellm.errors import InvalidOption
from edgellm.http.cors import AllowedOrigins, checked_host, checked_origin, preflight_headers


@pytest.mark.parametrize(
    ("given", "host"),
    [
        ("Host.Docker.Internal", "host.docker.internal"),
        ("desk", "desk"),
        ("192.168.1.2", "192.168.1.2"),
        ("[::1]", "::1"),
    ],
)
def test_a_host(given: str, host: str) -> None:
    assert checked_host(given) == host


@pytest.mark.parametrize(
    "given", ["*", "*.example.org", "", "a b", "a:80", "http://a", "a/", ".a", "a.", "-a", "a" * 300]
)
def test_other_hosts_are_refused(given: str) -> None:
    with pytest.raises(InvalidOption, match="--allow-host is"):
        checked_host(given)


@pytest.mark.parametrize(
    ("given", "origin"),
    [
        ("HTTPS://Chat.Example.org/", "https://chat.example.org"), ("https://a.org:443", "https://a.org"),
        ("http://localhost:3000", "http://localhost:3000"), ("http://[::1]:80", "http://[::1]"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
    ],
)  # fmt: skip
def test_an_origin(given: str, origin: str) -> None:
    assert checked_origin(given) == origin


@pytest.mark.parametrize(
    "given",
    ["*", "null", "", "https://*", "https://*.example.org", "example.org", "https://a/b", "https://", "file://", "a b"],
)
def test_other_origins_are_refused(given: str) -> None:
    with pytest.raises(InvalidOption, match="--allow-origin is"):
        AllowedOrigins([given])


@pytest.mark.parametrize("asked", [b"x\r\nset-cookie: a", b"a,,b", b"*", b"a" * 5000])
def test_names_of_headers_that_are_none_are_not_repeated(asked: bytes) -> None:
    found = preflight_headers(b"https://a.org", {b"access-control-request-headers": [asked]})
    assert b"access-control-allow-headers" not in dict(found)
