"""Cross-origin resource sharing: the hosts and the pages of other origins that the user allows, and no others.

Neither has a wildcard. A server that takes any Host header can be read by any page, whose name is rebound to its
address (DNS rebinding); one that allows every origin can be read by any page without that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from typing import TypeAlias

from edgellm.errors import InvalidOption

Headers: TypeAlias = Mapping[bytes, list[bytes]]
"""The values of a request's headers, by their names in lower case."""
HeaderList: TypeAlias = list[tuple[bytes, bytes]]

_HOST = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9-]+(?: *, *[A-Za-z0-9-]+)*")
_MOST_BYTES = 4096  # of the names of headers that a preflight request asks for
_METHODS = b"GET, HEAD, POST, PUT, PATCH, DELETE"
_EXPOSED = b"Retry-After, X-EdgeLLM-Ignored, X-EdgeLLM-Verified, X-EdgeLLM-Turns-Left-Out"
_MAX_AGE = b"600"  # seconds for which browsers keep the answer to a preflight request


def checked_host(host: str) -> str:
    """Return the name of a host, in lower case, without the brackets of an IPv6 address. Raise InvalidOption if it is
    not one host."""
    name = host.strip().lower().removeprefix("[").removesuffix("]")
    if len(name) > 253 or not (_HOST.fullmatch(name) or _is_address(name)):
        raise InvalidOption(
            f"--allow-host is {host[:60]!r}.",
            "Give the name of one host, without a port, such as host.docker.internal; there is no wildcard, as any page"
            " could then read from this server (DNS rebinding).",
        )
    return name


def _is_address(name: str) -> bool:
    try:
        return bool(ip_address(name))
    except ValueError:
        return False


def checked_origin(origin: str) -> str:
    """Return an origin in lower case, without the default port. Raise InvalidOption if it is not one origin."""
    name = origin.strip().lower().rstrip("/")
    if len(name) > 300 or not _ORIGIN.fullmatch(name):
        raise InvalidOption(
            f"--allow-origin is {origin[:60]!r}.",
            "Give one origin, such as https://chat.example.org or app://obsidian.md; there is no wildcard, as any page"
            " could then read from this server.",
        )
    for scheme, port in (("http", ":80"), ("https", ":443")):
        if name.startswith(f"{scheme}://"):
            name = name.removesuffix(port)
    return name


class AllowedOrigins:
    """Pages of these origins may read from the server."""

    def __init__(self, origins: Iterable[str]) -> None:
        """Raise InvalidOption where one is not an origin."""
        self._origins = frozenset(checked_origin(origin) for origin in origins)

    def of(self, headers: Headers) -> bytes | None:
        """Return the origin of a request, if it is allowed; None for others, and where none or several are given."""
        given = headers.get(b"origin", [])
        return given[0] if len(given) == 1 and given[0].decode("latin-1").lower() in self._origins else None


def is_preflight(method: str, headers: Headers) -> bool:
    """Return whether a browser asks whether a page may send a request."""
    return method == "OPTIONS" and b"access-control-request-method" in headers


def response_headers(origin: bytes) -> HeaderList:
    """Return the headers of a response that a page of `origin` may read."""
    return [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
        (b"cross-origin-resource-policy", b"cross-origin"),
        (b"vary", b"Origin"),
    ]


def preflight_headers(origin: bytes, headers: Headers) -> HeaderList:
    """Return the headers of the answer that a page of `origin` may send a request with these `headers` of its preflight
    request."""
    allowed = [(b"access-control-allow-methods", _METHODS), (b"access-control-max-age", _MAX_AGE)]
    asked = b", ".join(headers.get(b"access-control-request-headers", []))
    if len(asked) <= _MOST_BYTES and _HEADER_NAMES.fullmatch(asked):
        allowed.append((b"access-control-allow-headers", asked))
    if headers.get(b"access-control-request-private-network") == [b"true"]:
        allowed.append((b"access-control-allow-private-network", b"true"))
    return [*response_headers(origin), *allowed]
