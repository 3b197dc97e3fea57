"""Security of requests: Host, origin, API key and size are checked; without a key, other devices are not named.

A page of another site in the user's browser can reach a port on loopback. It cannot choose the Host header when its
own name resolves to that address (DNS rebinding), and it cannot hide its origin: both are checked on every request.
`cors.py` has what the user allows besides.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgellm.errors import InvalidOption, TrustUnusable
from edgellm.http.cors import AllowedOrigins, Headers, is_preflight, preflight_headers, response_headers
from edgellm.http.schemas.errors import ErrorInfo
from edgellm.places import data_dir
from edgellm.rpc.trust.peer_store import Peer, Peers
from edgellm.storage.state import lock_folder, read_private, write_private

_KEY = re.compile(r"[!-~]{16,500}")


def http_folder() -> Path:
    """Return the folder of the server's own key and certificate. It need not exist."""
    return data_dir() / "http"


def api_key(path: Path | None = None) -> tuple[Path, str]:
    """Return `path` (by default a file in edgellm's data folder) and the API key in it, which is made if missing.

    Raises:
        InvalidOption: the key is too short or long, or has other characters than printable ASCII.
        TrustUnusable: the file is a link, or cannot be read or written.
    """
    path = path or http_folder() / "api-key"
    if path.parent == http_folder():
        with lock_folder(path.parent):
            return path, _read_or_make_key(path)
    return path, _read_or_make_key(path)


def page_key() -> str:
    """Return the key of the page, which opens the user's conversations, too; it is made if missing.

    Raises:
        InvalidOption, TrustUnusable: as `api_key` raises them.
    """
    with lock_folder(http_folder()):
        return _read_or_make_key(http_folder() / "page-key")


def bearer_token(values: Sequence[str]) -> str:
    """Return the token of the one Authorization header in `values`, empty where there is none."""
    scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else ""


def _read_or_make_key(path: Path) -> str:
    if (data := read_private(path)) is None:
        key = secrets.token_urlsafe(32)
        write_private(path, f"{key}\n".encode())
        return key
    key = data.decode("latin-1").strip()
    if not _KEY.fullmatch(key):
        raise InvalidOption(
            f"{path} holds no key: its {len(key)} characters are not 16 to 500 printable ASCII ones without spaces.",
            "Remove the file, and a new key is made.",
        )
    return key


Redact: TypeAlias = Callable[[str], str]

HIDDEN = "(hidden)"
_ADDRESS = re.compile(r"\[[0-9a-fA-F:.]+(?:%\w+)?\](?::\d+)?|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\w)")


def unredacted(text: str) -> str:
    """Return `text` as it is, for clients that have shown the key."""
    return text


def redact(text: str, peers: Iterable[Peer] | None = None) -> str:
    """Return `text` with "device N" in place of paired devices, and `HIDDEN` of addresses of other machines."""
    for number, peer in enumerate(_peers() if peers is None else peers, 1):
        names = {peer.name, str(peer.id), peer.id.short, *map(str, peer.addresses)}
        names |= {address.host for address in peer.addresses if not address.loopback}
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        text = re.sub(rf"(?<![\w-])(?:{words})(?![\w-])", f"device {number}", text, flags=re.IGNORECASE)
    return _ADDRESS.sub(_hide, text)


def redact_all(data: Any) -> Any:
    """Return JSON data or a model with every string redacted, but not the keys of objects."""
    if isinstance(data, str):
        return redact(data)
    if isinstance(data, BaseModel):
        return data.model_copy(update=redact_all(dict(data)))
    if isinstance(data, dict):
        return {key: redact_all(value) for key, value in data.items()}
    return [redact_all(value) for value in data] if isinstance(data, (list, tuple)) else data


def _peers() -> list[Peer]:
    try:
        return Peers().all()
    except TrustUnusable:
        return []


def _hide(match: re.Match[str]) -> str:
    address = match[0]
    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    try:
        return address if ip_address(host.partition("%")[0]).is_loopback else HIDDEN
    except ValueError:
        return address


_log = logging.getLogger(__name__)

MAX_BYTES = 8 * 2**20
BODY_SECONDS = 30.0  # for a request to arrive
PUBLIC_PATHS = frozenset({"/", "/health"})
PUBLIC_PREFIX = "/page/"
"""Paths that need no key: they reveal nothing and cost nothing."""

ErrorBody: TypeAlias = Callable[[str, ErrorInfo], bytes]
"""Returns the JSON of an error at a path, in the form of its API."""
_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_OF_ANSWERS = (*_HEADERS, (b"cache-control", b"no-store"))


