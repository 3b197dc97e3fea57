"""What a coordinator checks itself, because a stage may say anything: which rows it passes on, and that an answer comes
in time. Wrong numbers of the right shape cannot be told from right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from edgellm.errors import ProtocolError
from edgellm.mesh.messages import Parcel

IDLE_SECONDS = 60.0  # a question is open, and every device says that it has nothing to do
ANSWER_SECONDS = 300.0  # for each parcel of a question, where all layers are loaded
LOAD_SECONDS = 1800.0  # until the next piece is loaded
STOOD_SECONDS = 5.0  # between two looks, which come several times a second


class OnTheWay:
    """The parcels that have been sent through `stages` stages and are not answered yet. Its owner holds a lock."""

    def __init__(self, stages: int) -> None:
        self._last = stages - 1
        self._known: dict[int, tuple[int, Parcel]] = {}  # by number: the furthest stage that it is known to be at
        self._highest = 0

    def sent(self, parcel: Parcel) -> None:
        """A parcel is given to the first stage."""
        self._known[parcel.number] = 0, parcel
        self._highest = max(self._highest, parcel.number)

    def passed(self, at: int, said: Parcel) -> Parcel | None:
        """Return what the next stage is to be given where the one `at` says that a parcel has gone through it: what was
        sent, with the rows that it gives. None: nobody waits for that parcel any more.

        Raises:
            ProtocolError: no such parcel was sent there, it has passed there already, or its rows are not what it held.
        """
        if said.number > self._highest or at >= self._last:
            raise ProtocolError(f"Parcel {said.number} was never sent that way.", _UPDATE)
        if said.number not in self._known:
            return None
        before, parcel = self._known[said.number]
        if at < before:
            raise ProtocolError(f"Parcel {said.number} is passed on twice.", _UPDATE)
        if said.data.ndim != 2 or len(said.data) != len(parcel.data) or not np.isfinite(said.data).all():
            raise ProtocolError(
                f"Of {len(parcel.data)} positions come {len(said.data)} rows, or numbers that are none.",
                "The model's file on that device may be damaged: fetch it anew, or bring its layers again.",
            )
        self._known[said.number] = at + 1, parcel
        return replace(parcel, data=said.data)

    def over(self, numbers: Sequence[int]) -> None:
        """Nobody waits for these parcels any more."""
        for number in numbers:
            self._known.pop(number, None)

    def slowest(self, numbers: Sequence[int]) -> int:
        """Return the first stage that has not passed on one of these parcels, as far as that can be seen from here."""
        return min((self._known[number][0] for number in numbers if number in self._known), default=self._last)


class Deadline:
    """When the oldest open question is overdue, whatever the devices say of what they do."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._moved = self._busy = self._looked = clock()

    def moved(self) -> None:
        """A question was asked where none was open, answered, or a device has loaded something."""
        self._moved = self._busy = self._looked = self._clock()

    def passed(self, parcels: int, loaded: bool, idle: bool) -> bool:
        """Whether it is too late for a question of so many parcels. `loaded`: all layers are; `idle`: every device says
        that it has nothing to do."""
        now = self._clock()
        if (stood := now - self._looked) > STOOD_SECONDS:  # this process itself did
            self._moved, self._busy = self._moved + stood, self._busy + stood
        self._looked = now
        if not (loaded and idle):
            self._busy = now
        longest = ANSWER_SECONDS * parcels if loaded else LOAD_SECONDS
        return now - self._moved > longest or now - self._busy > IDLE_SECONDS


_UPDATE = "Run the same version of edgellm on both sides."
