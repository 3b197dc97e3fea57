"""A network that fails on demand: a relay for TCP connections that delays, loses, stalls, cuts or adds garbage."""

import random
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Self

_RESET = struct.pack("ii", 1, 0)  # for SO_LINGER: close with RST


class FaultyRelay:
    """Listens on a loopback port of its own and forwards everything to `target`, until a method makes it fail."""

    def __init__(self, target: int, seed: int = 0) -> None:
        """`target` is a port on this machine."""
        self._target, self._rng = target, random.Random(seed)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._open: list[socket.socket] = []
        self._flows = threading.Event()  # cleared: all bytes wait
        self._delay = (0.0, 0.0)  # seconds for all bytes, and the most seconds added at random
        self._garbage = False  # before the next bytes to the device
        self._lost = self._closed = False  # bytes to the device are lost; new connections are closed
        self.heal()
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self) -> None:
        """End every fault, for the remaining connections."""
        self._delay, self._garbage, self._lost, self._closed = (0.0, 0.0), False, False, False
        self._flows.set()

    def delay(self, seconds: float, jitter: float = 0.0) -> None:
        self._delay = (seconds, jitter)

    def stall(self) -> None:
        """Hold back all bytes; `heal` forwards them."""
        self._flows.clear()

    def half_open(self) -> None:
        """Silently drop the verifier's bytes."""
        self._lost = True

    def garbage(self) -> None:
        """Put random bytes before the next ones that go to the device."""
        self._garbage = True

    def cut(self) -> None:
        """End all connections with a reset; new ones are possible."""
        open_now, self._open = self._open, []
        for end in open_now:
            with suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                end.shutdown(socket.SHUT_RD)  # wakes the reader
            end.close()

    def close_door(self) -> None:
        """End all connections, and new ones as soon as they are made."""
        self._closed = True
        self.cut()

    def close(self) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self._flows.set()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                try:
                    if self._closed:
                        raise ConnectionRefusedError
                    far = socket.create_connection(("127.0.0.1", self._target))
                except OSError:  # the target is away
                    near.close()
                    continue
                self._open += [near, far]
                for source, sink, down in ((near, far, False), (far, near, True)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._forward, args=(source, sink, down), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, down: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                seconds, jitter = self._delay
                if seconds or jitter:
                    time.sleep(seconds + self._rng.random() * jitter)
                self._flows.wait()
                if down and self._lost:
                    continue
                if down and self._garbage:
                    self._garbage = False
                    data = self._rng.randbytes(self._rng.randrange(1, 200)) + data
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
