"""The records of the verifier's worker: what it is asked, what it answers, what it has done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from edgellm.errors import EdgeError
from edgellm.serve.fairness import Tenant
from edgellm.spec.records import Chunk, Ids, Logprobs, Sampling, Verdict


@dataclass(frozen=True, slots=True)
class Missing:
    """The session holds only the first `position` tokens: the others have to be sent again."""

    position: int


Answer: TypeAlias = Verdict | Missing | EdgeError
Deliver: TypeAlias = Callable[[Answer], None]


@dataclass(frozen=True, slots=True)
class Counters:
    """What the worker has done so far. `shared` batches held several sessions, the `widest` that many.

    `rows` were computed; `copied` tokens at the beginning of a session were not, as another session's cache had them.
    `preemptions`: a request under way lost its slot to another device's, and goes on when it gets one again.
    """

    batches: int = 0
    prefills: int = 0
    shared: int = 0
    widest: int = 0
    rows: int = 0
    copied: int = 0
    verdicts: int = 0
    verified: int = 0
    evictions: int = 0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """What a session asks for: a verdict on `chunk` after `ids`, which are all tokens before it.

    `since` is the number of prefill batches that had been computed when it came; `logprobs` as in `Ask`.
    """

    session: int
    tenant: Tenant
    sampling: Sampling
    ids: Ids
    chunk: Chunk
    extra: int
    since: int
    deliver: Deliver
    logprobs: int | None = None


@dataclass(slots=True)
class Job:
    """A request that is being computed. The cache of its `slot` (-1: it waits for one) holds the first `done` of `ids`;
    `chunk` comes behind them. What is known of the verdict is in the fields of its names. `held` are the passes since
    it got its slot.

    While it has a `leader`, another job that computes the first `common` of these ids, it waits for that one.
    """

    request: Request
    ids: Ids
    chunk: Chunk
    slot: int = -1
    done: int = 0
    held: int = 0
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passes: int = 0
    plausible: tuple[bool, ...] = ()
    logprobs: list[Logprobs] = field(default_factory=list)
    leader: Job | None = None
    common: int = 0


class Pace:
    """How long an answer takes of late: computing seconds and answers, of which older ones count less and less."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._answers = 0.0

    def batch(self, seconds: float, answers: int) -> None:
        """A batch took `seconds`, and `answers` requests were answered by it."""
        self._seconds = _FADE * self._seconds + seconds
        self._answers = _FADE * self._answers + answers

    def seconds(self, requests: int) -> float:
        """How long it takes until `requests` are answered."""
        if not self._answers:  # none so far: one takes at least what has gone into it
            return requests * max(self._seconds, _FIRST_GUESS)
        return requests * self._seconds / self._answers


_FADE = 0.98  # what a batch counts for after the next one: the last fifty or so are remembered
_FIRST_GUESS = 0.1  # seconds
