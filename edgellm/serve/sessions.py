"""Who has which sequence of the verifier's context: few sequences, more sessions than that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgellm.spec.records import Ids


@dataclass(slots=True)
class _Slot:
    owner: int | None = None
    pinned: bool = False
    used: int = 0  # when, on the table's own clock


class SessionTable:
    """Sessions and the slots (sequences of one context) that hold their tokens.

    A session gets a slot with its first request and keeps it until it ends, or until it is the least recently used
    one when another session needs a slot. While a request is under way its slot is pinned. The tokens of an ended
    session stay cached: whoever begins alike next, such as the next turn of the same chat, gets that slot.
    """

    def __init__(self, slots: int, cached: Callable[[int], Ids]) -> None:
        """`cached(slot)` tells the tokens that the context holds for a slot."""
        self._slots = [_Slot() for _ in range(slots)]
        self._of: dict[int, int] = {}  # the slot of each session that has one
        self._pinned = 0
        self._cached = cached
        self._clock = 0
        self.evictions = 0

    def slot(self, session: int) -> int | None:
        """The slot of `session`, None where it has none (any more)."""
        return self._of.get(session)

    @property
    def alone(self) -> bool:
        """Whether no more than one session has a slot."""
        return len(self._of) < 2

    def claim(self, session: int, ids: Ids) -> int | None:
        """Pins a slot for a request of `session` on the tokens `ids` (n,); None while every slot is pinned."""
        mine = self._of.get(session)
        if mine is None:
            if self._pinned == len(self._slots):
                return None
            mine = self._best(ids)
            before = self._slots[mine].owner
            if before is not None:
                del self._of[before]
                self.evictions += 1
            self._of[session] = mine
        self._set(mine, session, pinned=True)
        return mine

    def release(self, session: int) -> None:
        """The request is answered: the slot may be taken when it is the least recently used one."""
        mine = self._of.get(session)
        if mine is not None:
            self._set(mine, session, pinned=False)

    def drop(self, session: int) -> None:
        """The session is over; what is cached for it may serve another."""
        mine = self._of.pop(session, None)
        if mine is not None:
            used = self._slots[mine].used
            self._set(mine, None, pinned=False)
            self._slots[mine].used = used

    def likest(self, ids: Ids, but: int) -> tuple[int, int]:
        """The slot other than `but` that begins most like `ids` (n,), and how many tokens it shares with it."""
        found = (but, 0)
        for i in range(len(self._slots)):
            if i != but and (common := common_prefix(self._cached(i), ids)) > found[1]:
                found = (i, common)
        return found

    def _set(self, slot: int, owner: int | None, *, pinned: bool) -> None:
        self._clock += 1
        self._pinned += pinned - self._slots[slot].pinned
        self._slots[slot] = _Slot(owner, pinned, self._clock)

    def _best(self, ids: Ids) -> int:
        """Of the slots without an owner the one that begins most like `ids`, else the least recently used idle one."""
        free = [i for i, slot in enumerate(self._slots) if slot.owner is None]
        if free:
            return max(free, key=lambda i: (common_prefix(self._cached(i), ids), -self._slots[i].used))
        idle = [i for i, slot in enumerate(self._slots) if not slot.pinned]
        return min(idle, key=lambda i: self._slots[i].used)


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens `a` (n,) and `b` (m,) share from the start."""
    n = min(len(a), len(b))
    if not n or a[0] != b[0]:  # the common case among many sessions, and the cheap one
        return 0
    differ = a[:n] != b[:n]
    return int(differ.argmax()) if differ.any() else n
