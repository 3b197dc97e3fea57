"""The checks of each request: the right Host, the same origin, the key, a limit of its size; and what is not told
without a key.

A foreign page in the user's browser can reach a port on loopback. It cannot choose the Host header once its
own name leads there (DNS rebinding), and it cannot hide its origin: both are checked on every request.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from time import perf_counter
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgellm.errors import InvalidOption, TrustUnusable
from edgellm.http.schemas.errors import ErrorInfo
from edgellm.places import data_dir
from edgellm.rpc.trust.peer_store import Peer, Peers
from edgellm.storage.private_files import locked, read_private, write_private

_FIT = re.compile(r"[!-~]{16,500}")


def http_folder() -> Path:
    """Return the folder of the server's own key and certificate. It need not exist."""
    return data_dir() / "http"


def api_key(path: Path | None = None) -> tuple[Path, str]:
    """Return the file `path` (by default one in edgellm's data folder) and the key in it, made if it does not exist.

    Raises:
        InvalidOption: the key is too short or long, or holds anything but plain characters.
        TrustUnusable: the file is a link, or cannot be read or written.
    """
    path = path or http_folder() / "api-key"
    if path.parent == http_folder():
        with locked(path.parent):
            return path, _kept(path)
    return path, _kept(path)


def _kept(path: Path) -> str:
    if (data := read_private(path)) is None:
        key = secrets.token_urlsafe(32)
        write_private(path, f"{key}\n".encode())
        return key
    key = data.decode("latin-1").strip()
    if not _FIT.fullmatch(key):
        raise InvalidOption(
            f"{path} holds no key: {len(key)} characters, and 16 to 500 plain ones without spaces are needed.",
            "Remove the file: a new key will be made.",
        )
    return key


Redact: TypeAlias = Callable[[str], str]

SOMEWHERE = "(hidden)"
_ADDRESS = re.compile(r"\[[0-9a-fA-F:.]+(?:%\w+)?\](?::\d+)?|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\w)")


def keep(text: str) -> str:
    """Return `text` as it is, for clients that have shown the key."""
    return text


def redact(text: str, peers: Iterable[Peer] | None = None) -> str:
    """Return `text` with "device N" for paired devices, and `SOMEWHERE` for addresses beyond this machine."""
    for number, peer in enumerate(_peers() if peers is None else peers, 1):
        known = {peer.name, str(peer.id), peer.id.short, *map(str, peer.addresses)}
        hosts = {address.host for address in peer.addresses if not address.loopback}
        words = "|".join(re.escape(word) for word in sorted(known | hosts, key=len, reverse=True))
        text = re.sub(rf"(?<![\w-])(?:{words})(?![\w-])", f"device {number}", text, flags=re.IGNORECASE)
    return _ADDRESS.sub(_hidden, text)


def redact_all(found: Any) -> Any:
    """Return JSON data with every string redacted, keys of objects excepted."""
    if isinstance(found, str):
        return redact(found)
    if isinstance(found, dict):
        return {key: redact_all(value) for key, value in found.items()}
    return [redact_all(value) for value in found] if isinstance(found, (list, tuple)) else found


def redact_fault(fault: ErrorInfo) -> ErrorInfo:
    """Return `fault` with its message redacted."""
    return replace(fault, message=redact(fault.message))


def _peers() -> list[Peer]:
    try:
        return Peers().all()
    except TrustUnusable:
        return []


def _hidden(found: re.Match[str]) -> str:
    host = found[0][1:].partition("]")[0] if found[0].startswith("[") else found[0].partition(":")[0]
    try:
        return found[0] if ip_address(host.partition("%")[0]).is_loopback else SOMEWHERE
    except ValueError:
        return found[0]


_log = logging.getLogger(__name__)

MOST_BYTES = 8 * 2**20
BODY_SECONDS = 30.0  # for a request to arrive
OPEN = frozenset({"/", "/health"})
PAGE = "/page/"
"""The paths that need no key: they reveal nothing and cost nothing."""

_Headers: TypeAlias = Mapping[bytes, list[bytes]]
_ALWAYS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


