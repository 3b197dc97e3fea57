"""Requests to one stock server: a pool of connections in a loop of its own, limits, and this project's errors.

A key goes into one header of each request and nowhere else: into no message, no log and no `repr`.
"""

import asyncio
import json
import os
import re
import ssl
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar
from urllib.parse import urlsplit

import aiohttp

from edgellm.errors import EdgeError, InvalidOption, StateDamaged, VerifierBusy, VerifierLost
from edgellm.rpc.address import Address
from edgellm.state import SMALL, read_state
from edgellm.upstream.rows import RowsUnusable, readable

KEY_VARIABLE = "EDGELLM_VERIFIER_KEY"
MAX_ANSWER = 64 * 2**20  # bytes: some servers add rows of a whole prompt
CONNECT_SECONDS = 2.0
CONNECTIONS = 128  # requests in flight at a server
LONGEST_BUSY = 60.0  # most seconds before a busy server is asked again
_QUOTED = 200  # characters of a server's own message
_NEXT = "Check the address, and that the server is running."
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerURL:
    """The address of a server, such as http://gpu-box:8000, and a model there; "" is the first."""

    base: str
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address in `text`: `http[s]://HOST[:PORT][/PATH][#MODEL]`; a last part /v1 is left out. Raises
        InvalidOption: it is something else, or contains a password."""
        base, _, model = text.partition("#")
        if re.match(r"[^/]*//[^/]*@", base) or "?" in base:
            raise InvalidOption(
                "The server's address contains a password or a query.",
                f"Leave it out, and put the key into a file (--verifier-key-file) or into {KEY_VARIABLE}.",
            )
        found = _URL.fullmatch(base)
        if found is None or int(found["port"] or 0) >= 2**16:
            form = "Give http://HOST:PORT or https://HOST:PORT, and #MODEL behind it where the server has several."
            raise InvalidOption(f"{text[:80]!r} is no address of a server.", form)
        path = found["path"].rstrip("/").removesuffix("/v1").rstrip("/")
        return cls(found["origin"].lower() + path, model)

    @property
    def is_loopback(self) -> bool:
        """Return whether the server is on this machine."""
        host = urlsplit(self.base).hostname or ""
        return host == "localhost" or Address(host, 0).loopback

    @property
    def is_encrypted(self) -> bool:
        """Return whether texts and keys go there encrypted."""
        return self.base.startswith("https:")

    def __str__(self) -> str:
        return self.base


_URL = re.compile(
    r"(?P<origin>https?://([a-z0-9._-]+|\[[0-9a-f:.]+(%[a-z0-9._-]+)?\])(:(?P<port>\d{1,5}))?)(?P<path>(/[!-~]*)?)",
    re.IGNORECASE,
)


def read_key(path: Path | None = None) -> str:
    """Return the key in a file, or without `path` in the environment; "" without a key. Raises InvalidOption: the file
    cannot be read, or its content is no key."""
    key, where = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    if path is not None:
        advice = "Give a file that contains nothing but the key."
        try:
            key, where = (read_state(path, SMALL, links=True) or b"").decode("latin-1"), str(path)
        except StateDamaged as error:
            raise InvalidOption(error.what, advice) from None
        if not key.strip():
            raise InvalidOption(f"There is no key file {path}, or it is empty.", advice)
    if not re.fullmatch(r"[!-~]*", key.strip()):
        raise InvalidOption(f"What is in {where} is no key: it has blanks or other signs.", "Write only the key there.")
    return key.strip()


class ServerRefused(VerifierLost):
    """A server refuses a request; `status` is the HTTP status."""

    def __init__(self, what: str, next_step: str, status: int = 0) -> None:
        super().__init__(what, next_step)
        self.status = status

    @property
    def of_request(self) -> bool:
        """Return whether the server refuses this request, and not every request."""
        return self.status in (400, 413, 422)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A server's answer: its JSON, and the bytes both ways."""

    json: Any = field(repr=False)
    bytes_up: int
    bytes_down: int


