"""A reply in phases, by the planner's model: one placement writes while another is loaded, which then takes over.

Beyond the papers: CSGO plans one placement for the first token (2.3), and CoordGen switches graphs of one device while
it reads a prompt (3.2). Here the computations that hide a load are tokens. With t seconds per token, the k tokens
written while a block j loads hide its load if k t >= load(j) (CoordGen's equation 1), and the block moves after the
least such k (equation 2), once it has read the text, too: at a token's end, so that no token waits for a load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from edgellm.coldstart.home import Home, restrict_to_stored
from edgellm.coldstart.problem import (
    Cut,
    Floats,
    Ints,
    Stop,
    Task,
    fits,
    makespan,
    never,
    per_token,
    timeline,
)
from edgellm.coldstart.reply_search import fastest_reply
from edgellm.errors import InvalidOption

WRITING = 1024
"""Tokens after which only the time per token counts."""
OPENING = 0.25
"""Seconds to open a pipeline beside another, before it loads: a guess, not yet measured by itself."""
BETTER = 0.1
"""The share of the time up to the move that moving must save: predictions are off by about as much."""
FASTER = 0.05
"""The share of a token's time that another placement must save to hold the model between replies."""
_NO_TIME = 1e-12  # seconds: less than anything takes
_TOKEN_END = 1e-9  # share of a token that rounding may leave


@dataclass(frozen=True, slots=True)
class Contention:
    """Slow-down factors of work that shares its device: of `passes` while it loads, of `loads` while it computes, and
    of two computations at once (`reading`). The defaults were measured once.
    """

    passes: float = 2.2
    loads: float = 1.7
    reading: float = 1.8


@dataclass(frozen=True, eq=False)
class PhaseProblem:
    """A reply in a home, and the costs of moving between placements.

    `opening`: seconds before the loads of a move begin.
    """

    home: Home
    contention: Contention = Contention()
    opening: float = OPENING

    @cached_property
    def _restricted(self) -> tuple[Task, float]:
        further = max(WRITING, self.home.tokens_out)
        return restrict_to_stored(self.home.task(), self.home.devices, further)

    @property
    def task(self) -> Task:
        """The planning problem, restricted to the layers that the devices have."""
        return self._restricted[0]

    @property
    def beyond(self) -> float:
        """The least seconds of a plan that loads layers that are not on their device."""
        return self._restricted[1]

    @cached_property
    def kept(self) -> Floats:
        """The bytes of keys and values that a second open placement needs as well, (L,)."""
        tokens = self.home.tokens_in + self.home.tokens_out
        kept: Floats = np.maximum(self.home.overhead.layer, np.array(self.home.model.cache_bytes) * tokens)
        return kept

    def reading(self, tokens: int) -> Task:
        """Return the problem of reading so many tokens with all layers loaded."""
        return replace(self.home, tokens_in=tokens, tokens_out=0, cold=False).task()


@dataclass(frozen=True, slots=True)
class Move:
    """Layers that change their devices at a token's end, after which the model lies as in `cut`.

    Lacking layers are loaded at `loaded`, and the text is read at `ready`. The placement takes over after `token`
    tokens, at `seconds`.
    """

    cut: Cut
    loaded: float
    ready: float
    token: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PhasedReply:
    """The predicted times of a reply that the placement `start` begins, and the `move` in it, if there is one."""

    start: Cut
    ttft: float
    seconds: float
    move: Move | None = None


def owners(task: Task, cut: Cut) -> Ints:
    """Return the device of every layer, (L,)."""
    found = np.concatenate([np.full(count, device) for device, count in cut]).astype(np.int64)
    if len(found) != task.layers:
        raise InvalidOption(
            f"The placement has {len(found)} layers, and the model {task.layers}.", "Place every layer."
        )
    return found


def fit_together(problem: PhaseProblem, one: Cut, other: Cut) -> bool:
    """Return whether every device has room for its layers of two placements at once, each with a cache of its own."""
    task = problem.task
    if not fits(task, other):
        return False
    before, after = owners(task, one), owners(task, other)
    for device in {device for device, _ in other} & {device for device, _ in one}:
        either, both = (before == device) | (after == device), (before == device) & (after == device)
        needed = float(task.alone_need or 0.0) if either.all() else float(task.need[either].sum())
        needed += float(problem.kept[both].sum()) + problem.home.overhead.stage
        if needed > task.capacity[device] * (1.0 + 1e-12):
            return False
    return True


def lacking(problem: PhaseProblem, holders: Ints, cut: Cut) -> dict[int, float]:
    """Return the seconds for which each device loads the layers of `cut` that it lacks; `holders`, (L,): the device
    that has loaded each layer."""
    task, found, first = problem.task, dict[int, float](), 0
    for device, count in cut:
        absent = holders[first : first + count] != device
        left = float(task.load[device, first : first + count][absent].sum())
        if len(cut) == 1 and absent.all():
            left = min(left, float(task.alone_load[device]))
        if left > 0.0:
            found[device] = left
        first += count
    return found


def steady(problem: PhaseProblem, cut: Cut) -> PhasedReply:
    """Return the times of a reply that one placement writes from beginning to end."""
    first = makespan(problem.task, cut)
    return PhasedReply(cut, first, first + problem.home.further * per_token(problem.task, cut))


