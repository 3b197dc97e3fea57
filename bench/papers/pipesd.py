"""PipeSD's schedule of uploads and its triggers, and those of its baselines (Han et al., ICML 2026, arXiv 2605.13319).

A device drafts, a verifier far away checks. What it checks with are the distributions that the drafts were drawn from,
and these take longer to send than to draft. A `Strategy` says when a draft is long enough, what the device does
meanwhile, and how the distributions travel.

Thresholds are not the paper's, which belong to its models. `tuned` chooses those of all candidates with which other
replies take the least time by a model of it, `replayed`; the paper measures 16, chosen by Bayesian optimisation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle, product

import numpy as np

from edgellm.engine import common_prefix
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Floats, Ids

LONGEST = 16
"""Tokens of a draft at most."""
WINDOW = 20
"""Tokens that are scheduled at once before any draft was verified, as in the paper."""
LEVELS = (0.0, 0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999)
"""Thresholds that are tried."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds: `draft` for drafting a token; `startup` for an upload, and `per_token` for each token in it; `verdict`
    for a pass of the verifier, with the way there and back."""

    draft: float
    startup: float
    per_token: float
    verdict: float


def batch_sizes(tokens: int, cost: Cost) -> tuple[int, ...]:
    """Return the sizes of the batches by which `tokens` are uploaded the soonest (PipeSD, Theorem 4.1).

    Token i is drafted at i * `draft`. A batch begins when its last token is drafted and the batch before has arrived.
    So the first i tokens have arrived at f(i), the least over j < i of max(f(j), i * `draft`) + `startup` + (i - j) *
    `per_token`, where j tokens are in earlier batches.
    """
    arrived, earlier = [0.0], [0]
    for i in range(1, tokens + 1):
        at = [max(arrived[j], i * cost.draft) + cost.startup + (i - j) * cost.per_token for j in range(i)]
        earlier.append(at.index(min(at)))
        arrived.append(min(at))
    sizes: list[int] = []
    i = tokens
    while i:
        sizes.insert(0, i - earlier[i])
        i = earlier[i]
    return tuple(sizes)


def arrival(sizes: Iterable[int], tokens: int, cost: Cost) -> float:
    """Return the seconds until `tokens` have arrived in batches of these sizes, the last of which may be cut short."""
    done, sent = 0.0, 0
    for size in sizes:
        batch = min(size, tokens - sent)
        sent += batch
        done = max(done, sent * cost.draft) + cost.startup + batch * cost.per_token
        if sent == tokens:
            break
    return done


class Schedule:
    """The batches of a draft of unknown length: those of a window, again and again.

    The window is as long as the last hundred drafts were in the mean.
    """

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=100)
        self._sizes = lru_cache(batch_sizes)

    def sizes(self, cost: Cost) -> Iterator[int]:
        """Return the sizes of a draft's batches, without end."""
        window = round(sum(self._lengths) / len(self._lengths)) if self._lengths else WINDOW
        return cycle(self._sizes(window, cost))

    def record(self, length: int) -> None:
        """Record a draft that was verified."""
        self._lengths.append(length)


@dataclass(frozen=True, slots=True)
class Trigger:
    """A draft is verified when it has `most` tokens, when the product of their confidences is below `sequence` (R1), or
    when that of the last one is below `token` (R2)."""

    most: int = LONGEST
    sequence: float = 0.0
    token: float = 0.0

    def fires(self, confidence: Floats) -> bool:
        """Return whether a draft of these confidences (n,), n at least 1, is verified."""
        unsure = confidence.prod() < self.sequence or confidence[-1] < self.token
        return bool(unsure) or len(confidence) >= self.most

    def length(self, confidence: Floats) -> int:
        """Return how many of the tokens of these confidences are drafted before it fires."""
        fires = (np.cumprod(confidence) < self.sequence) | (confidence < self.token)
        fires[self.most - 1 :] = True
        return int(fires.argmax()) + 1 if fires.any() else len(confidence)

    def adapted(self, confidence: Floats, accepted: int) -> Trigger:
        """Return the trigger after a verdict, as EdgeLLM adapts it: half of R1 where all was accepted, else a larger
        one, by the share that was not."""
        if accepted == len(confidence):
            return replace(self, sequence=0.5 * self.sequence)
        less = float(confidence.prod()) ** (1.0 - accepted / len(confidence))
        return replace(self, sequence=min(1.0, self.sequence / max(less, 1e-9)))


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to draft for a verifier far away.

    `adapts`: verdicts change the trigger. `ahead`: tokens are drafted while a verdict is awaited, for the case that all
    is accepted and the verifier's next token is the draft model's. `pipelined`: tokens are uploaded while others are
    drafted, in batches.
    """

    trigger: Trigger
    adapts: bool = False
    ahead: bool = False
    pipelined: bool = False


STRATEGIES: dict[str, tuple[Strategy, ...]] = {
    "vanilla": tuple(Strategy(Trigger(n)) for n in range(1, 9)),
    "hsl": tuple(Strategy(Trigger(token=token)) for token in LEVELS),
    "edgellm": tuple(Strategy(Trigger(sequence=sequence), adapts=True, ahead=True) for sequence in LEVELS),
    "pipesd": tuple(
        Strategy(Trigger(sequence=sequence, token=token), ahead=True, pipelined=True)
        for sequence, token in product(LEVELS, repeat=2)
    ),
}
"""What `tuned` chooses from, under the paper's names."""


@dataclass(frozen=True, slots=True)
class Trace:
    """What the draft model drafts at each place of a verifier's reply: the confidences of up to `LONGEST` tokens, and
    how many of these are the verifier's own."""

    drafts: list[tuple[Floats, int]]


def traced(drafter: Drafter, prompt: Ids, reply: Ids) -> Trace:
    """Draft at each place of a `reply` (n,) without the token that ends the turn."""
    drafts = []
    for at in range(len(reply)):
        chunk = drafter.propose(GenerationState(np.concatenate((prompt, reply[:at]))), LONGEST)
        drafts.append((chunk.confidence, common_prefix(chunk.ids, reply[at:])))
    return Trace(drafts)


def replayed(traces: Sequence[Trace], strategy: Strategy, cost: Cost) -> float:
    """Return the seconds for each token, as the strategy would write these replies, without the reading of prompts."""
    seconds, tokens, schedule = 0.0, 0, Schedule()
    for trace in traces:
        at, head_start, trigger = 0, 0.0, strategy.trigger
        while at < len(trace.drafts):
            confidence, right = trace.drafts[at]
            n = trigger.length(confidence)
            if strategy.pipelined:
                sent = arrival(schedule.sizes(cost), n, cost) - cost.startup  # the last batch is the request itself
                schedule.record(n)
            else:
                sent = n * (cost.draft + cost.per_token)
            accepted = min(n, right)
            seconds += max(0.0, sent - min(head_start, n * cost.draft)) + cost.verdict
            head_start = max(0.0, cost.verdict - cost.draft) if strategy.ahead and right > n else 0.0
            if strategy.adapts:
                trigger = trigger.adapted(confidence[:n], accepted)
            tokens += accepted + 1
            at += accepted + 1
    return seconds / tokens


def tuned(name: str, traces: Sequence[Trace], cost: Cost) -> Strategy:
    """Return the candidate of a method that is the fastest on these replies."""
    return min(STRATEGIES[name], key=lambda strategy: replayed(traces, strategy, cost))
