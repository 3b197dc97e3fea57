"""Security of requests: Host, origin, API key and size are checked; without a key, other devices are not named.

A page of another site in the user's browser can reach a port on loopback. It cannot choose the Host header when its own
name resolves to that address (DNS rebinding), and it cannot hide its origin: both are checked on every request. The
user may allow hosts and origins besides, one by one. Neither has a wildcard: any page could read a server that takes
any Host header, by rebinding, and a server that allows every origin, directly.
"""

import asyncio
import hmac
import logging
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgellm.errors import InvalidOption, TrustUnusable
from edgellm.http.model_host import KEEP_ALIVE
from edgellm.http.schemas.errors import ApiError
from edgellm.rpc.address import Address, is_ip
from edgellm.rpc.trust.handshake import RECHECK_SECONDS
from edgellm.rpc.trust.identity import DeviceID, parse_short
from edgellm.rpc.trust.trust import Peer, Peers, Phone
from edgellm.state import lock_folder, read_private, write_private
from edgellm.system import data_dir

_log = logging.getLogger(__name__)
_KEY = re.compile(r"[!-~]{16,500}")


def http_folder() -> Path:
    """Return the folder of the server's own key and certificate. It need not exist."""
    return data_dir() / "http"


def api_key(path: Path | None = None) -> tuple[Path, str]:
    """Return `path` or a default one, and its key, made if missing. Raises InvalidOption, TrustUnusable."""
    path = path or http_folder() / "api-key"
    with lock_folder(path.parent) if path.parent == http_folder() else nullcontext():
        if (data := read_private(path)) is None:
            data = f"{secrets.token_urlsafe(32)}\n".encode()
            write_private(path, data)
    key = data.decode("latin-1").strip()
    if not _KEY.fullmatch(key):
        raise InvalidOption(
            f"{path} holds no key: its {len(key)} characters are not 16 to 500 printable ASCII ones without spaces.",
            "Remove the file, and a new key is made.",
        )
    return path, key


def page_key() -> str:
    """Return the key of the page, which opens the user's conversations, too. Raises as `api_key` does."""
    return api_key(http_folder() / "page-key")[1]


def shown_key(client: HTTPConnection) -> str:
    """Return the one key that a client shows, empty where there is none, or several."""
    given = (f"Bearer {value}" for value in client.headers.getlist("x-api-key"))
    values = [*client.headers.getlist("authorization"), *given]
    scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
    return token.strip() if scheme.lower() == "bearer" else ""


@dataclass(frozen=True, slots=True)
class HttpConfig:
    """The clients that a server answers, and its limits.

    `tls`: the PEM files of a certificate and of its key. Clients must show `key`, if there is one, or `page_key`, which
    also opens the user's conversations; without it they stay closed. `names`: hosts that a Host header may name,
    besides the address. Pages of `origins` may read from the server, besides its own. `replies` are written at once,
    and up to `waiting` requests wait. `strict` refuses unknown parameters. `keep_alive` is in seconds, as for
    `ModelHost`. `on_event` gets a sentence for an unexpected error. `aliases` are further names of models.
    """

    tls: tuple[Path, Path] | None = None
    key: str | None = None
    page_key: str | None = None
    names: Sequence[str] = ()
    origins: Sequence[str] = ()
    replies: int = 8
    waiting: int = 16
    strict: bool = False
    keep_alive: float = KEEP_ALIVE
    on_event: Callable[[str], None] = lambda _text: None
    aliases: Mapping[str, str] = field(default_factory=dict)


