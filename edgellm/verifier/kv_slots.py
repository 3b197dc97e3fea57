"""Which session has which sequence of the verifier's context; there are more sessions than sequences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from edgellm.engine import common_prefix
from edgellm.spec.types import Ids
from edgellm.verifier.requests import HERE, Tenant


@dataclass(slots=True)
class _Slot:
    owner: int | None = None
    pinned: bool = False
    used: int = 0  # time of last use, on the table's own clock
    tenant: Tenant = HERE  # of the owner, or of the last owner


class SlotTable:
    """Sessions and the slots (sequences of one context) that hold their tokens.

    A session gets a slot with its first request and keeps it until it ends, or until it is the least recently used
    one when another session needs a slot. Only a session of the same device, or of one that has more slots, is evicted
    for another. While a request is under way its slot is pinned. The tokens of an ended session stay cached: a session
    that begins alike next, such as the next turn of the same chat, gets that slot.
    """

    def __init__(self, slots: int, cached: Callable[[int], Ids], clear: Callable[[int], None]) -> None:
        """Have `cached(slot)` return the tokens that the context holds for a slot, and `clear(slot)` remove them
        before a session with another `cache_salt` gets the slot."""
        self._slots = [_Slot() for _ in range(slots)]
        self._of: dict[int, int] = {}  # slot by session
        self._pinned = 0
        self._devices: Counter[str] = Counter()  # slots by device
        self._cached, self._clear = cached, clear
        self._clock = 0
        self.evictions = 0

    def slot(self, session: int) -> int | None:
        """Return the slot of `session`, None if it has none (any more)."""
        return self._of.get(session)

    def held(self, device: str) -> int:
        """Return how many slots the sessions of `device` have."""
        return self._devices[device]

    @property
    def alone(self) -> bool:
        """Return whether at most one session has a slot."""
        return len(self._of) < 2

    def claim(self, session: int, ids: Ids, tenant: Tenant = HERE) -> int | None:
        """Pin a slot for a request of `session` on the tokens `ids` (n,), and return it; None if none is available."""
        mine = self._of.get(session)
        if mine is None:
            if self._pinned == len(self._slots):
                return None
            mine = self._best(ids, tenant)
            if mine is None:
                return None
            slot = self._slots[mine]
            if slot.owner is not None:
                self._disown(slot.owner)
                self.evictions += 1
            if slot.tenant.cache_salt != tenant.cache_salt:
                self._clear(mine)
            self._of[session] = mine
            self._devices[tenant.device] += 1
            slot.tenant = tenant
        self._set(mine, session, pinned=True)
        return mine

    def release(self, session: int) -> None:
        """Unpin the slot of an answered request: it may be taken once it is the least recently used one."""
        mine = self._of.get(session)
        if mine is not None:
            self._set(mine, session, pinned=False)

    def drop(self, session: int) -> None:
        """Forget the session; the tokens cached for it may serve another."""
        mine = self._of.get(session)
        if mine is not None:
            used = self._slots[mine].used
            self._disown(session)
            self._set(mine, None, pinned=False)
            self._slots[mine].used = used

    def likest(self, ids: Ids, but: int) -> tuple[int, int]:
        """Return the slot other than `but` that shares the longest beginning with `ids` (n,), and how many tokens
        that is. Slots with another `cache_salt` than that of `but` are left out."""
        found = (but, 0)
        salt = self._slots[but].tenant.cache_salt
        for i, slot in enumerate(self._slots):
            if i == but or slot.tenant.cache_salt != salt:
                continue
            if (common := common_prefix(self._cached(i), ids)) > found[1]:
                found = (i, common)
        return found

    def _disown(self, session: int) -> None:
        device = self._slots[self._of.pop(session)].tenant.device
        self._devices[device] -= 1
        if not self._devices[device]:
            del self._devices[device]

    def _set(self, slot: int, owner: int | None, *, pinned: bool) -> None:
        self._clock += 1
        self._pinned += pinned - self._slots[slot].pinned
        self._slots[slot] = _Slot(owner, pinned, self._clock, self._slots[slot].tenant)

    def _best(self, ids: Ids, tenant: Tenant) -> int | None:
        """Return, of the slots without an owner, the one that mostly begins like `ids`, else an empty one, else the
        least recently used one; where all have owners, the least recently used idle one that `tenant` may take."""
        free = [i for i, slot in enumerate(self._slots) if slot.owner is None]
        if free:
            return max(free, key=lambda i: (*self._worth(i, ids, tenant), -self._slots[i].used))
        held = self._devices
        mine = held[tenant.device]
        idle = [
            i
            for i, slot in enumerate(self._slots)
            if not slot.pinned and (slot.tenant.device == tenant.device or held[slot.tenant.device] > mine)
        ]
        return min(idle, key=lambda i: self._slots[i].used, default=None)

    def _worth(self, slot: int, ids: Ids, tenant: Tenant) -> tuple[int, bool]:
        """Return how many tokens a session with `ids` need not compute in `slot`, and whether taking it loses nothing.

        A cache counts only if most of it stays in use: two tokens of a template are no reason to lose a prompt.
        """
        cached = self._cached(slot)
        common = common_prefix(cached, ids) if self._slots[slot].tenant.cache_salt == tenant.cache_salt else 0
        return (common if 2 * common >= len(cached) else 0), not len(cached)
