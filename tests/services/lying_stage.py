"""A worker of a mesh that lies: every stage that it computes breaks the protocol with one lie."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgellm.engine import Floats
from edgellm.errors import InvalidOption
from edgellm.mesh.messages import Event, Failed, MicroBatch, StageAnswer, StageLost, StageTrace, TraceSpan
from edgellm.mesh.stage import Stage
from edgellm.mesh.stage_queue import InFlight
from edgellm.spec.types import Verdict

FLOOD = 2000
Lie = Callable[[Event], list[Event]]


def _rows(change: Callable[[Floats], Floats]) -> Lie:
    return _batch(lambda batch: replace(batch, data=change(np.atleast_2d(batch.data).astype(np.float32))))


def _batch(change: Callable[[MicroBatch], MicroBatch]) -> Lie:
    return lambda event: [change(event)] if isinstance(event, MicroBatch) else [event]


def _verdict(change: Callable[[Verdict], Verdict]) -> Lie:
    return lambda event: [replace(event, verdict=change(event.verdict))] if isinstance(event, StageAnswer) else [event]


def _number(event: Event) -> int:
    return event.number if isinstance(event, MicroBatch | StageAnswer) else 0


def _tokens(*ids: int) -> Lie:
    return _verdict(lambda verdict: replace(verdict, tokens=np.array(ids, np.int32)))


MIDDLE: dict[str, Lie] = {
    "rows of NaN": _rows(lambda rows: np.full_like(rows, np.nan)),
    "rows of infinity": _rows(lambda rows: np.full_like(rows, np.inf)),
    "fewer rows": _rows(lambda rows: rows[: max(1, len(rows) - 1)]),
    "more rows": _rows(lambda rows: np.vstack([rows, rows])),
    "wider rows": _rows(lambda rows: np.hstack([rows, rows])),
    "odd rows": _rows(lambda rows: rows[:, :-1]),
    "ids for rows": _batch(lambda batch: replace(batch, data=np.zeros(len(batch.data), np.int32))),
    "another session": _batch(lambda batch: replace(batch, session=batch.session ^ 1)),
    "no such session": _batch(lambda batch: replace(batch, session=1000)),
    "another number": _batch(lambda batch: replace(batch, number=batch.number + 1000)),
    "another place": _batch(lambda batch: replace(batch, start=batch.start + 7)),
    "twice": lambda event: [event, event],
    "endless": lambda event: [event] * FLOOD,
    "nothing": lambda _event: [],
    "an answer of its own": lambda event: [StageAnswer(_number(event), Verdict(0, np.array([5], np.int32), 0.1))],
    "failures": lambda event: [Failed(_number(event), InvalidOption("It is broken.", "Mend it."))],
    "an end": lambda _event: [StageLost(InvalidOption("It is broken.", "Mend it."))],
    "endless figures": lambda event: [StageTrace((TraceSpan("got", 1, 0.0, 0.0),) * FLOOD)] * 20 + [event],
}
LAST: dict[str, Lie] = {
    "a token out of range": _tokens(10**6),
    "no tokens": _tokens(),
    "many tokens": _tokens(*range(500)),
    "too many accepted": _verdict(lambda verdict: replace(verdict, accepted=verdict.accepted + 50)),
    "time that is none": _verdict(lambda verdict: replace(verdict, seconds=float("nan"))),
    "another answer": lambda event: (
        [replace(event, number=event.number + 1000)] if isinstance(event, StageAnswer) else []
    ),
    "answers twice": lambda event: [event, event],
    "no answer": lambda _event: [],
    "rows for an answer": lambda event: [MicroBatch(0, _number(event), 0, np.ones((1, 192), np.float32))],
    "failures for answers": lambda event: [Failed(_number(event), InvalidOption("It is broken.", "Mend it."))],
}


def _truth(event: Event) -> list[Event]:
    return [event]


EITHER = ("never loads", "works for ever")


class LyingStage(Stage):
    """A stage with one of the lies above."""

    lie = ""

    def _remove(self, moving: InFlight, event: Event | None) -> None:
        if self.lie == "works for ever":
            while not self._closed:
                self._steps += 1
                time.sleep(0.1)
        if event is None or self.lie in EITHER:
            super()._remove(moving, event)
            return
        super()._remove(moving, None)
        for lying in (MIDDLE | LAST).get(self.lie, _truth)(event):
            self._post(lying)

    def _load(self) -> None:
        while self.lie == "never loads" and not self._closed:
            self._share += 1e-6
            time.sleep(0.1)
        super()._load()