def moving(problem: PhaseProblem, start: Cut, target: Cut) -> PhasedReply | None:
    """Return the times of a reply that `start` begins, and `target` takes over; None if it ends before that.

    The loads begin with the request if only devices without a part in `start` load, else after the first token. From
    the next token's end on, the stages of `target` read the text, while tokens are written; and at the next token's end
    after that the placement takes over.
    """
    task, contention, last = problem.task, problem.contention, problem.home.tokens_out
    token = max(per_token(task, start), _NO_TIME)
    first = clock = makespan(task, start)
    written = 1.0

    loads = lacking(problem, owners(task, start), target)
    begins = first if set(loads) & {device for device, _ in start} else 0.0
    ends = {device: begins + problem.opening + took for device, took in loads.items()}
    loaded = max(ends.values(), default=begins + problem.opening)
    left = {device: end - clock for device, end in ends.items() if end > clock}
    while left:
        slow, busy = _beside(task, start, dict.fromkeys(left, contention.passes))
        rates = {device: 1.0 / (1.0 + (contention.loads - 1.0) * busy.get(device, 0.0)) for device in left}
        step = min(seconds / rates[device] for device, seconds in left.items())
        clock, written = clock + step, written + step / slow
        left = {device: seconds - step * rates[device] for device, seconds in left.items()}
        left = {device: seconds for device, seconds in left.items() if seconds > _NO_TIME}
        loaded = clock
    if loaded > clock:  # the pipeline opens, and nothing is loaded
        clock, written = loaded, written + (loaded - clock) / token

    clock, written = _token_end(clock, written, token)
    if written >= last:
        return None
    text = int(written)
    spans = timeline(problem.reading(problem.home.tokens_in + text), target)
    took = spans[-1].finish
    # the share of that time in which each device reads the text
    reading = {span.device: span.compute / max(took, _NO_TIME) for span in spans}
    slowed = {device: 1.0 + (contention.reading - 1.0) * share for device, share in reading.items()}
    slow, busy = _beside(task, start, slowed)
    took *= 1.0 + (contention.reading - 1.0) * sum(share * busy.get(device, 0.0) for device, share in reading.items())
    ready = clock + took

    clock, written = _token_end(ready, written + took / slow, token)
    if written >= last:
        return None
    then, missed = per_token(task, target), int(written) - text
    next_token = then if missed < 1 else max(then, makespan(problem.reading(missed + 1), target))
    seconds = clock + next_token + (last - written - 1.0) * then
    return PhasedReply(start, first, seconds, Move(target, loaded, ready, int(written), clock))


def _token_end(clock: float, written: float, token: float) -> tuple[float, float]:
    """Return the end of the token under way, and the tokens written by then."""
    whole = math.ceil(written - _TOKEN_END)
    return clock + max(0.0, whole - written) * token, float(whole)


def _beside(task: Task, cut: Cut, slowed: Mapping[int, float]) -> tuple[float, dict[int, float]]:
    """Return the seconds of a token with some devices `slowed` by these factors, and the share of that time in which
    each device computes."""
    ends = np.cumsum([count for _, count in cut]).tolist()
    parts = {
        device: float(task.step[device, end - count : end].sum()) * slowed.get(device, 1.0)
        for (device, count), end in zip(cut, ends, strict=True)
    }
    hops = sum(float(task.hop[cut[at - 1][0], device]) for at, (device, _) in enumerate(cut)) if len(cut) > 1 else 0.0
    token = max(sum(parts.values()) + hops, _NO_TIME)
    return token, {device: took / token for device, took in parts.items()}


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The planned `reply`, and the reply that stays where it begins: `unmoved`.

    `rest`: the best placement after the reply, for the next; None if it is the placement where the reply ends.
    """

    reply: PhasedReply
    unmoved: PhasedReply
    rest: Cut | None


def plan_phases(problem: PhaseProblem, starts: Sequence[Cut], stop: Stop = never) -> PhasePlan:
    """Return the plan of a reply that stays with the first of the placements `starts`, or begins with any of them and
    moves once: to the placement with the least time per token, if that saves `BETTER` of the time up to the move. After
    the move, predictions are as wrong for a reply that began with its last placement."""
    task, unmoved = problem.task, steady(problem, starts[0])
    found = fastest_reply(task, WRITING, stop)
    if found is None or found.seconds >= problem.beyond:
        return PhasePlan(unmoved, unmoved, None)
    target = found.cut

    def improves(cut: Cut, share: float = 0.0) -> bool:
        quicker = per_token(task, target) < (1.0 - share) * per_token(task, cut)
        return quicker and fit_together(problem, cut, target)

    replies = [unmoved]
    for start in starts:
        one = moving(problem, start, target) if improves(start) else None
        if one is not None and one.move is not None and unmoved.seconds - one.seconds > BETTER * one.move.seconds:
            replies.append(one)
    reply = min(replies, key=lambda one: one.seconds)
    return PhasePlan(reply, unmoved, target if reply.move is None and improves(reply.start, FASTER) else None)
