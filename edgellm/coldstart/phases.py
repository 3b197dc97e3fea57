"""A reply in phases, by the planner's model: one placement writes, and another is loaded behind it and takes over.

Beyond the papers: CSGO plans one placement for the first token (2.3), and CoordGen switches graphs of one device while
it reads a prompt (3.2). Here the computations that hide a load are tokens. With t seconds per token, the k tokens
written while a block j loads hide its load if k t >= load(j) (CoordGen's equation 1), and the block moves after the
least such k (equation 2), once its cache is there, too: at a token's end, so that no token waits for a load.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal

import numpy as np

from edgellm.coldstart.hardware import sending
from edgellm.coldstart.home import Home, restrict_to_stored
from edgellm.coldstart.problem import (
    Bools,
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
from edgellm.layer_range import HERE

CacheSource = Literal["recomputed", "sent"]
"""How a block's cache gets to its new device: computed again from the text, or sent over the line."""
WRITING = 1024
"""Tokens after which only the time per token counts."""
OPENING = 0.25
"""Seconds to open a pipeline beside another one, before it loads: a guess, too, not yet measured by itself."""
BETTER = 0.1
"""The share of the time up to the move that moving must save: predictions are off by about as much."""
FASTER = 0.05
"""The share of a token's time that another placement must save to be where the model lies between replies."""
_NONE = -1  # for a device, where none loads
_TOKEN_END = 1e-9  # a share of a token that rounding may leave of it


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times as long work takes that shares its device with other work: `passes` while the device loads,
    `loads` while it computes, and `reading`, both of two computations. The defaults were measured once.
    """

    passes: float = 2.2
    loads: float = 1.7
    reading: float = 1.8


@dataclass(frozen=True, eq=False)
class PhaseProblem:
    """A reply in a home, and what moving between placements takes.

    `sends_caches`: whether keys and values can be sent, by way of this device if it is one of the home's. `opening`:
    seconds before the loads of a move begin.
    """

    home: Home
    sends_caches: bool = False
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
        """The seconds from which on a plan loads layers that are not on their device."""
        return self._restricted[1]

    @cached_property
    def cache(self) -> Floats:
        """The bytes of keys and values of a token, (L,)."""
        return np.array(self.home.model.cache_bytes)

    @cached_property
    def kept(self) -> Floats:
        """The bytes of keys and values that a second open placement needs as well, (L,)."""
        kept: Floats = np.maximum(self.home.overhead.layer, self.cache * (self.home.tokens_in + self.home.tokens_out))
        return kept

    def reading(self, tokens: int) -> Task:
        """Return the problem of reading so many tokens with all layers loaded."""
        return replace(self.home, tokens_in=tokens, tokens_out=0, cold=False).task()

    def send_seconds(self, size: float) -> Floats:
        """Return the seconds in which `size` bytes get from the row's device to the column's, (K, K)."""
        return sending(self.home.devices, size, self.home.links)


@dataclass(frozen=True, slots=True)
class Move:
    """Layers that change their devices at a token's end, after which the model lies as in `cut`.

    What is lacking is loaded from `begins` to `loaded`, on each device of `loads` in parallel; the caches are there at
    `ready`. The placement takes over after `token` tokens, at `seconds`; the next one waits `pause` seconds more than
    later ones, for what was written meanwhile. Infinite times: the reply ends earlier.
    """

    cut: Cut
    loads: Mapping[int, float]
    begins: float
    loaded: float = math.inf
    cache: CacheSource = "recomputed"
    ready: float = math.inf
    token: int = 0
    seconds: float = math.inf
    pause: float = 0.0

    @property
    def made(self) -> bool:
        return self.token > 0


@dataclass(frozen=True, slots=True)
class PhasedReply:
    """A simulated reply: the placement it starts with, its moves, and the `knots` between which tokens come evenly:
    (tokens written, seconds from the request)."""

    start: Cut
    moves: tuple[Move, ...]
    knots: tuple[tuple[float, float], ...]

    @property
    def ttft(self) -> float:
        return self.knots[0][1]

    @property
    def seconds(self) -> float:
        return self.knots[-1][1]

    @property
    def made(self) -> tuple[Move, ...]:
        """The moves that are made before the last token."""
        return tuple(move for move in self.moves if move.made)

    def at(self, tokens: int) -> float:
        """Return when so many tokens are written; beyond the last one, at the pace of the last stretch."""
        place = min(max(1, bisect_left(self.knots, (float(tokens), 0.0))), len(self.knots) - 1)
        if place == 0:
            return self.ttft
        (before, began), (after, ended) = self.knots[place - 1], self.knots[place]
        return began if after <= before else began + (tokens - before) * (ended - began) / (after - before)


def owners(task: Task, cut: Cut) -> Ints:
    """Return the device of every layer, (L,)."""
    found = np.concatenate([np.full(count, device) for device, count in cut]).astype(np.int64)
    if len(found) != task.layers:
        raise InvalidOption(
            f"The placement has {len(found)} layers, and the model {task.layers}.", "Place every layer."
        )
    return found


def cut_of(holders: Ints) -> Cut | None:
    """Return the placement with these devices of the layers; None if a device has two separate ranges."""
    ends = [*np.flatnonzero(np.diff(holders)).tolist(), len(holders) - 1]
    cut, first = [], 0
    for end in ends:
        cut.append((int(holders[end]), end + 1 - first))
        first = end + 1
    return tuple(cut) if len({device for device, _ in cut}) == len(cut) else None


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


def lacking(problem: PhaseProblem, loaded: Bools, cut: Cut) -> dict[int, float]:
    """Return the seconds for which each device loads the layers of `cut` that it lacks; `loaded`, (K, L)."""
    task, found, first = problem.task, dict[int, float](), 0
    for device, count in cut:
        row = task.load[device, first : first + count]
        left = float(row[~loaded[device, first : first + count]].sum())
        if len(cut) == 1 and not loaded[device].any():
            left = min(left, float(task.alone_load[device]))
        if left > 0.0:
            found[device] = left
        first += count
    return found


def held(task: Task, *cuts: Cut) -> Bools:
    """Return which device has which layer in one of these placements, (K, L)."""
    found = np.zeros((task.devices, task.layers), dtype=bool)
    for cut in cuts:
        found[owners(task, cut), np.arange(task.layers)] = True
    return found


def cache_seconds(problem: PhaseProblem, before: Cut, after: Cut, tokens: int) -> tuple[float, CacheSource]:
    """Return the seconds until `after` has the cache of `tokens` tokens, and the cheaper way: computed again by all of
    its stages, or sent from the devices that have it. All of it passes the coordinator, even if its device stays."""
    read = makespan(problem.reading(max(1, tokens)), after)
    if not problem.sends_caches:
        return read, "recomputed"
    old, new, sent = owners(problem.task, before), owners(problem.task, after), 0.0
    coordinator = problem.home.names.index(HERE) if HERE in problem.home.names else None
    for giver, taker in sorted({(int(a), int(b)) for a, b in zip(old, new, strict=True)}):
        size = float(problem.cache[(old == giver) & (new == taker)].sum()) * tokens
        way = [giver, taker] if coordinator is None else [giver, coordinator, taker]
        sent += sum(float(problem.send_seconds(size)[a, b]) for a, b in pairwise(way) if a != b)
    return (sent, "sent") if sent < read else (read, "recomputed")


def shares(task: Task, cut: Cut) -> dict[int, float]:
    """Return the seconds of a token that each device of a placement computes."""
    ends = np.cumsum([count for _, count in cut]).tolist()
    return {
        device: float(task.step[device, end - count : end].sum())
        for (device, count), end in zip(cut, ends, strict=True)
    }


def hops(task: Task, cut: Cut) -> float:
    """Return the seconds that a token spends between devices."""
    if len(cut) == 1:
        return 0.0
    return sum(float(task.hop[cut[at - 1][0], device]) for at, (device, _) in enumerate(cut))


def simulate(problem: PhaseProblem, start: Cut, moves: Sequence[Cut] = ()) -> PhasedReply:
    """Return the times of a reply that `start` begins, and to which these placements come one after the other.

    The loads of a move begin when those of the one before it are over: from the request on if only devices without a
    part in `start` load, else after the first token. From the next token's end on, the caches come, also behind the
    tokens that are written; and at the next token's end after that the placement takes over.
    """
    return _Simulation(problem, start, moves).run()


class _Simulation:
    """The state of a reply between two events. Between them tokens, loads and caches go on evenly."""

    def __init__(self, problem: PhaseProblem, start: Cut, moves: Sequence[Cut]) -> None:
        self.problem, self.task, self.start = problem, problem.task, start
        self.cut, self.clock, self.written = start, makespan(problem.task, start), 1.0
        self.knots = [(1.0, self.clock)]
        self.moves = [Move(cut, {}, math.inf) for cut in moves]
        self.loading = 0  # the move whose layers load now
        self.left: dict[int, float] = {}  # seconds of its loads
        self.arriving = 0  # the move whose caches come now, if its layers are loaded
        self.coming: float | None = None  # seconds until they are there
        self.text = 0  # tokens written when they began to come
        self.reading: dict[int, float] = {}  # the share of that time in which each device reads the text
        self.loaded = held(self.task, start)
        if self.moves:
            self._begin_loads(first=True)

    def run(self) -> PhasedReply:
        last = float(self.problem.home.tokens_out)
        while self.written < last - _TOKEN_END:
            until = last
            if self.coming is None and self.arriving < self.loading:
                until = math.ceil(self.written - _TOKEN_END)  # it is noticed at a token's end
                if until - self.written <= _TOKEN_END:
                    self._begin_cache()
                    until = last
            token = self._token_seconds()
            if token <= 0.0:  # nothing takes time, so nothing can be gained
                self._advance(0.0, last - self.written)
                break
            self._advance(min(self._next_event(), (until - self.written) * token))
            if self.coming is not None and self.coming <= 0.0:
                self._take_over(last)
        return PhasedReply(self.start, tuple(self.moves), tuple(self.knots))

    def _begin_loads(self, first: bool = False) -> None:
        """Begin the loads of the next moves, up to one that lacks something."""
        while self.loading < len(self.moves) and not self.left:
            move = self.moves[self.loading]
            loads = lacking(self.problem, self.loaded, move.cut)
            self.loaded = self.loaded | held(self.task, move.cut)
            idle = first and self.loading == 0 and not set(loads) & {device for device, _ in self.start}
            begins = 0.0 if idle else self.clock
            ends = {device: begins + self.problem.opening + took for device, took in (loads or {_NONE: 0.0}).items()}
            self.left = {device: end - self.clock for device, end in ends.items() if end > self.clock}
            self.moves[self.loading] = replace(move, loads=loads, begins=begins)
            if not self.left:
                self.moves[self.loading] = replace(self.moves[self.loading], loaded=max(ends.values()))
                self.loading += 1

    def _begin_cache(self) -> None:
        move = self.moves[self.arriving]
        self.text = int(self.written + _TOKEN_END)
        tokens = self.problem.home.tokens_in + self.text
        self.coming, source = cache_seconds(self.problem, self.cut, move.cut, tokens)
        self.moves[self.arriving] = replace(move, cache=source)
        if source == "recomputed":
            spans = timeline(self.problem.reading(tokens), move.cut)
            whole = max(spans[-1].finish, 1e-12)
            self.reading = {span.device: span.compute / whole for span in spans}

    def _slowed(self) -> dict[int, float]:
        """Return how many times as long each device's part of a token takes."""
        contention, found = self.problem.contention, dict[int, float]()
        for device in self.left:
            found[device] = contention.passes
        for device, share in self.reading.items():
            found[device] = found.get(device, 1.0) * (1.0 + (contention.reading - 1.0) * share)
        return found

    def _token_seconds(self) -> float:
        slowed = self._slowed()
        computing = sum(took * slowed.get(device, 1.0) for device, took in shares(self.task, self.cut).items())
        return computing + hops(self.task, self.cut)

    def _rates(self) -> tuple[dict[int, float], float]:
        """Return at which rate each load, and the reading of the text, go on beside the tokens."""
        contention, token = self.problem.contention, max(self._token_seconds(), 1e-12)
        busy = {device: took / token for device, took in shares(self.task, self.cut).items()}
        loads = {device: 1.0 / (1.0 + (contention.loads - 1.0) * busy.get(device, 0.0)) for device in self.left}
        beside = sum(share * busy.get(device, 0.0) for device, share in self.reading.items())
        return loads, 1.0 / (1.0 + (contention.reading - 1.0) * beside)

    def _next_event(self) -> float:
        loads, reading = self._rates()
        found = [left / loads[device] for device, left in self.left.items()]
        if self.coming is not None:
            found.append(self.coming / reading)
        return min(found, default=math.inf)

    def _advance(self, seconds: float, tokens: float | None = None) -> None:
        """Go on for so many seconds, in which `tokens` are written, by default as many as there is time for."""
        token = self._token_seconds()
        loads, reading = self._rates()
        self.clock += seconds
        self.written += (seconds / token if token > 0.0 else 0.0) if tokens is None else tokens
        self.knots.append((self.written, self.clock))
        if self.coming is not None:
            left = self.coming - seconds * reading
            self.coming = left if left > 1e-12 else 0.0
        if self.left:
            left_over = {device: left - seconds * loads[device] for device, left in self.left.items()}
            self.left = {device: left for device, left in left_over.items() if left > 1e-12}
            if not self.left:
                self.moves[self.loading] = replace(self.moves[self.loading], loaded=self.clock)
                self.loading += 1
                self._begin_loads()

    def _take_over(self, last: float) -> None:
        """End the token under way with the old placement, and write the next with the new one, which first reads what
        it has missed."""
        ready, self.coming, self.reading = self.clock, None, {}
        rest = math.ceil(self.written - _TOKEN_END) - self.written
        if rest > _TOKEN_END:
            self._advance(rest * self._token_seconds(), rest)
        self.written = float(round(self.written))
        move = self.moves[self.arriving]
        self.moves[self.arriving] = replace(move, ready=ready)
        if self.written >= last:
            self.arriving = len(self.moves)  # and none after it
            return
        self.cut = move.cut
        took, plain = self._catch_up(move, int(self.written) - self.text), self._token_seconds()
        self.moves[self.arriving] = replace(
            move, ready=ready, token=int(self.written), seconds=self.clock, pause=max(0.0, took - plain)
        )
        self.arriving += 1
        self._advance(max(took, plain), 1.0)

    def _catch_up(self, move: Move, missed: int) -> float:
        """Return the seconds of the first token on the new placement: it reads the `missed` tokens, too."""
        token = self._token_seconds()
        return token if missed < 1 else max(token, makespan(self.problem.reading(missed + 1), move.cut))


