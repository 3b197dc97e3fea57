"""The plan of a reply in phases, beside the replies that one placement writes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgellm.coldstart.phases.model import WRITING, PhasedReply, PhaseProblem, simulate, steady
from edgellm.coldstart.phases.schedules import naive, progressive, searched, synchronous
from edgellm.coldstart.plan import MIN_SAVING, solve
from edgellm.coldstart.problem import Cut, Stop, Task, fits, makespan, never, per_token
from edgellm.coldstart.reply_search import fastest_reply

BETTER = 0.1
"""The share of the time up to the last move that moving must save: predictions are off by about as much."""
LONGEST = 4096
"""Tokens of a reply up to which it is said from which length on moving pays."""


@dataclass(frozen=True, slots=True)
class Schedules:
    """A move between two placements by CoordGen's three schedules."""

    synchronous: PhasedReply
    naive: PhasedReply
    progressive: PhasedReply


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The `reply` that ends first, and what it is compared with.

    `wide` begins with the first token that comes soonest, and stays; `narrow` begins with the placement that writes
    soonest; `single` is the best single device, None if none has room; `unmoved` is the best reply of any one
    placement, a split only if it saves `MIN_SAVING` of the time of a single device. `moving` is the best reply with a
    move, even if it is not the best one; None if there is nowhere to move to. `pays_from`: the least length, in tokens,
    from which on `moving` is ahead; None if that is beyond the longest one looked at. `schedules`: what CoordGen's
    would make of `moving`'s first and last placement. `rest`: where the model is best after the reply, for the next.
    """

    reply: PhasedReply
    wide: PhasedReply
    narrow: PhasedReply
    single: PhasedReply | None
    unmoved: PhasedReply
    moving: PhasedReply | None
    pays_from: int | None
    schedules: Schedules | None
    rest: Cut

    @property
    def moves(self) -> bool:
        """Return whether the reply moves between placements."""
        return bool(self.reply.made)

    @property
    def saved(self) -> float:
        """Return the share of the time of the best unmoved reply that the moves save."""
        return 1.0 - self.reply.seconds / self.unmoved.seconds if self.unmoved.seconds > 0.0 else 0.0


def plan_phases(problem: PhaseProblem, stop: Stop = never, *, start: Cut | None = None) -> PhasePlan | None:
    """Return the best plan found of a reply in phases; None if no placement of the model fits the devices. With a
    `start`, the reply begins with that one.

    Candidates begin with the placements that are best for the first token, for whole replies of this length and of
    shorter ones, and for a single device; and move towards those that write soonest. Staying is the answer unless
    moving `pays`.
    """
    task = problem.task
    first = _cut(task, 0, stop)
    if first is None:
        return None
    writing = _writing(task, stop) or first
    single = _single(problem)
    lengths = {problem.further, problem.further // 4, problem.further // 16} - {0}
    given = [start] if start is not None else []
    starts = _distinct(problem, [*given, first, *(_cut(task, one, stop) for one in sorted(lengths)), writing, single])
    unmoved = {cut: steady(problem, cut) for cut in starts}
    begins = given or starts
    best = min((unmoved.get(cut) or steady(problem, cut) for cut in begins), key=lambda reply: reply.seconds)
    alone = None if single is None or single not in begins else unmoved[single]
    if alone is not None and best.seconds > (1.0 - MIN_SAVING) * alone.seconds:
        best = alone  # a split does not pay
    moving: PhasedReply | None = None
    targets = _distinct(problem, [writing, single])
    for target in targets:
        for begin in begins:
            if stop() or begin == target or per_token(task, target) >= per_token(task, begin):
                continue
            found = searched(problem, begin, target, stop)
            if found is not None and (moving is None or found.seconds < moving.seconds):
                moving = found
    made = moving is not None and moving.made and pays(moving, best)
    alternatives = [best] if given else [one for one in unmoved.values() if one.seconds < problem.beyond]
    return PhasePlan(
        moving if made and moving is not None else best, unmoved.get(first, best), unmoved.get(writing, best),
        None if single is None else unmoved[single], best, moving,
        None if moving is None else _pays_from(problem, moving, alternatives), _schedules(problem, moving), writing,
    )  # fmt: skip


def pays(moving: PhasedReply, best: PhasedReply) -> bool:
    """Return whether the moves of a reply save enough. Behind the last one predictions are as wrong for a reply that
    began with its last placement, so only the time before it counts."""
    return best.seconds - moving.seconds > BETTER * moving.made[-1].seconds


def _cut(task: Task, further: int, stop: Stop) -> Cut | None:
    found = solve(task, further, stop)
    return None if found is None else found.cut


def _writing(task: Task, stop: Stop) -> Cut | None:
    """Return the placement with the least time per token; among equals, the one that is loaded first."""
    found = fastest_reply(task, WRITING, stop)
    return None if found is None else found.cut


def _single(problem: PhaseProblem) -> Cut | None:
    """Return the single device that ends the reply first; None if none has room."""
    task, further = problem.task, problem.further
    cuts: list[Cut] = [((device, task.layers),) for device in range(task.devices)]
    possible = [cut for cut in cuts if fits(task, cut) and makespan(task, cut) < problem.beyond]
    return min(possible, key=lambda cut: makespan(task, cut) + further * per_token(task, cut), default=None)


def _distinct(problem: PhaseProblem, cuts: Iterable[Cut | None]) -> list[Cut]:
    """Return each placement once, without those that load layers which are not there."""
    found = dict.fromkeys(cut for cut in cuts if cut is not None)
    return [cut for cut in found if makespan(problem.task, cut) < problem.beyond]


def _schedules(problem: PhaseProblem, moving: PhasedReply | None) -> Schedules | None:
    if moving is None or not moving.moves:
        return None
    start, target = moving.start, moving.moves[-1].cut
    return Schedules(
        synchronous(problem, start, target), naive(problem, start, target), progressive(problem, start, target)
    )


def _pays_from(problem: PhaseProblem, moving: PhasedReply, unmoved: Iterable[PhasedReply]) -> int | None:
    """Return the least length from which on a reply with these moves is ahead of all that stay."""
    longest = max(LONGEST, problem.tokens_out)
    reply = simulate(problem.lasting(longest), moving.start, [move.cut for move in moving.moves])
    rivals = [(one.ttft, per_token(problem.task, one.start)) for one in unmoved]

    def ahead(tokens: int) -> bool:
        return reply.at(tokens) < min(first + (tokens - 1) * token for first, token in rivals)

    if not ahead(longest):
        return None
    low, high = 1, longest  # ahead at `high`; the last change is looked for
    while high - low > 1:
        middle = (low + high) // 2
        if ahead(middle):
            high = middle
        else:
            low = middle
    return high
