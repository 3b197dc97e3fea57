"""A reply in phases, by the planner's model: one placement writes while another is loaded, which then takes over.

Beyond the papers: CSGO plans one placement for the first token (2.3), and CoordGen switches graphs of one device while
it reads a prompt (3.2). Here the computations that hide a load are tokens. With t seconds per token, the k tokens
written while a block j loads hide its load if k t >= load(j) (CoordGen's equation 1), and the block moves after the
least such k (equation 2), once it has read the text, too: at a token's end, so that no token waits for a load.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from edgellm.coldstart.plan import MIN_SAVING, format_seconds, solve
from edgellm.coldstart.problem import (
    Cut,
    Home,
    Ints,
    Stop,
    Task,
    fits,
    makespan,
    never,
    per_token,
    restrict_to_stored,
    timeline,
)
from edgellm.layer_range import StageShare

WRITING = 1024
"""Tokens after which only the time per token counts."""
BETTER = 0.1
"""The share of the time up to the move that moving must save: predictions are off by about as much."""


@dataclass(frozen=True, slots=True)
class Contention:
    """Slow-down factors of work that shares its device: of `passes` while it loads, of `loads` while it computes, and
    of two computations at once (`reading`); measured once. `opening`: seconds to open a pipeline beside another, before
    it loads; a guess.
    """

    passes: float = 2.2
    loads: float = 1.7
    reading: float = 1.8
    opening: float = 0.25


@dataclass(frozen=True, eq=False)
class PhaseProblem:
    """A reply in a home, and the costs of moving between placements."""

    home: Home
    contention: Contention = Contention()

    @cached_property
    def task(self) -> Task:
        """The planning problem, restricted to the layers that the devices have."""
        return restrict_to_stored(self.home.task(), self.home.devices)

    def solved(self, further: int, stop: Stop) -> Cut | None:
        """Return the placement by which `further` tokens after the first come soonest, if one is possible."""
        found = solve(self.task, further, stop)
        return None if found is None else found.cut

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


def _owners(cut: Cut) -> Ints:
    """Return the device of every layer, (L,)."""
    return np.repeat([device for device, _ in cut], [count for _, count in cut])


def fit_together(problem: PhaseProblem, one: Cut, other: Cut) -> bool:
    """Return whether every device has room for its layers of two placements at once, each with a cache of its own."""
    task, home = problem.task, problem.home
    if not fits(task, other):
        return False
    kept = np.maximum(home.overhead.layer, np.array(home.model.cache_bytes) * (home.tokens_in + home.tokens_out))
    before, after = _owners(one), _owners(other)
    for device in dict(other).keys() & dict(one):
        either, both = (before == device) | (after == device), (before == device) & (after == device)
        needed = task.alone_need if either.all() else float(task.need[either].sum())
        needed += float(kept[both].sum()) + home.overhead.stage
        if needed > task.room[device]:
            return False
    return True


def _lacking(task: Task, one: Cut, other: Cut) -> dict[int, float]:
    """Return the seconds for which each device loads the layers of the `other` placement that it lacks in `one`."""
    before, after = _owners(one), _owners(other)
    found = {device: float(task.load[device, (after == device) & (before != device)].sum()) for device, _ in other}
    if len(other) == 1 and other[0][0] not in before:
        found[other[0][0]] = float(task.alone_load[other[0][0]])
    return {device: seconds for device, seconds in found.items() if seconds > 0.0}


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
    task, factors, last = problem.task, problem.contention, problem.home.tokens_out
    token, first = per_token(task, start), makespan(task, start)

    loads = _lacking(task, start, target)
    early = factors.opening - (0.0 if loads.keys() & dict(start) else first)
    left = {device: early + took for device, took in loads.items()}
    slow, busy = _beside(task, start, {device: factors.passes for device, seconds in left.items() if seconds > 0.0})
    left = {device: took * (1.0 + (factors.loads - 1.0) * busy.get(device, 0.0)) for device, took in left.items()}
    took = max(left.values(), default=early)
    clock, written = _token_end(first + max(took, 0.0), 1.0 + max(took, 0.0) / slow, token)
    if written >= last:
        return None

    text = int(written)
    spans = timeline(problem.reading(problem.home.tokens_in + text), target)
    reads = spans[-1].finish_s
    shares = zip(target, spans, strict=True)
    reading = {device: (factors.reading - 1.0) * span.compute_s / reads for (device, _), span in shares}
    slow, busy = _beside(task, start, {device: 1.0 + share for device, share in reading.items()})
    reads *= 1.0 + sum(share * busy.get(device, 0.0) for device, share in reading.items())
    ready = clock + reads

    clock, written = _token_end(ready, written + reads / slow, token)
    if written >= last:
        return None
    then, missed = per_token(task, target), int(written) - text
    next_token = then if missed < 1 else max(then, makespan(problem.reading(missed + 1), target))
    seconds = clock + next_token + (last - written - 1.0) * then
    return PhasedReply(start, first, seconds, Move(target, first + took, ready, int(written), clock))


def _token_end(clock: float, written: float, token: float) -> tuple[float, float]:
    """Return the end of the token under way, and the tokens written by then."""
    whole = math.ceil(written)
    return clock + max(0.0, whole - written) * token, float(whole)


def _beside(task: Task, cut: Cut, slowed: Mapping[int, float]) -> tuple[float, dict[int, float]]:
    """Return the seconds of a token with some devices `slowed` by these factors, and the share of that time in which
    each device computes."""
    owners = _owners(cut)
    own = {device: float(task.step[device, owners == device].sum()) for device, _ in cut}
    parts = {device: took * slowed.get(device, 1.0) for device, took in own.items()}
    token = sum(parts.values()) + per_token(task, cut) - sum(own.values())
    return token, {device: took / token for device, took in parts.items()}


@dataclass(frozen=True, slots=True)
class Phases:
    """The course of a reply: the placement `target` takes over behind it, or after it for the next reply.

    `reply` is the planned one, and `unmoved` the one that stays where it begins.
    """

    problem: PhaseProblem
    reply: PhasedReply
    unmoved: PhasedReply
    target: Cut

    @property
    def first(self) -> tuple[StageShare, ...]:
        """The shares that begin."""
        return self.problem.home.shares(self.reply.start)

    @property
    def following(self) -> tuple[StageShare, ...]:
        """The shares that take over."""
        return self.problem.home.shares(self.target)

    def predict(self, tokens_in: int, tokens_out: int) -> PhasedReply:
        """Return the times of a cold reply of other lengths with the same move."""
        home = replace(self.problem.home, tokens_in=max(1, tokens_in), tokens_out=tokens_out, cold=True)
        problem, reply = replace(self.problem, home=home), self.reply
        moved = None if reply.move is None else moving(problem, reply.start, reply.move.cut)
        return moved or steady(problem, reply.start)

    @property
    def sentence(self) -> str:
        """The layers that take over, when, and the saving; empty if nothing takes over behind the reply."""
        move, problem = self.reply.move, self.problem
        if move is None:
            return ""
        token = format_seconds(per_token(problem.task, move.cut))
        named = ", ".join(f"{share.layers} on {share.name}" for share in self.following)
        return (
            f"From token {move.token + 1} on, layers {named}, which write a token in {token} and are loaded behind the"
            f" reply: {problem.home.tokens_out} tokens take {format_seconds(self.reply.seconds)} instead of"
            f" {format_seconds(self.unmoved.seconds)}."
        )


def plan_phases(home: Home, shares: Sequence[StageShare], stop: Stop = never) -> Phases | None:
    """Return the course of a reply that stays with the `shares`; or that moves once, to the placement with the least
    time per token, if that saves `BETTER` of the time up to the move. Return None if nothing moves.

    After the move, predictions are as wrong for a reply that began with its last placement. A whole reply may begin
    with another placement, too: that of the earliest first token.
    """
    problem, starts = PhaseProblem(home), [home.cut(shares)]
    if len(home.devices) < 2:
        return None
    if home.objective == "reply" and (soonest := problem.solved(0, stop)) is not None:
        starts.append(soonest)
    if (target := problem.solved(WRITING, stop)) is None:
        return None

    def improves(cut: Cut, share: float = 0.0) -> bool:
        quicker = per_token(problem.task, target) < (1.0 - share) * per_token(problem.task, cut)
        return quicker and fit_together(problem, cut, target)

    unmoved = steady(problem, starts[0])
    replies = [unmoved]
    for start in starts:
        one = moving(problem, start, target) if improves(start) else None
        if one is not None and one.move is not None and unmoved.seconds - one.seconds > BETTER * one.move.seconds:
            replies.append(one)
    reply = min(replies, key=lambda one: one.seconds)
    if reply.move is None and not improves(reply.start, MIN_SAVING):
        return None
    return Phases(problem, reply, unmoved, target)
