"""Offline profiling of a pair (Synera, section 5): run with everything offloaded, and watch.

A pair is watched writing with everything verified, and the draft model writing alone, with every chunk tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter, sleep

import numpy as np
import numpy.typing as npt

from edgellm.errors import VerifierBusy
from edgellm.spec.gates.features import NAMES, signals, surprise
from edgellm.spec.ngram.context_lookup import Precedents, Seen, differed
from edgellm.spec.protocols import AsksContext, Drafter, VerifierSession
from edgellm.spec.types import GREEDY, Chunk, Ids, Verdict

_LONGER = 1.3  # as a session waits a little longer than it is told


@dataclass(frozen=True, slots=True)
class Observed:
    """One drafted chunk and what the verifier said of it: `signals` (len(NAMES),); `accepted` of `tokens`."""

    signals: npt.NDArray[np.float64]
    confidence: float
    importance: float
    accepted: int
    tokens: int

    @property
    def whole(self) -> bool:
        return self.accepted == self.tokens


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt: chunks of the fully verified reply, and of the draft model's own reply.

    `confidence` of each token of the draft model's reply; seconds of each drafted token and verification. `heeded` are
    chunks of a verified reply for which the draft model heeded the context, where it was to. `prompt` is empty where
    that was not noted.
    """

    verified: tuple[Observed, ...]
    alone: tuple[Observed, ...]
    confidence: tuple[float, ...]
    draft_seconds: tuple[float, ...]
    verify_seconds: tuple[float, ...]
    heeded: tuple[Observed, ...] = ()
    prompt: tuple[int, ...] = ()

    @property
    def judged(self) -> tuple[Observed, ...]:
        """The chunks that the fitted gate is to judge."""
        return self.heeded or self.verified


def foretelling(run: Run, trouble: float) -> Run:
    """`run` with what its prompt foretells among the signals of the chunks that the fitted gate is to judge."""
    at = NAMES.index("trouble")
    told = []
    for chunk in run.judged:
        known = chunk.signals.copy()
        known[at] = trouble
        told.append(replace(chunk, signals=known))
    return replace(run, heeded=tuple(told)) if run.heeded else replace(run, verified=tuple(told))


class Watcher:
    """Runs prompts through a pair, greedily, in chunks of `gamma`."""

    def __init__(
        self, drafter: Drafter, session: VerifierSession, is_eog: Callable[[int], bool], gamma: int, most: int
    ) -> None:
        """Replies have at most `most` tokens."""
        self.hesitates = 0.0
        """Below this confidence the draft model takes what the context says, in one more reply to each prompt."""
        self._precedents = Precedents()
        self._drafter, self._session, self._is_eog = drafter, session, is_eog
        self._gamma, self.most = gamma, most
        self._draft_seconds: list[float] = []
        self._verify_seconds: list[float] = []

    def run(self, prompt: Ids) -> Run:
        """See the module."""
        self._draft_seconds, self._verify_seconds = [], []
        verified = self.verified(prompt)
        heeded = self._heeding(prompt, self.hesitates) if self.hesitates else []
        reply, chunks = self._alone(prompt)
        seen = []
        at, so_far = 0, 0.0
        for chunk in chunks:
            verdict = self._verify(np.concatenate((prompt, reply[:at])), chunk)
            seen.append(observed(chunk, at, verdict, so_far))
            at, so_far = at + len(chunk), so_far + surprise(chunk)
        confidence = tuple(float(c) for chunk in chunks for c in chunk.confidence)
        times = tuple(self._draft_seconds), tuple(self._verify_seconds)
        return Run(tuple(verified), tuple(seen), confidence, *times, tuple(heeded), tuple(prompt.tolist()))

    def ask(self, prompt: Ids) -> list[Seen]:
        """Where the context would have said another token than the draft model, in the verifier's own reply."""
        seen: list[Seen] = []
        self._heeding(prompt, 0.0, seen)
        return seen

    def _heeding(self, prompt: Ids, hesitates: float, seen: list[Seen] | None = None) -> list[Observed]:
        """`verified`, while the draft model heeds the context."""
        if not isinstance(self._drafter, AsksContext):
            return []
        self._precedents.begin(prompt)
        self._drafter.precedents, self._drafter.hesitates = self._precedents, hesitates
        try:
            return self.verified(prompt, seen)
        finally:
            self._drafter.precedents, self._drafter.hesitates = None, 0.0

    def verified(self, prompt: Ids, differences: list[Seen] | None = None) -> list[Observed]:
        """The chunks of the verifier's own reply. Where context and draft model differ is added to `differences`."""
        ids, seen, start, so_far = prompt, [], len(prompt), 0.0
        while (room := self.most - (len(ids) - start)) > 0:
            chunk = self._draft(ids, min(self._gamma, room))
            verdict = self._verify(ids, chunk)
            seen.append(observed(chunk, len(ids) - start, verdict, so_far))
            if differences is not None:
                differences += differed(chunk, verdict)
            so_far += surprise(chunk)
            ids = np.concatenate((ids, chunk.ids[: verdict.accepted], verdict.tokens[:1]))
            if any(map(self._is_eog, ids[-verdict.accepted - 1 :].tolist())):
                break
        return seen

    def _alone(self, prompt: Ids) -> tuple[Ids, list[Chunk]]:
        """The draft model's own reply to `prompt`, and its chunks."""
        ids, chunks, start = prompt, [], len(prompt)
        while (room := self.most - (len(ids) - start)) > 0:
            chunk = self._draft(ids, min(self._gamma, room))
            chunks.append(chunk)
            ids = np.concatenate((ids, chunk.ids))
            if self._is_eog(int(ids[-1])):
                break
        return ids[start:], chunks

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


def observed(chunk: Chunk, written: int, verdict: Verdict, so_far: float = 0.0) -> Observed:
    """What is known of a chunk behind `written` tokens, and what became of it; `so_far` as in `signals`."""
    importance = float(chunk.importance.mean()) if len(chunk.importance) else 0.0
    return Observed(
        signals(chunk, written, so_far=so_far),
        float(chunk.confidence.mean()),
        importance,
        verdict.accepted,
        len(chunk),
    )
