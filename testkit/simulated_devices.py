"""Many simulated devices at one verifier's worker, without a network: an open-loop load generator."""

import random
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter, sleep

import numpy as np

from edgellm.engine import Context, ContextSpec, Message, Model, SeqRows
from edgellm.spec.protocols import Tenant, VerifyRequest
from edgellm.spec.types import GREEDY, Chunk, Floats, Ids, Verdict
from edgellm.verifier.scheduler import SchedulerLimits
from edgellm.verifier.worker import VerifierWorker
from models.home.corpus import held_out
from models.home.families import FAMILIES

GAMMA, CACHED, WRONG = 4, 256, 0.3
ELSEWHERE = Tenant("fleet")
"""One tenant for all devices: Algorithm 1 has no turns, and the worker waits only for requests of its own process."""


@dataclass(frozen=True)
class Script:
    """The text of a device: `CACHED` tokens, and the verifier's own text after them."""

    before: Ids
    text: Ids

    def ask(self, device: int, rng: random.Random) -> VerifyRequest:
        """Return a request for a verdict on four tokens, with a wrong one in three cases of ten."""
        ids = self.text.copy()
        if rng.random() < WRONG:
            ids[rng.randrange(GAMMA)] ^= 1
        chunk = Chunk(ids=ids)
        return VerifyRequest(device, GREEDY, 0, self.before, chunk, tenant=ELSEWHERE)


def scripts(model: Model, devices: int, threads: int | None, seed: int) -> list[Script]:
    """Return a script for each device, from different places of held-out text."""
    made, rng = [], np.random.default_rng(seed)
    cases = [list(held_out(family, 4)) for family in FAMILIES]
    prompts = [[Message(turn.role, turn.text) for turn in case.prompt] for group in cases for case in group]
    stock = np.concatenate([model.chat_prompt(prompt) for prompt in prompts])
    with Context(model, ContextSpec(n_ctx=CACHED + GAMMA, threads=threads)) as context:
        for start in rng.integers(0, max(1, len(stock) - CACHED), devices):
            before = np.resize(stock[start:], CACHED).astype(np.int32)
            context.clear()
            feed, text = before, []
            for _ in range(GAMMA):
                text.append(int(context.decode(feed)[0].argmax()))
                feed = np.array(text[-1:], dtype=np.int32)
            made.append(Script(before, np.array(text, dtype=np.int32)))
    return made


class Clocked(Context):
    """A context that counts its seconds, and keeps the shape of each batch: (sequence, tokens, rows with logits)."""

    def __init__(self, model: Model, devices: int, threads: int | None, limits: SchedulerLimits) -> None:
        rows = max(limits.rows, 512, devices)  # llama.cpp aborts if a batch cannot hold a row of every sequence
        super().__init__(model, ContextSpec(CACHED + 64, devices, rows, threads, unified=False))
        self.began = 0.0  # the first batch, on the clock
        self.seconds = 0.0
        self.unseen = [1] * devices  # tokens of each sequence that the next request finds uncached
        self.batches: list[list[tuple[int, int, int]]] = []

    def decode_rows(self, rows: Sequence[SeqRows]) -> list[Floats]:
        began = perf_counter()
        if not self.batches:
            self.began = began
        views = super().decode_rows(rows)
        self.seconds += perf_counter() - began
        self.batches.append([(entry.seq, len(entry.ids), entry.outputs) for entry in rows])
        return views

    def sync(self, ids: Ids, seq: int = 0) -> int:
        known = super().sync(ids, seq)
        short = max(0, min(known, len(ids) - self.unseen[seq]))
        self.rollback(short, seq)
        return short


@dataclass(frozen=True)
class Arrival:
    """A chunk that a device sends `at` seconds after the start, after `kept` chunks that it did not send."""

    at: float
    device: int
    kept: int = 0


@dataclass
class Played:
    """The outcome of a trace: latency in seconds and time of each answer, in order of the answers."""

    latencies: list[float] = field(default_factory=list)
    answered: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    deliver: float = 0.0  # seconds of the worker's spent in this benchmark
    busy: float = 0.0  # from the first batch to the last answer


class Fleet:
    """A worker with room for every device. Each device has one open request; its others wait."""

    def __init__(
        self, model: Model, work: list[Script], threads: int | None, limits: SchedulerLimits, seed: int
    ) -> None:
        # sessions get slots in the order of their first requests, so that device i has slot i
        self.context = Clocked(model, len(work), threads, limits)
        self.worker = VerifierWorker(self.context, len(work), lambda _token: False, limits)
        self._work = work
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._lines: list[deque[Arrival]] = [deque() for _ in work]
        self._round = 0
        self._began = 0.0
        self._played = Played()
        self._left = threading.Semaphore(0)
        self.worker.start()
        self._fill()

    def close(self) -> None:
        self.worker.close()

    def _fill(self) -> None:
        """Compute the cached tokens of all devices."""
        over = threading.Semaphore(0)
        for device, script in enumerate(self._work):
            ask = VerifyRequest(device, GREEDY, 0, script.before, Chunk(), tenant=ELSEWHERE)
            self.worker.submit(ask).add_done_callback(lambda _answer: over.release())
        for _ in self._work:
            over.acquire()

    def play(self, arrivals: Sequence[Arrival]) -> Played:
        """Send every request at its time, open loop, and wait for all answers. Latency counts from the arrival."""
        self.context.seconds = 0.0
        self.context.batches.clear()
        self._played = Played()
        self._began = perf_counter()
        for arrival in arrivals:
            if (early := arrival.at - (perf_counter() - self._began)) > 0:
                sleep(early)
            with self._lock:
                line = self._lines[arrival.device]
                line.append(arrival)
                if len(line) == 1:
                    self._send(arrival)
        for _ in arrivals:
            self._left.acquire()
        self._played.seconds = perf_counter() - self._began
        self._played.busy = self._began + self._played.answered[-1] - self.context.began
        return self._played

    def _send(self, arrival: Arrival) -> None:
        ask = self._work[arrival.device].ask(arrival.device, self._rng)
        self.context.unseen[arrival.device] = 1 + GAMMA * arrival.kept
        self.worker.submit(ask).add_done_callback(partial(self._answered, arrival))

    def _answered(self, arrival: Arrival, answer: Future[Verdict]) -> None:
        began, verdict = perf_counter(), answer.result()
        played, now = self._played, began - self._began
        played.latencies.append(now - arrival.at)
        played.answered.append(now)
        played.tokens += verdict.accepted + len(verdict.tokens)
        with self._lock:
            line = self._lines[arrival.device]
            line.popleft()
            if line:
                self._send(line[0])
        played.deliver += perf_counter() - began
        self._left.release()


def kept_before(budget: float, rng: random.Random) -> int:
    """Draw the number of chunks kept unverified between two sent ones, for a `budget` of chunks that are sent."""
    kept = 0
    while kept < 6 and rng.random() >= budget:
        kept += 1
    return kept