class Keys:
    """The keys that a server accepts: `api`, without which every program is let in; the `page`'s, which opens the
    conversations, too; and those of phones, which do the same until they are revoked. A phone gets its key for a code
    from the user's screen, which is good for one phone, some minutes and a few wrong guesses."""

    CODE_SECONDS = 300.0
    GUESSES = 10  # wrong codes; a code has 35 secret bits

    def __init__(
        self, api: str | None = None, page: str | None = None, notify: Callable[[str], None] = lambda _text: None
    ) -> None:
        """`notify` is called with a sentence when a phone is paired, and when a code is tried too often."""
        self.api, self._page, self._notify, self.peers = api, page, notify, Peers()
        self._code, self._until, self._guesses = "", 0.0, 0
        self._lock = threading.Lock()

    def is_page(self, key: str) -> bool:
        """Return whether this is the page's key, which is the user's own."""
        return _same(key, self._page)

    def phone(self, key: str) -> Phone | None:
        """Return the phone with this key, None where it was revoked or the list is damaged."""
        with suppress(TrustUnusable):
            return self.peers.phone(key)
        return None

    def opens_page(self, client: HTTPConnection) -> bool:
        """Return whether a client shows the page's key or a phone's."""
        return self.is_page(key := shown_key(client)) or self.phone(key) is not None

    def is_anonymous(self, client: HTTPConnection) -> bool:
        """Return whether a client shows no key, and so learns nothing about other devices."""
        return self.api is None and not self.opens_page(client)

    def new_code(self) -> str:
        """Return a code for a phone, in place of an earlier one. It has the form of a short device ID, by which a
        mistyped one is told from a wrong one."""
        with self._lock:
            self._until, self._guesses = monotonic() + self.CODE_SECONDS, self.GUESSES
            self._code = DeviceID(secrets.token_bytes(32)).short
            return self._code

    def pair(self, code: str, name: str, key: str = "") -> tuple[Phone, str]:
        """Return a phone called `name`, now on the list, and its key, for a code; `key` is the one that it had before.
        Raise ApiError for a mistyped or wrong code; TrustUnusable."""
        try:
            given = parse_short(code)
        except InvalidOption:
            message = f"The code {code!r} is mistyped. Compare it with the computer's screen."
            raise ApiError(400, message, code="mistyped_code") from None
        with self._lock:
            right = _same(given, self._code) and monotonic() < self._until
            self._guesses -= not right
            if tried := right or self._guesses == 0:
                self._code, self._guesses = "", 0
        if tried and not right:
            self._notify("Wrong codes for a phone were tried too often: the code on the screen is not valid any more.")
        if not right:
            message = "This code is wrong, was used, or is too old. Get a new one on the computer: edgellm pair"
            raise ApiError(401, message, code="wrong_code")
        phone, key = self.peers.add_phone(name, self.phone(key))
        self._notify(f"{phone.name} has the page now, until: edgellm peers rm {phone.id.short}")
        return phone, key


def _same(given: str, known: str | None) -> bool:
    return known is not None and hmac.compare_digest(given.encode(), known.encode())


HIDDEN = "(hidden)"
_ADDRESS = re.compile(r"\[[0-9a-fA-F:.]+(?:%\w+)?\](?::\d+)?|(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\w.]*\w)")


def redact(text: str, peers: Iterable[Peer] | None = None) -> str:
    """Return `text` with "device N" in place of paired devices, and `HIDDEN` in place of other machines' addresses."""
    for number, peer in enumerate(known_peers() if peers is None else peers, 1):
        names = {peer.name, str(peer.id), peer.id.short, *map(str, peer.addresses)}
        names |= {address.host for address in peer.addresses if not address.loopback}
        words = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
        text = re.sub(rf"(?<![\w-])(?:{words})(?![\w-])", f"device {number}", text, flags=re.IGNORECASE)
    return _ADDRESS.sub(_hide, text)


def redact_all(data: Any) -> Any:
    """Return JSON data with every string redacted, but not the keys of objects."""
    if isinstance(data, str):
        return redact(data)
    if isinstance(data, dict):
        return {key: redact_all(value) for key, value in data.items()}
    return [redact_all(value) for value in data] if isinstance(data, (list, tuple)) else data


def known_peers() -> list[Peer]:
    """Return the paired devices, none where their list is damaged."""
    with suppress(TrustUnusable):
        return Peers().all()
    return []


def _hide(match: re.Match[str]) -> str:
    text = match[0]
    host = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    host = host.partition("%")[0]
    return HIDDEN if is_ip(host) and not Address(host, 0).loopback else text