class HttpClient:
    """The way to one server. Its coroutines run in its own loop; `run` and `wait` are for other threads."""

    def __init__(self, url: ServerURL, key: str = "") -> None:
        """Send `key` as a bearer token."""
        self.url, self._key = url, key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="edgellm-upstream", daemon=True)
        self._thread.start()
        self._session = self.wait(self._open())

    async def _open(self) -> aiohttp.ClientSession:
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        # There are no proxies and cookies; the certificates are those that the system trusts.
        tls = ssl.create_default_context() if self.url.is_encrypted else True
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls, limit=CONNECTIONS),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            headers=headers, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False,
        )  # fmt: skip

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop. Cancelling the future closes the connection of its request."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine, or raise its error."""
        future = self.run(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def close(self) -> None:
        """Abandon requests in flight, and close the connections."""
        if self._thread.is_alive():
            self.wait(self._close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._session.close()

    async def get(self, path: str, seconds: float | None = CONNECT_SECONDS) -> HttpAnswer:
        """Return the answer to a GET. Raises as `post`."""
        return await self._ask("GET", path, b"", seconds)

    async def post(self, path: str, body: Mapping[str, Any], seconds: float | None = None) -> HttpAnswer:
        """Return the answer to a POST of JSON. Raises VerifierBusy: the server takes no request now, and for how long;
        ServerRefused: it answers with another status than success; VerifierLost: it cannot be reached, wants a key,
        breaks off, or its answer is no JSON, or too long; TimeoutError: there is no answer within
        `seconds`."""
        return await self._ask("POST", path, json.dumps(body, separators=(",", ":")).encode(), seconds)

    async def _ask(self, method: str, path: str, body: bytes, seconds: float | None) -> HttpAnswer:
        try:
            async with asyncio.timeout(seconds):
                try:
                    data = await self._exchange(method, path, body)
                except aiohttp.ClientConnectorError:
                    raise
                except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):  # A kept connection has ended.
                    data = await self._exchange(method, path, body)
        except aiohttp.ServerTimeoutError:
            raise self._lost(f"does not answer within {CONNECT_SECONDS:g} seconds") from None
        except aiohttp.ClientError as error:
            raise self._lost(f"is gone ({self._quoted(str(error) or type(error).__name__)})") from None
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            raise self._lost("answers with something that is not JSON") from None
        return HttpAnswer(found, len(body), len(data))

    async def _exchange(self, method: str, path: str, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"} if body else {}
        async with self._session.request(
            method, self.url.base + path, data=body or None, headers=headers, allow_redirects=False
        ) as response:
            if response.headers.get("Content-Encoding", "identity") != "identity":
                raise self._lost("answers in a coding that it was not asked for")
            data = bytearray()
            async for part in response.content.iter_any():
                data += part
                if len(data) > MAX_ANSWER:
                    raise self._lost(f"answers with more than {MAX_ANSWER} bytes")
            if not 200 <= response.status < 300:
                raise self._refusal(response.status, response.headers.get("Retry-After", ""), bytes(data))
            return bytes(data)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read an answer; raise VerifierLost if it contradicts the server's documentation."""
        try:
            with readable():
                yield
        except RowsUnusable as error:
            raise self.garbled(str(error)) from None

    def garbled(self, what: str) -> VerifierLost:
        """Return the error for an answer that contradicts the server's documentation by `what`."""
        return self._lost(f"answers with garbage ({self._quoted(what)})")

    def _lost(self, how: str) -> VerifierLost:
        return VerifierLost(f"The server at {self.url} {how}.", _NEXT)

    def _refusal(self, status: int, retry_after: str, data: bytes) -> EdgeError:
        if status in (429, 503):
            wait = min(float(retry_after), LONGEST_BUSY) if re.fullmatch(r"\d{1,6}(\.\d{1,6})?", retry_after) else 1.0
            again = f"This device continues alone and tries again in about {wait:g} seconds."
            return VerifierBusy(f"The server at {self.url} is busy.", again, wait)
        if status in (401, 403):
            sent = "the key" if self._key else "requests without a key"
            return VerifierLost(
                f"The server at {self.url} refuses {sent}.",
                f"Put the right key into a file (--verifier-key-file) or into {KEY_VARIABLE}.",
            )
        said = self._quoted(_message(data))
        return ServerRefused(
            f"The server at {self.url} refuses with status {status}: {said or 'no reason'}.", _NEXT, status
        )

    def _quoted(self, text: str) -> str:
        """Return the beginning of a text of the server's, without control characters and the key."""
        if self._key:
            text = text.replace(self._key, "***")
        return re.sub(r"[^\x20-\x7e]+", " ", text).strip()[:_QUOTED].rstrip(".")


def _message(data: bytes) -> str:
    """Return the message in an error's JSON, whose place differs by server."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return data[:_QUOTED].decode("latin-1")
    for _ in range(3):
        if isinstance(found, dict):
            found = found.get("error") or found.get("message") or found.get("detail") or ""
    return str(found)[:1000]
