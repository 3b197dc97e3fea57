"""Which verifications share a batch, and how many drafted tokens of each are verified now (DiP-SD's question, arXiv
2604.20919, at every batch).

A batch of n requests with r rows each takes about a + n g(r) seconds. A drafted token is worth the chance that it and
those before it are accepted, and a second the tokens that the verifier lately verified in one. So the best partition of
the waiting requests into batches maximises

    expected tokens - tokens a second * seconds

(Dinkelbach 1967). The batch of the request that is first in line is computed; it does not wait for a better one. What
is cut off a draft is verified once the tokens before it are accepted, as a part of the same request: verdicts do not
depend on any of this.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from time import monotonic
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgellm.verifier.requests import VerifyRequest
from edgellm.verifier.scheduler import BatchKind, ScheduledBatch, ScheduledSlice, alike

ROWS = (1, 2, 3, 5, 9, 17, 33)
"""Rows of a request in a batch; besides, as many as the first request in line has before its draft."""
MIN_REQUESTS = 12
"""With fewer requests waiting, drafts are verified as they come: nothing is gained then (`bench.papers.batching`)."""
MAX_UNSEEN = 8
"""Requests with more tokens before their drafts are left to Algorithm 1: they are few, and rarely fit another."""

Numbers = npt.NDArray[np.float64]
_log = logging.getLogger(__name__)


class Offer(NamedTuple):
    """What a request may add to a batch: with `unseen` + j rows, `expected[j]` tokens."""

    unseen: int
    expected: Sequence[float]


class Times(NamedTuple):
    """The cost of a batch: `fixed`, and `each[r]` for a request with r rows."""

    fixed: float
    each: Sequence[float]


def choose_rows(offers: Sequence[Offer], cost: Times) -> list[int]:
    """Return the rows of each of `offers`, 0 for one that has none of `ROWS`; those with equal rows form a batch. Of
    all such partitions it is the one with the most expected tokens beyond their `cost`, which is in tokens."""
    most = max(unseen + len(expected) for unseen, expected in offers)
    rows = [r for r in sorted({offers[0].unseen, *ROWS}) if r < most]
    gains = np.full((len(offers), len(rows)), -np.inf)
    for line, (unseen, expected) in zip(gains, offers, strict=True):
        for at, r in enumerate(rows):
            if unseen <= r < unseen + len(expected):
                line[at] = expected[r - unseen] - cost.each[r]
    covers = (gains[:, :, None] >= gains[:, None, :]).all(axis=0)  # in [q, r]: q rows gain as much as r, for all
    kept = np.flatnonzero(~(covers & (~covers.T | np.triu(covers, 1))).any(axis=0)).tolist()
    gains, rows = gains[:, kept], [rows[at] for at in kept]
    able = gains.max(axis=1) > -np.inf
    sets = (np.arange(1, 2 ** len(rows))[:, None] >> np.arange(len(rows)) & 1).astype(bool)
    best = np.where(sets[:, None, :], gains[able], -np.inf).max(axis=2).sum(axis=1) - cost.fixed * sets.sum(axis=1)
    chosen = np.flatnonzero(sets[best.argmax()])
    picked: list[int] = np.array(rows)[chosen[gains[:, chosen].argmax(axis=1)]].tolist()
    return [r if fits else 0 for r, fits in zip(picked, able.tolist(), strict=True)]


class DraftAcceptance:
    """How often drafted tokens are accepted once those before them are, by their place, and by device."""

    def __init__(self) -> None:
        self._accepted = {kind: [_PRIOR * _WEIGHT] * len(_PLACES) for kind in (False, True)}  # by `Chunk.retrieved`
        self._tries = {kind: [_WEIGHT] * len(_PLACES) for kind in (False, True)}
        self._devices: dict[str, tuple[float, float]] = {}  # tokens accepted and expected, the latest device last

    def chances(self, request: VerifyRequest) -> Iterator[float]:
        """Yield for each remaining drafted token the chance that it and those before it are accepted."""
        accepted, tries = self._accepted[request.draft.retrieved], self._tries[request.draft.retrieved]
        trust, chance = self._trust(request.device), 1.0
        for place in range(request.accepted, request.accepted + request.drafted):
            at = _bin(place)
            chance *= min(_MOST, trust * accepted[at] / tries[at])
            yield chance

    def observe(self, request: VerifyRequest, start: int, judged: int) -> None:
        """Learn that of the `judged` tokens from place `start` on, those were accepted that are by now."""
        accepted, tries = self._accepted[request.draft.retrieved], self._tries[request.draft.retrieved]
        right, expected = self._devices.pop(request.device, (_TRUST, _TRUST))
        for place in range(start, min(request.accepted + 1, start + judged)):
            at, stands = _bin(place), place < request.accepted
            share = accepted[at] / tries[at]
            right = _TRUST + _KEPT_TRUST * (right - _TRUST) + stands
            expected = _TRUST + _KEPT_TRUST * (expected - _TRUST) + share
            accepted[at] = _KEPT * accepted[at] + stands
            tries[at] = _KEPT * tries[at] + 1.0
        self._devices[request.device] = right, expected
        if len(self._devices) > _MAX_DEVICES:
            del self._devices[next(iter(self._devices))]

    def _trust(self, device: str) -> float:
        right, expected = self._devices.get(device, (1.0, 1.0))
        return right / expected


class BatchTimes:
    """How long batches take, learned from them by least relative squares, and what is verified meanwhile."""

    def __init__(self) -> None:
        n = len(ROWS) + 1
        self._squares, self._sums = np.zeros((n, n)), np.zeros(n)
        self._known, self._scale = 0, 0.0
        self._seen = np.zeros(n)  # batches, and those by their rows, as they count for times
        self._requests = np.zeros(n)  # batches, and requests by their rows
        self._tokens = self._busy = self._idle = 0.0
        self._cost: Times | None = None

    def add(self, requests: int, rows: int, tokens: int, seconds: float, idle: float) -> None:
        """Record a batch of so many `requests` with so many `rows` each that verified `tokens` in `seconds`, after
        `idle` seconds in which no request waited."""
        shape = np.zeros(len(self._requests))
        shape[0], shape[1 + int(np.abs(np.log(_ROWS / rows)).argmin())] = 1.0, requests
        relative = shape / max(seconds, 1e-9)
        self._squares = _KEPT_TIMES * self._squares + np.outer(relative, relative)
        self._sums = _KEPT_TIMES * self._sums + relative
        self._seen = _KEPT_TIMES * self._seen + (shape > 0.0)
        self._scale += (np.log(max(seconds, 1e-9) / float(_USUAL @ shape)) - self._scale) / self._seen[0]
        self._requests = _KEPT_BATCHES * self._requests + shape
        self._tokens = _KEPT_BATCHES * self._tokens + tokens
        self._busy = _KEPT_BATCHES * self._busy + seconds
        self._idle = _KEPT_BATCHES * self._idle + min(idle, _MAX_IDLE)
        self._known += 1
        if self._known >= _MIN_BATCHES and self._known % _REFIT == 0:
            self._cost = self._fitted()

    @property
    def cost(self) -> Times | None:
        """The cost of a batch in tokens that could be verified in its time, less where the verifier is often idle,
        because its time is worth little then. None while it is not known."""
        return self._cost

    def _fitted(self) -> Times:
        usual = np.exp(self._scale) * _USUAL
        guess = _TRUST_GUESSES * _GUESSES / (_GUESSES @ usual)[:, None]
        seconds = np.linalg.solve(self._squares + guess.T @ guess, self._sums + guess.sum(axis=0))
        each = np.maximum.accumulate(self._extrapolated(np.maximum(seconds[1:], 0.0)))
        fixed = max(float(seconds[0]), 0.0)
        taken = fixed * self._requests[0] + float(each @ self._requests[1:])
        price = self._tokens / taken * self._busy / (self._busy + self._idle) if taken else 0.0
        return Times(price * fixed, [0.0, *(price * np.interp(np.arange(1, ROWS[-1] + 1), ROWS, each)).tolist()])

    def _extrapolated(self, each: Numbers) -> Numbers:
        """Return `each` with the rows that were hardly tried lately in line with the others: where nothing is known of
        long drafts they must not stay untried."""
        seen = np.flatnonzero(self._seen[1:] >= _LEAST_SEEN)
        if len(seen) < 2:
            return each
        low, high = seen[0], seen[-1]
        slope = (each[high] - each[low]) / (_ROWS[high] - _ROWS[low])
        beyond: Numbers = np.interp(_ROWS, _ROWS[seen], each[seen]) + slope * np.maximum(_ROWS - _ROWS[high], 0.0)
        return beyond


class BatchShapes:
    """Chooses the shape of each batch of verifications, and learns from it. The engine's thread calls its methods."""

    def __init__(self) -> None:
        self._acceptance, self._times = DraftAcceptance(), BatchTimes()
        self._offers: dict[int, tuple[VerifyRequest, tuple[int | None, ...], Offer]] = {}  # by session
        self._computing: list[tuple[int, int]] = []  # accepted tokens and text of each request, before the batch
        self._began = self._idle = 0.0  # when the batch began, and seconds before it in which no request waited
        self._ended: float | None = None  # when the batch before it ended
        self._left = False  # whether requests waited then
        self.reason = "Drafts are verified as they come: the times of batches are not known yet"
        self._explained: Times | None = None  # the cost of which `reason` tells
        self._logged = 0.0  # its `fixed` in the log

    def shape(
        self, requests: Sequence[VerifyRequest], max_drafted: int | None
    ) -> Iterable[ScheduledSlice[VerifyRequest]]:
        """Return the slices of the best batch with the first of `requests`, in their order. No request has more than
        `max_drafted` drafted tokens.

        Where no draft is copied, they stay whole: devices copy as if rows were free, but a draft model writes a few
        tokens that mostly stand.
        """
        cost = self._times.cost
        copied = any(request.draft.retrieved and request.drafted for request in requests)
        if cost is None or not copied or len(requests) < MIN_REQUESTS or requests[0].unseen > MAX_UNSEEN:
            return alike(requests, max_drafted)
        rows = choose_rows([self._offer(request, max_drafted) for request in requests], cost)
        if len(self._offers) > 2 * len(requests) + _MAX_DEVICES:  # most are of requests that were answered
            self._offers.clear()
        if cost is not self._explained:
            self._explain(cost)
        return [
            ScheduledSlice(request, n, n - request.unseen + 1)
            for request, n in zip(requests, rows, strict=True)
            if n == rows[0]
        ]

    def _explain(self, cost: Times) -> None:
        """Set the reason, and log it if it is new."""
        self._explained = cost
        self.reason = (
            f"Drafts are cut to what pays: a batch costs the time in which {cost.fixed:.1f} tokens are verified, and a"
            f" request in it with 1, 2 or 5 rows {cost.each[1]:.2f}, {cost.each[2]:.2f} or {cost.each[5]:.2f}"
        )
        if not self._logged or abs(cost.fixed - self._logged) > _NEWS * self._logged:
            self._logged = cost.fixed
            _log.info("%s", self.reason)

    def on_chosen(self, batch: ScheduledBatch[VerifyRequest], waiting: int) -> None:
        """Note `batch`, which is computed next; so many requests are `waiting` for another one."""
        now = monotonic()
        pause = 0.0 if self._ended is None else now - self._ended
        self._began, self._idle = (now - pause, 0.0) if self._left else (now, pause)
        self._left = waiting > 0
        self._computing = [(piece.request.accepted, piece.request.prefix_length) for piece in batch.slices]

    def on_batch(self, batch: ScheduledBatch[VerifyRequest]) -> None:
        """Learn from the batch of the last `on_chosen`, which has been computed and judged."""
        self._ended = monotonic()
        tokens = 0
        for (request, _, outputs), (accepted, length) in zip(batch.slices, self._computing, strict=True):
            tokens += request.prefix_length - length
            if outputs and accepted < len(request.draft):
                self._acceptance.observe(request, accepted, min(outputs, len(request.draft) - accepted))
        if batch.kind is BatchKind.VERIFY:
            piece = batch.slices[0]
            self._times.add(len(batch.slices), piece.tokens, tokens, self._ended - self._began, self._idle)

    def _offer(self, request: VerifyRequest, max_drafted: int | None) -> Offer:
        """Return what a request offers, as it was expected when it was last looked at after progress."""
        known = self._offers.get(request.session)
        state = request.prefix_length, request.unseen, request.drafted, max_drafted
        if known is not None and known[0] is request and known[1] == state:
            return known[2]
        expected = [1.0]
        for chance in islice(self._acceptance.chances(request), max_drafted):
            if chance < _LEAST:
                break
            expected.append(expected[-1] + chance)
        offer = Offer(request.unseen, expected)
        self._offers[request.session] = request, state, offer
        return offer


