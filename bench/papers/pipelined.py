"""Drafting by a strategy of `bench.papers.pipesd`, with uploads in advance through the relay that carries the requests.

The device's protocol sends ids alone, so distributions travel as padding: those of a whole draft in its request, or, in
a pipeline, in batches over a connection of their own to a server that acknowledges them, one after another as HTTP
requests are. A request that was preceded by batches leaves when these have arrived, and has what is left.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from time import perf_counter, sleep
from unittest.mock import patch

import numpy as np

from bench.papers.pipesd import Cost, Schedule, Strategy
from bench.synera.bandwidth import padded_requests
from edgellm.services.client.verifier_client import SentRequest, Stream, lost
from edgellm.spec.drafters.parallel import truncated
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Ids, Round

_LENGTH = struct.Struct(">I")


@contextmanager
def acknowledging() -> Iterator[int]:
    """Yield the port of a server that acknowledges each batch with a byte."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        threading.Thread(target=_accept, args=(door,), daemon=True).start()
        yield door.getsockname()[1]
        with suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)


def _accept(door: socket.socket) -> None:
    with suppress(OSError):
        while True:
            near, _ = door.accept()
            threading.Thread(target=_acknowledge, args=(near,), daemon=True).start()


def _acknowledge(near: socket.socket) -> None:
    with near, suppress(OSError), near.makefile("rb") as source:
        while len(head := source.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if len(source.read(length)) < length:
                return
            near.sendall(b"\1")


@dataclass(slots=True)
class _Batch:
    tokens: int
    draft: int  # number of the draft
    arrived: Future[None] = field(default_factory=Future)


class Uploads:
    """Batches of tokens on their way, one after another. `tokens` counts those that were sent."""

    def __init__(self, port: int, bytes_per_token: int) -> None:
        """Connect to an acknowledging server, perhaps behind a relay, at `port` on this machine."""
        self._bytes = bytes_per_token
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._queue: SimpleQueue[_Batch | None] = SimpleQueue()
        self._draft, self._not_before = 0, 0.0
        self._last: Future[None] = Future()
        self._last.set_result(None)
        self.tokens = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def send(self, tokens: int) -> None:
        """Send a batch behind the others."""
        batch = _Batch(tokens, self._draft)
        self._last = batch.arrived
        self._queue.put(batch)

    @property
    def arrived(self) -> Future[None]:
        """Return what is done when all batches so far have arrived, or were dropped."""
        return self._last

    def drop(self) -> None:
        """Drop the batches that have not begun."""
        self._draft += 1

    def wait(self, seconds: float) -> None:
        """Begin no batch in the next `seconds`, in which the link has something else to carry."""
        self._not_before = perf_counter() + seconds

    def close(self) -> None:
        self.drop()
        self._queue.put(None)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while (batch := self._queue.get()) is not None:
            try:
                sleep(max(0.0, self._not_before - perf_counter()))
                if batch.draft == self._draft:
                    self._carry(batch.tokens)
                batch.arrived.set_result(None)
            except OSError as error:
                batch.arrived.set_exception(error)

    def _carry(self, tokens: int) -> None:
        length = tokens * self._bytes
        self.tokens += tokens
        self._socket.sendall(_LENGTH.pack(length) + bytes(length))
        if not self._socket.recv(1):
            raise ConnectionResetError("The server of the batches is gone.")


class Pipeline:
    """The uploads of one draft after the other, by PipeSD's schedule at `cost`, which may change between replies."""

    def __init__(self, uploads: Uploads, cost: Cost) -> None:
        self.uploads, self.cost = uploads, cost
        self._schedule = Schedule()
        self._sizes = self._schedule.sizes(cost)
        self._size, self._length = next(self._sizes), 0
        self.left = 0  # tokens of the draft that are in no batch so far
        self._due: dict[SentRequest, Future[None]] = {}

    def begin(self) -> None:
        """Begin a draft."""
        self._sizes = self._schedule.sizes(self.cost)
        self._size, self._length, self.left = next(self._sizes), 0, 0

    def discard(self) -> None:
        """Begin a draft in place of one that is not verified."""
        self.uploads.drop()
        self.begin()

    def add(self, *, last: bool) -> None:
        """Add a token, the `last` one of the draft or one that is sent with its batch."""
        self._length += 1
        self.left += 1
        if last:
            self._schedule.record(self._length)
        elif self.left >= self._size:
            self.uploads.send(self.left)
            self._size, self.left = next(self._sizes), 0

    def padding(self, asked: SentRequest) -> int:
        """Return the tokens that a request has to carry."""
        if not len(asked.request.draft):
            return 0
        self._due[asked] = self.uploads.arrived
        return min(self.left, len(asked.request.draft))

    def leaves(self, asked: SentRequest, tokens: int) -> Future[None] | None:
        """Return what a request waits for, None if nothing; it carries so many `tokens`."""
        due = self._due.pop(asked, None)
        if due is not None:
            due.add_done_callback(lambda _: self.uploads.wait(tokens * self.cost.per_token))
        return due


@contextmanager
def distributions(bytes_per_token: int, pipeline: Pipeline | None = None) -> Iterator[None]:
    """Let requests carry the distributions of their drafts, or what `pipeline` leaves of them."""
    if pipeline is None:
        with padded_requests(lambda asked: bytes_per_token * len(asked.request.draft)):
            yield
        return
    send = Stream.send

    def send_later(stream: Stream, asked: SentRequest, data: bytes) -> None:
        due = pipeline.leaves(asked, len(data) // bytes_per_token)
        if due is None:
            send(stream, asked, data)
            return
        loop = asyncio.get_running_loop()

        def go_on(arrived: Future[None]) -> None:
            if (error := arrived.exception()) is None:
                send(stream, asked, data)
            else:
                asked.fail(lost(f"A batch did not arrive: {error}"))

        due.add_done_callback(lambda arrived: loop.call_soon_threadsafe(go_on, arrived))

    with ExitStack() as patches:
        patches.enter_context(padded_requests(lambda asked: bytes_per_token * pipeline.padding(asked)))
        patches.enter_context(patch.object(Stream, "send", send_later))
        yield


class StrategicDrafter(Drafter):
    """Drafts token by token as a strategy says; `pipeline` uploads what is drafted."""

    def __init__(
        self, drafter: Drafter, strategy: Strategy, is_eog: Callable[[int], bool], pipeline: Pipeline | None = None
    ) -> None:
        """Take over `drafter`, which drafts with the model."""
        self._drafter, self._strategy, self._is_eog, self._pipeline = drafter, strategy, is_eog, pipeline
        self._trigger = strategy.trigger
        self._ahead: tuple[Ids, Chunk] | None = None  # a text that may come, and what was drafted behind it

    def begin(self, state: GenerationState) -> None:
        """See `Drafter.begin`."""
        self._trigger, self._ahead = self._strategy.trigger, None
        self._drafter.begin(state)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """See `Drafter.propose`. What was drafted ahead behind just this text is a beginning."""
        (text, chunk), self._ahead = self._ahead or (state.ids, Chunk()), None
        if not len(chunk) or not np.array_equal(text, state.ids):
            chunk = Chunk()
            if self._pipeline is not None:
                self._pipeline.discard()
        ahead = len(chunk := truncated(chunk, gamma))
        chunk = self._drafted(state, chunk, gamma, lambda: False)
        return Chunk(chunk.ids, chunk.confidence, chunk.margin, ahead=ahead)

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """See `Drafter.look_ahead`: behind the whole chunk and the draft model's next token."""
        whole = state.with_draft(chunk.ids)
        room = state.limits.context - len(whole.ids) - 1
        if not self._strategy.ahead or self._is_eog(int(chunk.ids[-1])) or room < 1 or until():
            return
        guessed = whole.with_draft(self._drafter.propose(whole, 1).ids)
        if self._is_eog(int(guessed.ids[-1])):
            return
        if self._pipeline is not None:
            self._pipeline.begin()
        self._ahead = guessed.ids, self._drafted(guessed, Chunk(), min(gamma, room), until)

    def _drafted(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> Chunk:
        """Return `chunk` with the tokens that follow, up to where it is to be verified."""
        while not self._complete(chunk, gamma) and not until():
            new = self._drafter.propose(state.with_draft(chunk.ids), 1)
            chunk = Chunk(
                np.concatenate((chunk.ids, new.ids)),
                np.concatenate((chunk.confidence, new.confidence)),
                np.concatenate((chunk.margin, new.margin)),
            )
            if self._pipeline is not None:
                self._pipeline.add(last=self._complete(chunk, gamma))
        return chunk

    def _complete(self, chunk: Chunk, gamma: int) -> bool:
        n = len(chunk)
        return n > 0 and (n >= gamma or self._is_eog(int(chunk.ids[-1])) or self._trigger.fires(chunk.confidence))

    def observe(self, state: GenerationState, turn: Round) -> None:
        """See `Drafter.observe`."""
        self._drafter.observe(state, turn)
        if self._strategy.adapts and turn.verdict is not None:
            self._trigger = self._trigger.adapted(turn.chunk.confidence, turn.verdict.accepted)

    def end(self) -> None:
        """See `Drafter.end`."""
        self._ahead = None
        self._drafter.end()

    def close(self) -> None:
        """See `Drafter.close`."""
        self._drafter.close()
