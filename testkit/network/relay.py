"""A slow network on this machine: a relay for TCP connections with a bandwidth and a round trip of its own."""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Self

BLOCK = 1448  # bytes sent together, as in an Ethernet frame


@dataclass(frozen=True, slots=True)
class Network:
    """A network: `megabits` a second in each direction; `round_trip` in seconds."""

    megabits: float
    round_trip: float


class Relay:
    """Listens on a loopback port of its own and forwards everything to `target`, with the network's delay."""

    def __init__(self, target: int, network: Network) -> None:
        """`target` is a port on this machine. All connections share each direction's bandwidth."""
        self._open: list[socket.socket] = []
        self._directions = _Direction(network), _Direction(network)
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        threading.Thread(target=self._accept, args=(target,), daemon=True).start()

    @property
    def carried(self) -> tuple[int, int]:
        """Bytes up and down so far."""
        return self._directions[0].carried, self._directions[1].carried

    def _accept(self, target: int) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._door.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", target))
                except OSError:  # the target does not listen now
                    near.close()
                    continue
                self._open += [near, far]
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._directions[0].join(near, far)
                self._directions[1].join(far, near)

    def cut(self) -> None:
        """End all connections; new ones are possible."""
        open_now, self._open = self._open, []
        for end in open_now:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        with suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        self.cut()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()


class _Direction:
    """One direction of a relay."""

    def __init__(self, network: Network) -> None:
        self._per_byte, self._delay = 8e-6 / network.megabits, network.round_trip / 2
        self._free = 0.0  # time at which the last byte so far is sent
        self._lock = threading.Lock()
        self.carried = 0

    def join(self, source: socket.socket, sink: socket.socket) -> None:
        line: SimpleQueue[tuple[float, bytes]] = SimpleQueue()
        threading.Thread(target=self._take, args=(source, line), daemon=True).start()
        threading.Thread(target=self._give, args=(line, sink), daemon=True).start()

    def _take(self, source: socket.socket, line: SimpleQueue[tuple[float, bytes]]) -> None:
        data = b" "
        with suppress(OSError):
            while data:
                data = source.recv(BLOCK)
                with self._lock:
                    self._free = max(self._free, time.perf_counter()) + self._per_byte * len(data)
                    self.carried += len(data)
                    line.put((self._free + self._delay, data))
                    late = self._free - time.perf_counter()
                time.sleep(max(0.0, late - 0.05))  # a sender notices when the line is full
        line.put((0.0, b""))

    def _give(self, line: SimpleQueue[tuple[float, bytes]], sink: socket.socket) -> None:
        with suppress(OSError):
            while (data := line.get())[1]:
                time.sleep(max(0.0, data[0] - time.perf_counter()))
                sink.sendall(data[1])
            sink.shutdown(socket.SHUT_WR)
