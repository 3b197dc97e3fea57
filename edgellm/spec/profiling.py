"""Offline profiling of a pair (Synera, section 5): run with everything offloaded, and watch.

Beyond the paper: each rejected chunk of the draft model's own reply is also corrected alone, and the reply written to
its end, because a mismatch is not yet a loss. What such a correction gains is what a chunk is worth.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter, sleep

import numpy as np
import numpy.typing as npt

from edgellm.errors import VerifierBusy
from edgellm.spec.protocols import Drafter, VerifierSession
from edgellm.spec.records import GREEDY, Chunk, Ids, Verdict
from edgellm.spec.signals import signals, surprise

_LONGER = 1.3  # as a session waits a little longer than it is told


@dataclass(frozen=True, slots=True)
class Observed:
    """One drafted chunk and what the verifier said of it.

    `signals` (f,); `accepted` of `tokens`; `gain` is how much closer to the verifier's own reply the whole reply comes
    where this chunk alone is corrected, in -1..1 (0 where nothing was rejected).
    """

    signals: npt.NDArray[np.float64]
    confidence: float
    importance: float
    accepted: int
    tokens: int
    gain: float = 0.0

    @property
    def whole(self) -> bool:
        return self.accepted == self.tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt: chunks of the fully verified reply, and of the draft model's own reply.

    `closeness` of the draft model's reply to the verifier's, in 0..1; `confidence` of each token of the draft model's
    reply; seconds of each drafted token and verification.
    """

    verified: tuple[Observed, ...]
    alone: tuple[Observed, ...]
    closeness: float
    confidence: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]


class Watcher:
    """Runs prompts through a pair, greedily, in chunks of `gamma`."""

    def __init__(
        self, drafter: Drafter, session: VerifierSession, is_eog: Callable[[int], bool], gamma: int, most: int
    ) -> None:
        """Replies have at most `most` tokens."""
        self._drafter, self._session, self._is_eog = drafter, session, is_eog
        self._gamma, self.most = gamma, most
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []

    def run(self, prompt: Ids) -> Run:
        """See the module."""
        self._draft_seconds, self._verify_seconds = [], []
        reference, verified = self._verified(prompt)
        reply, chunks = self._alone(prompt, 0)
        before = closeness(reply, reference)
        seen = []
        at, doubt = 0, 0.0
        for chunk in chunks:
            verdict = self._verify(np.concatenate((prompt, reply[:at])), chunk)
            gain = 0.0
            if verdict.accepted < len(chunk):
                kept = np.concatenate((reply[:at], chunk.ids[: verdict.accepted], verdict.tokens[:1]))
                gain = closeness(self._to_the_end(prompt, kept), reference) - before
            seen.append(observed(chunk, at, verdict, gain, doubt))
            at, doubt = at + len(chunk), doubt + surprise(chunk)
        confidence = tuple(float(c) for chunk in chunks for c in chunk.confidence)
        times = tuple(self._draft_seconds), tuple(self._verify_seconds)
        return Run(tuple(verified), tuple(seen), before, confidence, *times)

    def _verified(self, prompt: Ids) -> tuple[Ids, list[Observed]]:
        """The verifier's own reply, and its chunks."""
        ids, seen, start = prompt, [], len(prompt)
        while (room := self.most - (len(ids) - start)) > 0:
            chunk = self._draft(ids, min(self._gamma, room))
            verdict = self._verify(ids, chunk)
            seen.append(observed(chunk, len(ids) - start, verdict))
            ids = np.concatenate((ids, chunk.ids[: verdict.accepted], verdict.tokens[:1]))
            if any(map(self._is_eog, ids[-verdict.accepted - 1 :].tolist())):
                break
        return self._cut(ids[start:]), seen

    def _alone(self, prompt: Ids, written: int) -> tuple[Ids, list[Chunk]]:
        """The draft model's own reply to `prompt`, whose last `written` tokens are its beginning, and its chunks."""
        ids, chunks, start = prompt, [], len(prompt)
        while (room := self.most - written - (len(ids) - start)) > 0:
            chunk = self._draft(ids, min(self._gamma, room))
            chunks.append(chunk)
            ids = np.concatenate((ids, chunk.ids))
            if self._is_eog(int(ids[-1])):
                break
        return ids[start:], chunks

    def _to_the_end(self, prompt: Ids, kept: Ids) -> Ids:
        if self._is_eog(int(kept[-1])):
            return kept
        return np.concatenate((kept, self._alone(np.concatenate((prompt, kept)), len(kept))[0]))

    def _draft(self, ids: Ids, gamma: int) -> Chunk:
        began = perf_counter()
        chunk = self._drafter.draft(ids, gamma, GREEDY)
        self._draft_seconds.append((perf_counter() - began) / len(chunk))
        return chunk

    def _verify(self, ids: Ids, chunk: Chunk) -> Verdict:
        while True:
            try:
                verdict = self._session.submit(ids, chunk).result()
                break
            except VerifierBusy as busy:  # what is left out of a profile cannot be made up for
                sleep(_LONGER * busy.seconds)
        self._verify_seconds.append(verdict.seconds)
        return verdict

    def _cut(self, ids: Ids) -> Ids:
        ends = [i for i, token in enumerate(ids.tolist()) if self._is_eog(token)]
        return ids[: ends[0] + 1] if ends else ids


def closeness(one: Ids, other: Ids) -> float:
    """How alike two replies are, in 0..1: half of it the F1 of their tokens as bags, half whether they are equal."""
    shared = sum((Counter(one.tolist()) & Counter(other.tolist())).values())
    overlap = 2.0 * shared / max(1, len(one) + len(other))
    return 0.5 * overlap + 0.5 * float(np.array_equal(one, other))


def observed(chunk: Chunk, written: int, verdict: Verdict, gain: float = 0.0, before: float = 0.0) -> Observed:
    """What is known of a chunk behind `written` tokens, and what became of it; `before` as in `signals`."""
    importance = float(chunk.importance.mean()) if len(chunk.importance) else 0.0
    return Observed(
        signals(chunk, written, before=before),
        float(chunk.confidence.mean()),
        importance,
        verdict.accepted,
        len(chunk),
        gain,
    )