class SecurityMiddleware:
    """ASGI middleware that refuses requests. The body of a refused request is not read."""

    def __init__(
        self,
        app: ASGIApp,
        names: Iterable[str],
        key: str | None,
        page_key: str | None = None,
        *,
        body: ErrorBody,
        origins: Iterable[str] = (),
    ) -> None:
        """`names`: hosts, without ports, that a Host header may name. `key`: the API key, None if none is needed.
        `page_key` is accepted in its place. `body` returns the body of an error at a path. Pages of `origins` may read
        from the server, too. Raise InvalidOption where one of them is none."""
        self._app, self._body, self._origins = app, body, AllowedOrigins(origins)
        self._names = frozenset(name.lower() for name in names)
        self._keys = [one.encode("latin-1") for one in (key, page_key) if one is not None] if key is not None else []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets, no lifespan
            return
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        started_at = perf_counter()
        origin = self._origins.of(headers)
        refusal = self._refusal(scope, headers, origin)
        if origin is not None:
            send = _replace_headers(send, response_headers(origin))
            if refusal is None and is_preflight(scope["method"], headers):
                await send(
                    {"type": "http.response.start", "status": 204, "headers": preflight_headers(origin, headers)}
                )
                await send({"type": "http.response.body"})
                return
        if refusal is not None:
            _log.warning("%s %.100r refused: %d %s", scope["method"], scope["path"], refusal.status, refusal.code)
            await _send_error(refusal, self._body(scope["path"], refusal), send)
            return
        status = [0]
        # the application has answered and reported unexpected errors; they go no further
        with suppress(Exception):
            await self._app(scope, _limit_body(receive), _add_headers(send, status))
        milliseconds = 1e3 * (perf_counter() - started_at)
        _log.info("%s %.100r %d in %.0f ms", scope["method"], scope["path"], status[0], milliseconds)

    def _refusal(self, scope: Scope, headers: Headers, origin: bytes | None) -> ErrorInfo | None:
        """Return why a request is refused, None if it is not. `origin`: that of an allowed page."""
        hosts = [value.decode("latin-1") for value in headers.get(b"host", [])]
        if len(hosts) != 1 or _host_name(hosts[0]) not in self._names:
            host = hosts[0][:100] if hosts else ""
            # a page whose name was rebound to this address can read this
            return ErrorInfo(
                403,
                f"The Host header is {host!r}, which is not a name of this server. Use the address that it printed,"
                " or allow the name with --allow-host.", "permission_error", code="wrong_host",
            )  # fmt: skip
        if origin is None and _is_cross_origin(scope, headers, hosts[0]):
            return ErrorInfo(
                403, "Requests by pages of other origins are refused. Use the server's own page, or no browser, or"
                " allow the origin with --allow-origin.", "permission_error", code="cross_origin",
            )  # fmt: skip
        if origin is not None and is_preflight(scope["method"], headers):  # which has no key
            return None
        public = scope["path"] in PUBLIC_PATHS or scope["path"].startswith(PUBLIC_PREFIX)
        if self._keys and not public and not self._has_key(headers):
            return ErrorInfo(
                401, "The API key is missing or wrong. Send the header Authorization: Bearer KEY, or X-Api-Key: KEY.",
                "authentication_error", code="invalid_api_key",
            )  # fmt: skip
        length = headers.get(b"content-length", [b"0"])[0]
        if length.isdigit() and int(length) > MAX_BYTES:
            return too_large()
        return None

    def _has_key(self, headers: Headers) -> bool:
        tokens = [value.decode("latin-1") for value in headers.get(b"authorization", [])]
        tokens += [f"Bearer {value.decode('latin-1')}" for value in headers.get(b"x-api-key", [])]
        given = bearer_token(tokens).encode("latin-1")
        return any(hmac.compare_digest(given, key) for key in self._keys)


def too_large() -> ErrorInfo:
    return ErrorInfo(413, f"The request is larger than {MAX_BYTES} bytes. Shorten it.", code="request_too_large")


def _host_name(host: str) -> str:
    """Return the host of HOST[:PORT], without brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_cross_origin(scope: Scope, headers: Headers, host: str) -> bool:
    """Return whether, by a browser's headers, a page of another origin asks. A link to our page is no such request."""
    own = f"{scope['scheme']}://{host}".lower()
    if any(origin.decode("latin-1").lower() != own for origin in headers.get(b"origin", [])):
        return True
    site = headers.get(b"sec-fetch-site", [b"none"])[0]
    is_link = scope["method"] == "GET" and headers.get(b"sec-fetch-mode") == [b"navigate"] and scope["path"] == "/"
    return site not in (b"none", b"same-origin") and not is_link


async def _send_error(info: ErrorInfo, body: bytes, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *_HEADERS]
    if info.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": info.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _limit_body(receive: Receive) -> Receive:
    """Limit the size of a request's body and the time in which it arrives. Later messages pass unchanged."""
    size, complete = 0, False
    deadline = asyncio.get_running_loop().time() + BODY_SECONDS

    async def read() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(
                408, f"The request did not arrive within {BODY_SECONDS:g} seconds. Send it again."
            ) from None
        size += len(message.get("body", b""))
        if size > MAX_BYTES:
            raise HTTPException(413, too_large().message)
        complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return read


def _replace_headers(send: Send, replaced: Sequence[tuple[bytes, bytes]]) -> Send:
    """Add headers to a response in place of its own of these names."""
    names = {name for name, _ in replaced}

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            others = [(name, value) for name, value in message.get("headers", []) if name.lower() not in names]
            message["headers"] = [*others, *replaced]
        await send(message)

    return send_with_headers


def _add_headers(send: Send, status: list[int]) -> Send:
    """Add headers by which browsers neither guess types nor cache answers; put the status into `status`."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = list(message.get("headers", []))
            status[:] = [message["status"]]
            present = {name.lower() for name, _ in headers}
            message["headers"] = [*headers, *((name, value) for name, value in _OF_ANSWERS if name not in present)]
        await send(message)

    return send_with_headers
