"""The verification rule: which drafted tokens are accepted, and which token follows them; a verdict by that rule,
its deadline, and the pauses before a verifier is asked again.

Drafter-invariant speculative sampling (Daliri et al. 2024): draft model and verifier draw by the same random numbers,
and a draft is accepted where it equals the verifier's own draw. Unlike rejection sampling (Leviathan et al. 2023, Chen
et al. 2023), this leaves a sampled text as the verifier writes it alone, accepts copies as well as drawn tokens, and
needs no distribution of the drafts.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

import numpy as np

from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.sampling import ReplyGrammar, check_peak, distribution, draw, logprobs, penalised
from edgellm.spec.types import NO_CHUNK, NO_IDS, Chunk, Floats, Ids, Logprobs, Sampling, Verdict


def judge(
    draft: Ids, rows: Floats, sampling: Sampling, position: int, text: Ids = NO_IDS, grammar: ReplyGrammar | None = None
) -> tuple[int, int]:
    """Return the number of accepted tokens of the `draft` (n,), and the verifier's own token after them.

    A draft is accepted while each token is the verifier's own: its most probable token, or its draw at that position
    after penalties, temperature, truncation and grammar. So the text is what the verifier writes alone,
    whatever is drafted. `rows` (n + 1, n_vocab) are the verifier's logits: row i predicts place i of the draft, the
    last row the token after it. `position` is the number of tokens before the draft; `text` (position,) are these
    tokens, for penalties and the `grammar`, which at each place also see the drafted tokens before it.
    """
    if sampling.greedy and sampling.penalties is None and grammar is None:
        return verify_greedy(draft, rows)

    def own_at(place: int) -> int:
        row, before = rows[place], np.concatenate((text, draft[:place]))
        if sampling.penalties is not None:
            row = penalised(row, before, sampling.penalties)
        found = distribution(row, sampling)
        if grammar is not None:
            found = grammar.limited(found, row, before)
        return draw(found, sampling.seed, position + place)

    for place, drafted in enumerate(draft.tolist()):
        if (own := own_at(place)) != drafted:
            return place, own
    return len(draft), own_at(len(draft))


def verify_greedy(draft_ids: Ids, rows: Floats) -> tuple[int, int]:
    """Accept the drafts (n,) while each is the most probable token of its row; `rows` is (n + 1, n_vocab)."""
    drafted, accepted = draft_ids.tolist(), 0
    while (answer := int(rows[accepted].argmax())) in drafted[accepted : accepted + 1]:
        accepted += 1
    check_peak(rows[accepted, answer])
    return accepted, answer


LIKELY = 0.1
"""The threshold of equation 3 of CoordGen: a rejected token of this probability may still come."""


def plausible(chunk: Chunk, rows: Floats, accepted: int) -> tuple[bool, ...]:
    """Return which tokens of `chunk` have at least probability `LIKELY` in their row of `rows` (len(chunk) or more,
    n_vocab).

    Accepted tokens count as plausible, whatever their probability. Only tokens within that factor of the row's maximum
    can qualify, so only they need a sum over the vocabulary.
    """
    n = len(chunk)
    found = [True] * accepted + [False] * (n - accepted)
    if accepted == n:
        return tuple(found)
    left = rows[accepted:n]
    own = left[np.arange(n - accepted), chunk.ids[accepted:n]]
    best = left.max(axis=1)
    for at in np.flatnonzero(own - best >= np.log(LIKELY)).tolist():
        found[accepted + at] = bool(np.exp(own[at] - best[at]) >= LIKELY * np.exp(left[at] - best[at]).sum())
    return tuple(found)


@dataclass(slots=True, eq=False)
class Judgement:
    """The partial verdict on a request: `ids` are all tokens before the `remaining` part of the draft, and `passes`
    were computed in `seconds`."""

    request: VerifyRequest
    ids: Ids = field(default_factory=lambda: NO_IDS)
    remaining: Chunk = field(init=False)
    accepted: int = 0
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0
    passes: int = 0
    plausible: tuple[bool, ...] = ()
    logprobs: list[Logprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.remaining = self.request.draft

    def judge(self, rows: Floats, drafted: int, is_eog: Callable[[int], bool]) -> bool:
        """Judge the first `drafted` tokens, and the next one if any; return whether another pass is needed.

        `rows` (drafted + 1, n_vocab) are logits: row i predicts place i. Afterwards, the first `computed` tokens of the
        request's sequence are valid. Raises EngineFailed if the logits contain NaN.
        """
        request = self.request
        # The last row judges a further drafted token, if any.
        chunk = self.remaining.part(0, drafted + 1)
        start = request.position + len(request.prefix) + self.accepted + len(self.tokens)
        accepted, token = judge(chunk.ids[:drafted], rows, request.sampling, start, self.ids, request.grammar)
        whole = accepted == drafted < len(chunk) and token == int(chunk.ids[drafted])
        accepted += whole
        self.passes += 1
        extra = bool(self.tokens)  # The draft is the verifier's own, of extra tokens.
        if extra:
            self.tokens.extend(chunk.ids[:accepted].tolist())
        else:
            self.accepted += accepted
            if chunk.retrieved:
                self.plausible += plausible(chunk, rows, accepted)
        drafts_stand = accepted > 0 or (self.accepted > 0 and not extra)
        ended = drafts_stand and is_eog(int((chunk.ids[:accepted] if accepted else self.ids)[-1]))
        continues = whole and not (extra and ended)
        bare = continues or (extra and ended)  # No token of the verifier follows the accepted tokens.
        if not bare:
            self.tokens.append(token)
        written = self.accepted + len(self.tokens)
        needs_pass = continues or (written <= request.extra and not ended and not is_eog(token))
        request.computed = start + min(accepted, drafted)
        if needs_pass or request.logprobs is not None:
            kept = chunk.ids[:accepted] if bare else np.append(chunk.ids[:accepted], np.int32(token))
            if request.logprobs is not None and len(kept):
                self.logprobs.extend(logprobs(rows[: len(kept)], kept, request.logprobs))
            self.ids = np.concatenate((self.ids, kept))
            self.remaining = self.remaining.part(drafted + 1, len(self.remaining)) if continues else NO_CHUNK
        return needs_pass

    def verdict(self) -> Verdict:
        """Return the verdict, after the last pass."""
        draft, found = self.request.draft, self.plausible
        # Tokens that were not decoded count as plausible.
        marks = (*found, *[True] * (len(draft) - len(found))) if draft.retrieved else None
        return Verdict(
            self.accepted, np.array(self.tokens, np.int32), self.seconds, passes=self.passes,
            cached=self.request.cached, plausible=marks, logprobs=tuple(self.logprobs),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class VerdictWork:
    """The work of a verdict for the verifier: reading `unseen` tokens, and up to `passes` passes of its model."""

    unseen: int
    passes: int


class VerdictDeadline:
    """The deadline of a verdict, from the fastest verdict so far. Belongs to a connection and its thread.

    A limit from typical times would follow a verifier that slows down gradually. After a verdict that missed its limit,
    the next limit is twice as long, up to four times, until one arrives: a verifier that has become slower for good is
    used again.
    """

    slack = 5.0  # deadline over expected time of a verdict
    first_seconds, max_seconds = 25.0, 600.0  # added before a measurement; longest deadline
    unknown_pass = 1.0  # seconds of a pass before a measurement
    _slowest_token = 0.05  # most seconds of a prompt token, which is never slower than a pass
    _few_tokens = 32  # tokens that hardly prolong a pass

    def __init__(self, minimum: float) -> None:
        """Start without a measurement; no limit is below `minimum` seconds."""
        self._minimum = minimum
        self._pass: float | None = None  # seconds of a pass with few tokens
        self._missed = 0

    def record(self, work: VerdictWork, seconds: float) -> None:
        """Record that a verdict took `seconds`. A first one that took very long may have loaded the model."""
        self._missed = 0
        if work.unseen <= self._few_tokens:
            known = self.first_seconds / self.slack if self._pass is None else self._pass
            self._pass = min(known, seconds / work.passes)

    def record_miss(self) -> None:
        """Record that a verdict did not arrive within the limit."""
        self._missed = min(self._missed + 1, 2)

    def limit(self, work: VerdictWork) -> float:
        """Return the seconds after which the device continues alone."""
        pass_seconds = self.unknown_pass if self._pass is None else self._pass
        reading = max(0, work.unseen - self._few_tokens) * min(pass_seconds, self._slowest_token)
        seconds = max(self._minimum, self.slack * (work.passes * pass_seconds + reading)) * (1 << self._missed)
        if self._pass is None:  # The verifier may still have to load its model.
            seconds += self.first_seconds
        return min(seconds, self.max_seconds)


class RetryDelay:
    """An exponential back-off: `first` seconds, doubled up to `most`, with a random half as jitter; and the time before
    which nothing is asked."""

    def __init__(self, first: float, most: float) -> None:
        self._first, self._most = first, most
        self._failures = 0
        self._not_before = 0.0
        self._jitter = random.Random()

    def next(self) -> float:
        """Return the next delay, which is longer from failure to failure."""
        longest = min(self._first * 2.0**self._failures, self._most)
        self._failures = min(self._failures + 1, 16)
        return longest * self._jitter.uniform(0.5, 1.0)

    def pause(self, seconds: float | None = None) -> float:
        """Pause for the requested `seconds`, or for the next delay; return the seconds. Requested pauses are prolonged
        at random, so that not all devices come back at once."""
        wait = self.next() if seconds is None else seconds * self._jitter.uniform(1.0, 1.25)
        self._not_before = max(self._not_before, monotonic() + wait)  # Several sessions may set a delay.
        return wait

    @property
    def left(self) -> float:
        """Return the remaining seconds of the pause, 0 without a pause."""
        return max(0.0, self._not_before - monotonic())

    def reset(self) -> None:
        """Begin again with the first delay, after an answer."""
        self._failures = 0
