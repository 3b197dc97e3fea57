"""When to switch which block: CoordGen's greedy (3.2), its two comparators, and the same greedy without haste."""

from __future__ import annotations

from edgellm.coldstart.graph_switching.switching import Instance, Plan, Switch, latency


def synchronous(instance: Instance) -> tuple[Plan, str]:
    """Switch every block after the whole prefill (Fig. 8b, 1)."""
    plan = tuple(Switch(block, instance.steps) for block in range(instance.blocks))
    return told(instance, plan, "all is loaded after the prefill")


def naive(instance: Instance) -> tuple[Plan, str]:
    """Switch every block as soon as its last computation is over, so during the last chunk only (Fig. 8b, 2)."""
    first = instance.steps - instance.blocks
    plan = tuple(Switch(block, first + block + 1) for block in range(instance.blocks))
    return told(instance, plan, "each block is loaded behind its last chunk")


def progressive(instance: Instance) -> tuple[Plan, str]:
    """Plan by the paper's greedy (equations 1 and 2), in rounds from the first computation on.

    Some symbols of the equations are lost in the text at hand. What is taken from the words around them, and from the
    example of four blocks, two chunks and two computations a load (Fig. 8), is this. Let i be the block that computes
    next, after wrapping around to block 0 at the end of a chunk, and t(x) the time of a block with the graph that it
    has at the moment: decode if its load has begun, prefill if not. Then

    - the block to load is the *last one not switched*: of those still to be switched, that whose next computation is
      furthest away, so the last in the order i, i+1, ..., m-1, 0, ..., i-1; its index is j;
    - (1) k computations hide the load if t(i) + t(i+1) + ... + t(i+k-1) >= load(j), indices modulo m;
    - (2) the round's k is the least number that does, with j itself not among these computations.

    The round begins to load j and computes k blocks; the next round begins behind them. About a place where no k
    satisfies (1) the paper says nothing. Here the next block then computes with no load beside it, and the round is
    tried again behind it; a load too long for any round begins behind j's own computation, where most of it is hidden.
    Blocks left over when the rounds end are loaded after the prefill.
    """
    plan = _rounds(instance, 0)
    return told(instance, plan, "rounds from the start on, each of the fewest computations that hide a load")


def unhurried(instance: Instance) -> tuple[Plan, str]:
    """Start the same greedy after 0, 1, 2 ... all computations; return the best of these plans and of `naive`.

    The greedy hides loads as early as it can, and pays for each with the slower graph in every chunk that follows.
    Begun later it hides as much where there is time enough, and pays less. In O(m^3 n^2).
    """
    candidates = [(_rounds(instance, first), first) for first in range(instance.steps + 1)]
    plan, first = min(candidates, key=lambda candidate: latency(instance, candidate[0]))
    late = naive(instance)[0]
    if latency(instance, late) < latency(instance, plan):
        return told(instance, late, "no round pays: each block is loaded behind its last chunk")
    return told(instance, plan, f"the greedy's rounds, begun behind {first} of {instance.steps} computations")


def told(instance: Instance, plan: Plan, how: str) -> tuple[Plan, str]:
    """Return the plan, and a sentence on what it does and costs."""
    taken, least = latency(instance, plan), instance.chunks * sum(instance.prefill)
    return plan, f"{how}: {taken:.4g}, where a prefill that switches nothing takes {least:.4g}"


def _rounds(instance: Instance, first: int) -> Plan:
    """Return the plan of the greedy's rounds, started after `first` computations."""
    m, step = instance.blocks, first
    left = set(range(m))
    plan = []
    while left and step < instance.steps:
        distance, block = max(((block - step) % m, block) for block in left)
        at, end, covered = step, min(step + distance, instance.steps), 0.0
        while at < end and covered < instance.load[block]:
            covered += (instance.prefill if at % m in left else instance.decode)[at % m]
            at += 1
        if covered < instance.load[block] and distance < m - 1:
            step += 1
            continue
        plan.append(Switch(block, step))
        left.remove(block)
        step = at
    return *plan, *(Switch(block, instance.steps) for block in sorted(left))
