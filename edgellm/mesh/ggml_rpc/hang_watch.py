"""Notices that a server, or the process with the model, hangs while an order to that process is open.

llama.cpp waits for a server without a limit, and a server that hangs keeps its connection, while the worker that has
started it goes on saying that it is alive. So the bytes between the process and the servers are watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import Protocol

from edgellm.spec.patience import VerdictDeadline, VerdictWork

LOAD_SECONDS = 120.0
"""Of silence while a model is loaded: a server may read a large tensor from its disk meanwhile."""
LEAST_SECONDS = 10.0
"""Of silence in any other order: giving up a device costs that the model is loaded again."""
BEAT_SECONDS = 0.25
_LATE_BEATS = 4  # a look that comes later says nothing: this process, or the machine, was suspended


class Traffic(Protocol):
    """The bytes between the process and one server."""

    @property
    def moved(self) -> int:
        """How many bytes have gone through, both ways."""
        ...

    @property
    def asked_at(self) -> float | None:
        """The `monotonic` time of the last bytes to the server, None if it has answered since."""
        ...


class HangWatch:
    """Watches the orders to one process, of which one is open at a time.

    A byte in either direction, and a report of the process, are signs of life. How long there may be none follows from
    the fastest pass that was seen, and from the rows of the order: reading a prompt may take long.
    """

    def __init__(self, on_hang: Callable[[int | None, float], None], beat: float = BEAT_SECONDS) -> None:
        """Call `on_hang` from a thread of the watch, once, when there was no sign of life for too long: with the number
        of the server that owes an answer, None if it is the process itself, and the seconds of silence."""
        self._on_hang, self._beat = on_hang, beat
        self._deadline = VerdictDeadline(LEAST_SECONDS)
        self._servers: tuple[Traffic, ...] = ()
        self._reports = self._orders = 0
        self._limit: float | None = None  # seconds, of the open order
        self._open, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def load(self, servers: Sequence[Traffic]) -> Iterator[None]:
        """Watch the order to load the model over `servers`, which are watched from now on."""
        self._servers = tuple(servers)
        self._thread = threading.Thread(target=self._watch, name="edgellm-rpc-watch", daemon=True)
        self._thread.start()
        with self._order(LOAD_SECONDS):
            yield

    @contextmanager
    def decode(self, rows: int) -> Iterator[None]:
        """Watch an order that computes so many rows, or none."""
        work, began = VerdictWork(rows, 1), perf_counter()
        with self._order(self._deadline.limit(work)):
            yield
        if rows:
            self._deadline.record(work, perf_counter() - began)

    def report(self) -> None:
        """Note that the process has told of its progress."""
        self._reports += 1

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()
        self._open.set()

    @contextmanager
    def _order(self, limit: float) -> Iterator[None]:
        self._orders += 1
        self._limit = limit
        self._open.set()
        try:
            yield
        finally:
            self._limit = None

    def _watch(self) -> None:
        seen: tuple[int, ...] = ()
        beats, looked = 0, monotonic()
        while not self._closed.wait(self._beat):
            limit, late = self._limit, monotonic() - looked > _LATE_BEATS * self._beat
            looked = monotonic()
            if limit is None:  # this thread sleeps while nobody asks
                self._open.clear()
                if self._limit is None:
                    self._open.wait()
                looked = monotonic()
                continue
            now = (self._orders, self._reports, *(server.moved for server in self._servers))
            beats = beats + (not late) if now == seen else 0
            seen = now
            if beats * self._beat > limit:
                self._on_hang(self._owing(), beats * self._beat)
                return

    def _owing(self) -> int | None:
        """Return the server that was asked last and has not answered: llama.cpp waits for one at a time."""
        asked = [(server.asked_at, number) for number, server in enumerate(self._servers)]
        return max(((at, number) for at, number in asked if at is not None), default=(0.0, None))[1]