class SecurityMiddleware:
    """ASGI middleware that refuses requests. Nothing of a refused request's body is read."""

    def __init__(self, app: ASGIApp, names: Iterable[str], key: str | None) -> None:
        """`names`: hosts by which the server may be called, without ports. `key` must be shown, if it is not None."""
        self._app = app
        self._names = frozenset(name.lower() for name in names)
        self._key = None if key is None else key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # no websockets, no lifespan
            return
        headers: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value)
        began = perf_counter()
        fault = self._fault(scope, headers)
        if fault is not None:
            _log.warning("%s %.100r refused: %d %s", scope["method"], scope["path"], fault.status, fault.code)
            await _answer(fault, send)
            return
        status = [0]
        # the application has answered and reported unexpected errors; they go no further
        with suppress(Exception):
            await self._app(scope, _limited(receive), _marked(send, status))
        took = 1e3 * (perf_counter() - began)
        _log.info("%s %.100r %d in %.0f ms", scope["method"], scope["path"], status[0], took)

    def _fault(self, scope: Scope, headers: _Headers) -> ErrorInfo | None:
        hosts = [value.decode("latin-1") for value in headers.get(b"host", [])]
        if len(hosts) != 1 or _name(hosts[0]) not in self._names:
            shown = hosts[0][:100] if hosts else ""
            return ErrorInfo(
                403, f"The Host header {shown!r} is none of this server's names. Use the address that it has printed.",
                "permission_error", "wrong_host",  # a page whose name was rebound to this address reads this answer
            )  # fmt: skip
        if _is_foreign(scope, headers, hosts[0]):
            return ErrorInfo(403, "Pages of other origins may not ask here.", "permission_error", "cross_origin")
        open_ = scope["path"] in OPEN or scope["path"].startswith(PAGE)
        if self._key is not None and not open_ and not self._shown(headers):
            return ErrorInfo(
                401, "The API key is missing or wrong. Send it as: Authorization: Bearer KEY", "authentication_error",
                "invalid_api_key",
            )  # fmt: skip
        length = headers.get(b"content-length", [b"0"])[0]
        if length.isdigit() and int(length) > MOST_BYTES:
            return too_large()
        return None

    def _shown(self, headers: _Headers) -> bool:
        given = headers.get(b"authorization", [])
        if len(given) != 1 or self._key is None or given[0][:7].lower() != b"bearer ":
            return False
        return hmac.compare_digest(given[0][7:].strip(), self._key)


def too_large() -> ErrorInfo:
    return ErrorInfo(413, f"The request is larger than {MOST_BYTES} bytes.", code="request_too_large")


def _name(host: str) -> str:
    """Return the host of HOST[:PORT], without brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_foreign(scope: Scope, headers: _Headers, host: str) -> bool:
    """Return whether a browser says that another origin's page asks. Following a link to our page does not count."""
    own = f"{scope['scheme']}://{host}".lower()
    if any(origin.decode("latin-1").lower() != own for origin in headers.get(b"origin", [])):
        return True
    site = headers.get(b"sec-fetch-site", [b"none"])[0]
    follows = scope["method"] == "GET" and headers.get(b"sec-fetch-mode") == [b"navigate"] and scope["path"] == "/"
    return site not in (b"none", b"same-origin") and not follows


async def _answer(fault: ErrorInfo, send: Send) -> None:
    body = json.dumps(fault.body()).encode()
    more = [(name.lower().encode(), value.encode()) for name, value in fault.headers().items()]
    if fault.status == 401:
        more.append((b"www-authenticate", b"Bearer"))
    plain = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": fault.status, "headers": [*plain, *_ALWAYS, *more]})
    await send({"type": "http.response.body", "body": body})


def _limited(receive: Receive) -> Receive:
    """Limit the size of a request's body and the time that it may take; pass on what comes after it unchanged."""
    size, whole = 0, False
    deadline = asyncio.get_running_loop().time() + BODY_SECONDS

    async def read() -> Message:
        nonlocal size, whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, f"The request did not arrive within {BODY_SECONDS:g} seconds.") from None
        size += len(message.get("body", b""))
        if size > MOST_BYTES:
            raise HTTPException(413, too_large().message)
        whole = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return read


def _marked(send: Send, status: list[int]) -> Send:
    """Add headers by which browsers neither guess types nor cache answers; write the status to `status`."""

    async def marked(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers: list[Any] = list(message.get("headers", []))
            status[:] = [message["status"]]
            known = {name.lower() for name, _ in headers}
            more = (*_ALWAYS, (b"cache-control", b"no-store"))
            message["headers"] = [*headers, *((name, value) for name, value in more if name not in known)]
        await send(message)

    return marked