def _bin(place: int) -> int:
    return next(at for at, end in enumerate(_PLACES) if place < end)


_PLACES = (1, 3, 7, 15, 1 << 30)  # ends of the ranges of places that are learned apart
_PRIOR, _WEIGHT = 0.7, 2.0  # acceptance before any verdict, and the tokens that it counts for
_MOST = 0.99  # chance of a token
_LEAST = 0.02  # chance below which nothing more of a draft is looked at
_TRUST = 8.0  # tokens that the mean of all devices counts for
_KEPT, _KEPT_TRUST = 0.995, 0.97  # decay per token, of all devices and of one
_MAX_DEVICES = 256
_MAX_IDLE = 1.0  # seconds between two batches that count
_KEPT_TIMES, _KEPT_BATCHES = 0.995, 0.98  # decay per batch, of times and of what was verified
_MIN_BATCHES, _REFIT = 8, 4  # batches from which times are learned, and after which they are fitted again
_ROWS = np.array(ROWS, np.float64)
_USUAL = np.array([2.0, *(r + 2.0 for r in ROWS)])  # a, and g of each of `ROWS`, relative to each other, before
_GUESSES = np.array([[1.0, *(n * (r == other) for other in ROWS)] for r in ROWS for n in (1.0, 8.0)])
_NEWS = 0.5  # share by which the cost of a batch changes before it is logged again
_LEAST_SEEN = 4.0  # batches of a number of rows from which their time is known
_TRUST_GUESSES = 0.3  # the weight of a guess relative to a batch
