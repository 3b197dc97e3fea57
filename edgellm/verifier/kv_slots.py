"""The assignment of sessions to the fewer sequences (slots) of the verifier's context."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edgellm.engine import common_prefix
from edgellm.spec.types import Ids
from edgellm.spec.verifier import HERE, Tenant


@dataclass(slots=True)
class _Slot:
    owner: int | None = None
    pinned: bool = False
    used: int = 0  # time of last use, on the table's own clock
    tenant: Tenant = HERE  # tenant of the last owner


class SlotTable:
    """The assignment of sessions to slots (sequences of one context), which cache tokens.

    A session gets a slot with its first request and keeps it until its end, or until its eviction (LRU) by a session
    that needs a slot. A session is evicted only by a session of the same device, or of a device with fewer slots.
    During a request its slot is pinned. The tokens of an ended session stay cached: a new session with the same prefix,
    such as the next turn of a chat, gets that slot.
    """

    def __init__(self, slots: int, cached: Callable[[int], Ids], clear: Callable[[int], None]) -> None:
        """Use `cached(slot)`, which returns the tokens cached in a slot, and `clear(slot)`, which removes them before a
        session with another `cache_salt` gets the slot."""
        self._slots = [_Slot() for _ in range(slots)]
        self._by_session: dict[int, int] = {}  # slot by session
        self._cached, self._clear = cached, clear
        self._clock = 0
        self.evictions = 0

    def slot(self, session: int) -> int | None:
        """Return the slot of `session`, if any."""
        return self._by_session.get(session)

    def slots_of(self, device: str) -> int:
        """Return the number of slots of `device`."""
        return sum(slot.owner is not None and slot.tenant.device == device for slot in self._slots)

    @property
    def single_session(self) -> bool:
        """Return whether at most one session has a slot."""
        return len(self._by_session) < 2

    def claim(self, session: int, ids: Ids, tenant: Tenant = HERE) -> int | None:
        """Pin a slot for a request of `session` on the tokens `ids` (n,), and return it; None if none is available."""
        index = self._by_session.get(session)
        if index is None:
            index = self._choose(ids, tenant)
            if index is None:
                return None
            slot = self._slots[index]
            if slot.owner is not None:
                del self._by_session[slot.owner]
                self.evictions += 1
            if slot.tenant.cache_salt != tenant.cache_salt:
                self._clear(index)
            self._by_session[session] = index
            slot.owner, slot.tenant = session, tenant
        self._pin(index, True)
        return index

    def release(self, session: int) -> None:
        """Unpin the slot of an answered request, so that it can be evicted."""
        if session in self._by_session:
            self._pin(self._by_session[session], False)

    def drop(self, session: int) -> None:
        """Remove the session; its cached tokens may serve another session."""
        index = self._by_session.pop(session, None)
        if index is not None:
            self._slots[index].owner, self._slots[index].pinned = None, False

    def longest_prefix(self, ids: Ids, exclude: int) -> tuple[int, int]:
        """Return the slot other than `exclude` that shares the longest prefix with `ids` (n,), and the length of that
        prefix. Only slots with the same `cache_salt` as `exclude` are considered."""
        salt = self._slots[exclude].tenant.cache_salt
        alike = [i for i, slot in enumerate(self._slots) if i != exclude and slot.tenant.cache_salt == salt]
        found = ((i, common_prefix(self._cached(i), ids)) for i in alike)
        return max(found, key=lambda one: one[1], default=(exclude, 0))

    def _pin(self, index: int, pinned: bool) -> None:
        self._clock += 1
        self._slots[index].pinned, self._slots[index].used = pinned, self._clock

    def _choose(self, ids: Ids, tenant: Tenant) -> int | None:
        """Return the unowned slot with the longest reusable prefix of `ids`, else an empty slot, else the LRU slot; if
        all are owned, the LRU idle slot that `tenant` may take."""
        free = [i for i, slot in enumerate(self._slots) if slot.owner is None]
        if free:
            return max(free, key=lambda i: (*self._reuse_value(i, ids, tenant), -self._slots[i].used))
        held = self.slots_of(tenant.device)
        idle = [
            i for i, slot in enumerate(self._slots) if not slot.pinned
            and (slot.tenant.device == tenant.device or self.slots_of(slot.tenant.device) > held)
        ]  # fmt: skip
        return min(idle, key=lambda i: self._slots[i].used, default=None)

    def _reuse_value(self, slot: int, ids: Ids, tenant: Tenant) -> tuple[int, bool]:
        """Return how many tokens a session with `ids` need not compute in `slot`, and whether the slot is empty.

        A prefix counts only if it is most of the cache: a short common template is no reason to evict a prompt.
        """
        cached = self._cached(slot)
        common = common_prefix(cached, ids) if self._slots[slot].tenant.cache_salt == tenant.cache_salt else 0
        return (common if 2 * common >= len(cached) else 0), not len(cached)
