"""Who has which sequence of the verifier's context: few sequences, more sessions than that."""

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
    used: int = 0  # when, on the table's own clock
    tenant: Tenant = HERE  # of the owner, or of the last one


class SlotTable:
    """Sessions and the slots (sequences of one context) that hold their tokens.

    A session gets a slot with its first request and keeps it until it ends, or until it is the least recently used
    one when another session needs a slot. Only a session of the same device, or of one that has more slots, is evicted
    for another. While a request is under way its slot is pinned. The tokens of an ended session stay cached: a session
    that begins alike next, such as the next turn of the same chat, gets that slot.
    """

    def __init__(self, slots: int, cached: Callable[[int], Ids], clear: Callable[[int], None]) -> None:
        """`cached(slot)` tells the tokens that the context holds for a slot, and `clear(slot)` removes them: before
        a session with another `cache_salt` gets the slot."""
        self._slots = [_Slot() for _ in range(slots)]
        self._of: dict[int, int] = {}  # the slot of each session that has one
        self._pinned = 0
        self._devices: Counter[str] = Counter()  # slots of each device that has one
        self._cached, self._clear = cached, clear
        self._clock = 0
        self.evictions = 0

    def slot(self, session: int) -> int | None:
        """The slot of `session`, None where it has none (any more)."""
        return self._of.get(session)

    def held(self, device: str) -> int:
        """How many slots the sessions of `device` have."""
        return self._devices[device]

    @property
    def alone(self) -> bool:
        """Whether no more than one session has a slot."""
        return len(self._of) < 2

    def claim(self, session: int, ids: Ids, tenant: Tenant = HERE) -> int | None:
        """Pins a slot for a request of `session` on the tokens `ids` (n,); None while it gets none."""
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
        """The request is answered: the slot may be taken when it is the least recently used one."""
        mine = self._of.get(session)
        if mine is not None:
            self._set(mine, session, pinned=False)

    def drop(self, session: int) -> None:
        """The session is over; what is cached for it may serve another."""
        mine = self._of.get(session)
        if mine is not None:
            used = self._slots[mine].used
            self._disown(session)
            self._set(mine, None, pinned=False)
            self._slots[mine].used = used

    def likest(self, ids: Ids, but: int) -> tuple[int, int]:
        """The slot other than `but` that begins most like `ids` (n,), and how many tokens it shares with it. Slots with
        another `cache_salt` than that of `but` are left out."""
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
        """Of the slots without an owner the one that begins like `ids` for the most part, else an empty one, else the
        least recently used one; where all have owners the least recently used idle one that `tenant` may take."""
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
        """Tokens that a session with `ids` need not compute in `slot`, and whether nothing is lost by taking it.

        A cache counts where most of it goes on to be used: two tokens of a template are no reason to lose a prompt.
        """
        cached = self._cached(slot)
        common = common_prefix(cached, ids) if self._slots[slot].tenant.cache_salt == tenant.cache_salt else 0
        return (common if 2 * common >= len(cached) else 0), not len(cached)
