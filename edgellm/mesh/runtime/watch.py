"""Checks that a coordinator makes itself, because a stage may say anything: which rows it passes on, and whether an
answer comes in time. Wrong numbers of the right shape cannot be told from right ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np

from edgellm.errors import ProtocolError
from edgellm.mesh.messages import Parcel

IDLE_SECONDS = 60.0  # for which a request may be open while every device says that it has nothing to do
ANSWER_SECONDS = 300.0  # for each parcel of a request, once all layers are loaded
LOAD_SECONDS = 1800.0  # until the next piece is loaded
STOOD_SECONDS = 5.0  # between two checks, of which several come a second: a longer gap is a pause of this process


class OnTheWay:
    """The parcels sent through `stages` stages that are not answered yet. The owner locks it."""

    def __init__(self, stages: int) -> None:
        self._last = stages - 1
        self._known: dict[int, tuple[int, Parcel]] = {}  # by number: the furthest stage that it is known to be at
        self._highest = 0

    def sent(self, parcel: Parcel) -> None:
        """Remember a parcel that is given to the first stage."""
        self._known[parcel.number] = 0, parcel
        self._highest = max(self._highest, parcel.number)

    def passed(self, at: int, said: Parcel) -> Parcel | None:
        """Return the parcel for the next stage, when stage `at` says that a parcel has gone through it: the parcel as
        it was sent, with that stage's rows. None: the parcel is not waited for any more.

        Raises:
            ProtocolError: no such parcel was sent there, it has passed there already, or its rows have a wrong shape
                or values that are not finite.
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
        """Forget these parcels: they are not waited for any more."""
        for number in numbers:
            self._known.pop(number, None)

    def slowest(self, numbers: Sequence[int]) -> int:
        """Return the first stage that has not passed on one of these parcels, as far as that can be seen from here."""
        return min((self._known[number][0] for number in numbers if number in self._known), default=self._last)


class Deadline:
    """A deadline for the oldest open request, whatever the devices say about their work."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._moved = self._busy = self._looked = clock()

    def moved(self) -> None:
        """Restart the time: a first request was sent, a request was settled, or a device has loaded layers."""
        self._moved = self._busy = self._looked = self._clock()

    def passed(self, parcels: int, loaded: bool, idle: bool) -> bool:
        """Return whether a request of `parcels` parcels is overdue. `loaded`: all layers are loaded; `idle`: every
        device says that it has nothing to do."""
        now = self._clock()
        if (stood := now - self._looked) > STOOD_SECONDS:  # this process itself was paused
            self._moved, self._busy = self._moved + stood, self._busy + stood
        self._looked = now
        if not (loaded and idle):
            self._busy = now
        longest = ANSWER_SECONDS * parcels if loaded else LOAD_SECONDS
        return now - self._moved > longest or now - self._busy > IDLE_SECONDS


_UPDATE = "Run the same version of edgellm on both sides."
