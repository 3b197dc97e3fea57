"""What the choice of a batch needs to know of a request, and no more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Want:
    """See `edgellm.verifier.scheduler.Schedulable`."""

    session: int
    unseen: int
    drafted: int
    arrival: int = 0
    device: str = ""
    turn: int = 0