MAX_BYTES = 8 * 2**20
CLIENT_SECONDS = 30.0
"""Limit for each thing that a client owes: a TLS handshake, a request's head and its body, and reading an answer."""
PUBLIC_PATHS = frozenset({"/", "/health", "/phones"})
PUBLIC_PREFIX = "/page/"
"""Paths that need no key: they reveal nothing and cost next to nothing."""

_HOST = re.compile(r"(?:[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?\.)*[a-z0-9_](?:[a-z0-9_-]*[a-z0-9_])?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::\d{1,5})?")
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_EXPOSED = ("Retry-After", "X-EdgeLLM-Ignored", "X-EdgeLLM-Verified", "X-EdgeLLM-Turns-Left-Out", "X-EdgeLLM-Model",
            "X-EdgeLLM-Template")  # fmt: skip


def checked_host(host: str) -> str:
    """Return the name of a host, in lower case, without brackets. Raises InvalidOption for anything else."""
    name = host.strip().lower().removeprefix("[").removesuffix("]")
    if len(name) > 253 or not (_HOST.fullmatch(name) or is_ip(name)):
        raise InvalidOption(
            f"--allow-host is {host[:60]!r}.",
            "Give the name of one host, without a port, such as host.docker.internal; there is no wildcard, as any page"
            " could then read from this server (DNS rebinding).",
        )
    return name


def checked_origin(origin: str) -> str:
    """Return an origin in lower case, without the default port. Raise InvalidOption for anything else."""
    name = origin.strip().lower().rstrip("/")
    if len(name) > 300 or not _ORIGIN.fullmatch(name):
        raise InvalidOption(
            f"--allow-origin is {origin[:60]!r}.",
            "Give one origin, such as https://chat.example.org or app://obsidian.md; there is no wildcard, as any page"
            " could then read from this server.",
        )
    return re.sub(r"^(http://.*):80$|^(https://.*):443$", r"\1\2", name)


ErrorBody: TypeAlias = Callable[[str, ApiError], bytes]
"""Returns the JSON of an error at a path, in the form of its API."""
_HEADERS = {
    "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin", "cache-control": "no-store",
}  # fmt: skip