@dataclass(frozen=True, slots=True)
class PhasePlan:
    """The `reply` that is planned, beside the one that stays where it begins: `unmoved`.

    `rest`: where the model is best after the reply, for the next; None if it is best where the reply ends.
    """

    reply: PhasedReply
    unmoved: PhasedReply
    rest: Cut | None


def plan_phases(problem: PhaseProblem, starts: Sequence[Cut], stop: Stop = never) -> PhasePlan:
    """Return the plan of a reply that stays with the first of the placements `starts`, or begins with any of them and
    moves once: to the placement with the least time per token, if that saves `BETTER` of the time up to the move. After
    it, predictions are as wrong for a reply that began with its last placement."""
    task, unmoved = problem.task, simulate(problem, starts[0])
    found = fastest_reply(task, WRITING, stop)
    if found is None or found.seconds >= problem.beyond:
        return PhasePlan(unmoved, unmoved, None)
    target = found.cut

    def improves(cut: Cut, share: float = 0.0) -> bool:
        quicker = per_token(task, target) < (1.0 - share) * per_token(task, cut)
        return quicker and fit_together(problem, cut, target)

    moving = [simulate(problem, start, [target]) for start in starts if improves(start)]
    made = [one for one in moving if one.made and unmoved.seconds - one.seconds > BETTER * one.made[-1].seconds]
    reply = min(made, key=lambda one: one.seconds, default=unmoved)
    return PhasePlan(reply, unmoved, target if not reply.made and improves(reply.start, FASTER) else None)
