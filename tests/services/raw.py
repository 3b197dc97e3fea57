"""HTTP/2 by hand, for what no gRPC client would send: lengths that lie, and frames that come byte by byte."""

from __future__ import annotations

import socket
import struct
import time
from typing import Self

from edgellm.rpc.address import Address

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8


def frame(kind: int, flags: int, stream: int, data: bytes) -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + data


def _literal(name: str, value: str) -> bytes:
    return bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()


class Raw:
    """A connection to a verifier, and one call in it."""

    def __init__(self, address: Address) -> None:
        self.socket = socket.create_connection((address.host, address.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.settimeout(10)

    def begin(self, method: str, **more: str) -> None:
        """Opens the call."""
        names = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x", "te": "trailers"}
        names |= {"content-type": "application/grpc"} | {key.replace("_", "-"): value for key, value in more.items()}
        headers = b"".join(_literal(name, value) for name, value in names.items())
        self.socket.sendall(PREFACE + frame(_SETTINGS, 0, 0, b"") + frame(_HEADERS, 4, 1, headers))

    def say(self, data: bytes) -> None:
        """A piece of a message."""
        self.socket.sendall(frame(_DATA, 0, 1, data))

    def hear(self, seconds: float = 10.0) -> bytes:
        """All that comes until the call, or the connection, is over; pings are answered."""
        said, held, end = b"", b"", time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if not (more := self.socket.recv(65_536)):
                    return said
            except (TimeoutError, ConnectionError):
                return said
            held += more
            while len(held) >= 9 and len(held) >= 9 + (length := int.from_bytes(held[:3], "big")):
                kind, flags, stream, body = held[3], held[4], held[8], held[9 : 9 + length]
                held = held[9 + length :]
                said += body if kind in (_HEADERS, _GOAWAY) else b""
                if kind == _PING and not flags & 1:
                    self.socket.sendall(frame(_PING, 1, 0, body))
                if kind == _GOAWAY or (stream and (kind == _RESET or (kind == _HEADERS and flags & 1))):
                    return said
        return said

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.socket.close()
