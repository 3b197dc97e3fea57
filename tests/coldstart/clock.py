"""The least latency of a small instance of whole times, found tick by tick: without plans and without `simulate`."""

from __future__ import annotations

from edgellm.coldstart.graph_switching import Instance

# computations done, ticks left of the one that runs, block that is being loaded or -1, ticks left of that, blocks
# switched
State = tuple[int, int, int, int, int]


def least_ticks(instance: Instance) -> int:
    """At every tick each line that is free may begin anything that is allowed, or nothing."""
    states: set[State] = {(0, 0, -1, 0, 0)}
    ticks = 0
    while True:
        states = _begun(instance, states)
        if any(done == instance.steps and switched + 1 == 1 << instance.blocks for done, _, _, _, switched in states):
            return ticks
        states = {_passed(state) for state in states}
        ticks += 1


def _begun(instance: Instance, states: set[State]) -> set[State]:
    found, todo = set(states), list(states)
    while todo:
        for state in _begin(instance, todo.pop()):
            if state not in found:
                found.add(state)
                todo.append(state)
    return found


def _begin(instance: Instance, state: State) -> list[State]:
    done, left, loading, load_left, switched = state
    block = done % instance.blocks
    more = []
    if loading < 0:
        for other in range(instance.blocks):
            if not switched >> other & 1 and not (left and other == block):
                ticks = int(instance.load[other])
                more.append(
                    (done, left, other, ticks, switched) if ticks else (done, left, -1, 0, switched | 1 << other)
                )
    if not left and done < instance.steps and block != loading:
        ticks = int((instance.decode if switched >> block & 1 else instance.prefill)[block])
        more.append(
            (done, ticks, loading, load_left, switched) if ticks else (done + 1, 0, loading, load_left, switched)
        )
    return more


def _passed(state: State) -> State:
    done, left, loading, load_left, switched = state
    if left:
        left -= 1
        done += left == 0
    if loading >= 0:
        load_left -= 1
        if load_left == 0:
            loading, switched = -1, switched | 1 << loading
    return done, left, loading, load_left, switched
