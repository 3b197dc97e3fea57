"""HTTP/1.1 over a few kept connections to one server: one request after the other on each, within one event loop.

A general client costs a request several times what is needed here, and a gateway sends hundreds a second.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import h11

_READ = 65536  # bytes at once


class ConnectionFailed(Exception):
    """A server cannot be reached, breaks off, or speaks no HTTP; says how in a few words."""


class ConnectTimeout(ConnectionFailed):
    """Nobody accepts the connection in time."""


class AnswerTooLong(Exception):
    """An answer has more bytes than it may have."""


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """The status, the header fields by their names in lower case, and the body of an answer."""

    status: int
    headers: dict[str, str]
    body: bytes


class ConnectionPool:
    """Connections to one server, opened when needed and kept while both sides allow it."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, *, connections: int, seconds: float) -> None:
        """Keep up to `connections`, and let one take `seconds` to open. With `tls` they are encrypted."""
        self._host, self._port, self._tls, self._seconds = host, port, tls, seconds
        self._idle: deque[_Connection] = deque()
        self._places = asyncio.Semaphore(connections)
        self._closed = False

    async def ask(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes | None, most: int
    ) -> RawAnswer:
        """Return the answer to a request. `most` bytes are read of its body.

        Raises:
            ConnectionFailed, AnswerTooLong: see the classes.
        """
        async with self._places:
            while self._idle:
                connection = self._idle.pop()
                try:
                    return await self._over(connection, method, target, headers, body, most)
                except _Stale:  # the server has ended it meanwhile, and has not read the request
                    continue
            return await self._over(await self._open(), method, target, headers, body, most)

    async def _over(
        self, connection: _Connection, method: str, target: str, headers: Sequence[tuple[str, str]],
        body: bytes | None, most: int,
    ) -> RawAnswer:  # fmt: skip
        try:
            answer = await connection.ask(method, target, headers, body, most)
        except BaseException:  # also where the caller gives up: what would come is nobody's
            connection.abort()
            raise
        if connection.reusable and not self._closed:
            self._idle.append(connection)
        else:
            connection.abort()
        return answer

    async def _open(self) -> _Connection:
        try:
            async with asyncio.timeout(self._seconds):
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        except TimeoutError:
            raise ConnectTimeout(f"it does not answer within {self._seconds:g} seconds") from None
        except (OSError, ValueError) as error:  # also a certificate that is not trusted, and a name that can be none
            raise ConnectionFailed(str(error) or type(error).__name__) from None
        return _Connection(reader, writer)

    async def close(self) -> None:
        """Close the connections that are not in use; the others are closed behind their request."""
        self._closed = True
        while self._idle:
            self._idle.pop().abort()


class _Stale(ConnectionFailed):
    """A kept connection has ended before an answer began."""


class _Connection:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.CLIENT)
        self._used = self._began = False  # an answer was read; the present one has begun

    @property
    def reusable(self) -> bool:
        """Return whether both sides keep the connection for another request."""
        return self._http.our_state is h11.IDLE

    def abort(self) -> None:
        """Close it at once."""
        self._writer.transport.abort()

    async def ask(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes | None, most: int
    ) -> RawAnswer:
        """See `ConnectionPool.ask`."""
        self._began = False
        try:
            return await self._ask(method, target, headers, body, most)
        except (OSError, h11.ProtocolError) as error:
            kind = _Stale if self._used and not self._began else ConnectionFailed
            raise kind(str(error) or type(error).__name__) from None

    async def _ask(
        self, method: str, target: str, headers: Sequence[tuple[str, str]], body: bytes | None, most: int
    ) -> RawAnswer:
        length = [] if body is None else [("Content-Length", str(len(body)))]
        data = self._http.send(h11.Request(method=method, target=target, headers=[*headers, *length])) or b""
        data += self._http.send(h11.Data(data=body)) or b"" if body else b""
        self._writer.write(data + (self._http.send(h11.EndOfMessage()) or b""))
        await self._writer.drain()
        status, fields, found = 0, {}, bytearray()
        while not isinstance(event := await self._event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
                fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
            elif isinstance(event, h11.Data):
                found += event.data
                if len(found) > most:
                    raise AnswerTooLong
            elif isinstance(event, h11.ConnectionClosed):
                raise OSError("the server ends the connection")
            self._began = True
        self._used = True
        with suppress(h11.ProtocolError):  # one of the two sides closes the connection
            self._http.start_next_cycle()
        return RawAnswer(status, fields, bytes(found))

    async def _event(self) -> object:
        """Return what the server sends next."""
        while (event := self._http.next_event()) is h11.NEED_DATA:
            self._http.receive_data(await self._reader.read(_READ))
        return event