class SecurityMiddleware:
    """ASGI middleware that refuses requests. The body of a refused request is not read."""

    def __init__(
        self, app: ASGIApp, names: Iterable[str], keys: Keys, body: ErrorBody, origins: Iterable[str] = ()
    ) -> None:
        """`names`: hosts, without ports, that a Host header may name. A request must show one of `keys`, if there is
        one for programs. `body` returns the body of an error at a path. Pages of `origins` may read from the server,
        too. Raise InvalidOption for an invalid origin."""
        self._app, self._body, self._keys = app, body, keys
        self._origins = [checked_origin(origin) for origin in origins]
        self._names = frozenset(name.lower() for name in names)
        self._cors = CORSMiddleware(
            self._answer, allow_origins=self._origins, allow_methods=_METHODS, allow_headers=["*"],
            allow_private_network=True, expose_headers=_EXPOSED,
        )  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # no websockets, no lifespan
            allowed = self._is_allowed(Headers(scope=scope))
            await (self._cors if allowed else self._answer)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Browsers neither guess its type nor cache it."""
        started_at, status = perf_counter(), 0
        try:
            self._check_stranger(scope)
            phone = self._check_key_and_size(scope)
        except ApiError as refusal:
            _log.warning("%s %.100r refused: %d %s", scope["method"], scope["path"], refusal.status, refusal.code)
            headers = {"www-authenticate": "Bearer"} if refusal.status == 401 else {}
            body = self._body(scope["path"], refusal)
            await Response(body, refusal.status, headers | _HEADERS, "application/json")(scope, receive, send)
            return
        limited = _limit_body(receive, _most_bytes(scope))
        if phone is not None:
            limited = self._until_revoked(limited, shown_key(HTTPConnection(scope)))
            await asyncio.to_thread(self._keys.peers.record_used, phone)

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message.setdefault("headers", [])
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        # the application has answered and reported unexpected errors; they go no further
        with suppress(Exception):
            await self._app(scope, limited, send_with_headers)
        milliseconds = 1e3 * (perf_counter() - started_at)
        _log.info("%s %.100r %d in %.0f ms", scope["method"], scope["path"], status, milliseconds)

    def _is_allowed(self, headers: Headers) -> bool:
        """Return whether a page of an allowed origin asks, by one of our names."""
        given = headers.getlist("origin")
        return len(given) == 1 and given[0] in self._origins and self._is_named(headers)

    def _is_named(self, headers: Headers) -> bool:
        """Return whether a request has one Host header, with one of our names."""
        hosts = headers.getlist("host")
        return len(hosts) == 1 and _host_name(hosts[0]) in self._names

    def _check_stranger(self, scope: Scope) -> None:
        """Refuse a request by its Host and Origin."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_named(headers):
            # a page whose name was rebound to this address can read this
            message = f"The Host header is {host[:100]!r}, which is not a name of this server. Use the address that it"
            raise ApiError(403, f"{message} printed, or allow the name with --allow-host.", code="wrong_host")
        if not self._is_allowed(headers) and _is_cross_origin(scope, headers, host):
            message = "Requests by pages of other origins are refused. Use the server's own page, or no browser, or"
            raise ApiError(403, f"{message} allow the origin with --allow-origin.", code="cross_origin")

    def _check_key_and_size(self, scope: Scope) -> Phone | None:
        """Refuse a request by its key and its size; return the phone that asks, if one does."""
        key = shown_key(HTTPConnection(scope))
        known = _same(key, self._keys.api) or self._keys.is_page(key)
        phone = None if known else self._keys.phone(key)
        if not (known or phone or self._keys.api is None or _is_public(scope)):
            message = "The API key is missing or wrong. Send the header Authorization: Bearer KEY, or X-Api-Key: KEY."
            raise ApiError(401, message, code="invalid_api_key")
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > (most := _most_bytes(scope)):
            raise too_large(most)
        return phone

    def _until_revoked(self, receive: Receive, key: str) -> Receive:
        """Have the application hear that the client has left once the `key` of its phone is revoked."""

        async def read() -> Message:
            waiting = asyncio.ensure_future(receive())
            try:
                while not (await asyncio.wait({waiting}, timeout=RECHECK_SECONDS))[0]:
                    if self._keys.phone(key) is None:
                        return {"type": "http.disconnect"}
                return waiting.result()
            finally:
                waiting.cancel()

        return read


def too_large(most: int = MAX_BYTES) -> ApiError:
    return ApiError(413, f"The request is larger than {most} bytes. Shorten it.", code="request_too_large")


def _host_name(host: str) -> str:
    """Return the host of HOST[:PORT], without brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_cross_origin(scope: Scope, headers: Headers, host: str) -> bool:
    """Return whether, by a browser's headers, a page of another origin asks. A link to our page is no such request."""
    own = f"{scope['scheme']}://{host}".lower()
    if any(origin.lower() != own for origin in headers.getlist("origin")):
        return True
    site, navigates = headers.get("sec-fetch-site", "none"), headers.getlist("sec-fetch-mode") == ["navigate"]
    is_link = scope["method"] == "GET" and navigates and scope["path"] == "/"
    return site not in ("none", "same-origin") and not is_link


def _is_public(scope: Scope) -> bool:
    return scope["path"] in PUBLIC_PATHS or scope["path"].startswith(PUBLIC_PREFIX)


def _most_bytes(scope: Scope) -> int:
    """Return how large the body of a request may be: of one that needs no key, some hundred characters."""
    return 4096 if _is_public(scope) else MAX_BYTES


def _limit_body(receive: Receive, most: int) -> Receive:
    """Limit a request's body to `most` bytes, and the time in which it arrives. Later messages pass unchanged."""
    size, complete = 0, False
    deadline = asyncio.get_running_loop().time() + CLIENT_SECONDS

    async def read() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError:
            raise HTTPException(
                408, f"The request did not arrive within {CLIENT_SECONDS:g} seconds. Send it again."
            ) from None
        size += len(message.get("body", b""))
        if size > most:
            raise HTTPException(413, too_large(most).message)
        complete = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    return read
