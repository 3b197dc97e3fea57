"""Few slots, more sessions."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from edgellm.engine import Ids
from edgellm.spec.verifier import Tenant
from edgellm.verifier.kv_slots import SlotTable


def ids(*tokens: int) -> Ids:
    return np.array(tokens, dtype=np.int32)


class Caches:
    """What a context holds per slot."""

    def __init__(self, slots: int) -> None:
        self.slots_of = [ids() for _ in range(slots)]

    def __call__(self, slot: int) -> Ids:
        return self.slots_of[slot]

    def clear(self, slot: int) -> None:
        self.slots_of[slot] = ids()


def table(slots: int) -> tuple[SlotTable, Caches]:
    caches = Caches(slots)
    return SlotTable(slots, caches, caches.clear), caches


def serve(sessions: SlotTable, caches: Caches, session: int, *tokens: int) -> int:
    slot = sessions.claim(session, ids(*tokens))
    assert slot is not None
    caches.slots_of[slot] = ids(*tokens)
    sessions.release(session)
    return slot


def test_the_least_recently_used_session_is_evicted_and_others_keep_their_slots() -> None:
    sessions, caches = table(2)
    first = serve(sessions, caches, 1, 1)
    serve(sessions, caches, 2, 2)
    assert serve(sessions, caches, 1, 1, 1) == first
    assert serve(sessions, caches, 3, 3) != first
    assert (sessions.slot(1), sessions.slot(2), sessions.evictions) == (first, None, 1)


def test_who_begins_like_an_ended_session_gets_its_slot() -> None:
    sessions, caches = table(3)
    serve(sessions, caches, 1, 1, 2, 3)
    like = serve(sessions, caches, 2, 7, 8, 9)
    serve(sessions, caches, 3, 4)
    for session in (1, 2, 3):
        sessions.drop(session)
    assert serve(sessions, caches, 4, 7, 8, 1) == like
    assert sessions.evictions == 0


def test_a_cached_prompt_is_not_given_up_for_two_tokens_of_a_template() -> None:
    sessions, caches = table(2)
    first = serve(sessions, caches, 1, 1, 2, 30, 31, 32, 33)
    sessions.drop(1)
    assert serve(sessions, caches, 2, 1, 2, 40, 41, 42, 43) != first
    sessions.drop(2)
    assert serve(sessions, caches, 3, 1, 2, 30, 31, 32, 33, 34) == first


def test_what_one_device_asked_is_removed_before_another_one_gets_the_slot() -> None:
    sessions, caches = table(1)
    sessions.claim(1, ids(1, 2, 3), Tenant("a", cache_salt="a"))
    caches.slots_of[0] = ids(1, 2, 3)
    sessions.drop(1)
    sessions.claim(2, ids(1, 2, 3), Tenant("a", cache_salt="a"))
    assert caches.slots_of[0].tolist() == [1, 2, 3]
    sessions.drop(2)
    sessions.claim(3, ids(1, 2, 3), Tenant("b", cache_salt="b"))
    assert not len(caches.slots_of[0])


def test_a_device_with_more_slots_evicts_its_own_sessions() -> None:
    sessions, _caches = table(3)
    much, little = Tenant("much"), Tenant("little")
    sessions.claim(1, ids(1), little)
    sessions.release(1)
    for session in (2, 3):
        sessions.claim(session, ids(session), much)
        sessions.release(session)
    assert sessions.claim(4, ids(4), much) is not None
    assert (sessions.slot(1), sessions.slot(2)) == (0, None)  # though the first was idle for longer
    assert (sessions.slots_of("little"), sessions.slots_of("much")) == (1, 2)


class TableMachine(RuleBasedStateMachine):
    """Any order of events."""

    SLOTS = 3

    def __init__(self) -> None:
        super().__init__()
        self.table, self.caches = table(self.SLOTS)
        self.busy: set[int] = set()

    @rule(session=st.integers(0, 6), token=st.integers(0, 2))
    def begin(self, session: int, token: int) -> None:
        had = self.table.slot(session)
        slot = self.table.claim(session, ids(token, session))
        if session not in self.busy:
            assert (slot is None) == (had is None and len(self.busy) == self.SLOTS)
        if slot is not None:
            assert had in (None, slot)
            self.caches.slots_of[slot] = ids(token, session)
            self.busy.add(session)

    @rule(session=st.integers(0, 6))
    def finish(self, session: int) -> None:
        self.table.release(session)
        self.busy.discard(session)

    @rule(session=st.integers(0, 6))
    def leave(self, session: int) -> None:
        self.table.drop(session)
        self.busy.discard(session)
        assert self.table.slot(session) is None

    @invariant()
    def nobody_shares_and_nobody_busy_is_lost(self) -> None:
        slots = [self.table.slot(session) for session in range(7)]
        owned = [slot for slot in slots if slot is not None]
        assert len(owned) == len(set(owned))
        assert all(slots[session] is not None for session in self.busy)


TestTable = TableMachine.TestCase
