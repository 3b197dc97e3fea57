"""Stall-free parallel inference (Synera, section 4.4): drafting after predicted verdicts while waiting for one.

A prediction is where a chunk will be rejected, and the verifier's own token there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import NamedTuple

import numpy as np

from edgellm.engine import SeqRows, common_prefix
from edgellm.spec.drafters.model import ChunkBuilder, ModelDrafter, within
from edgellm.spec.drafting.acceptance import ConfidenceAcceptance, Probabilities
from edgellm.spec.protocols import Drafter, GenerationState
from edgellm.spec.sampling import top2, top_k
from edgellm.spec.stats import Summary
from edgellm.spec.types import NO_FLOATS, NO_IDS, Chunk, Floats, Ids, Round

BRANCHES = 8
"""Guesses that are followed at once: 3 to 8 save about as much time on a processor, and where a further row costs
nothing, more of them have the verdict more often (`real/verdict_prediction`). The paper follows one."""
ALTERNATIVES = 15
"""Candidates for the verifier's token at each place; the paper has three."""
MAX_AHEAD = 8
"""Maximum tokens of a branch: more than a chunk, so that the next chunks profit, too."""
CONTEXT_BOOST = 30.0
"""Factor by which tokens that already occur in the text are likelier corrections than the draft model says: where it is
wrong, the verifier's token often is a name, a number or a word of the question."""


class PredictedVerdict(NamedTuple):
    """A predicted verdict: `accepted` tokens, followed by the verifier's `token`, with the joint `probability` of
    both."""

    accepted: int
    token: int
    probability: float


def likely_corrections(logits: Floats, confidence: float, limit: int, known: Ids) -> tuple[Ids, Floats]:
    """Return the verifier's `limit` likeliest tokens, likeliest first, and their weights, both (min(limit, n_vocab),).

    A weight is the probability by the draft model's `logits` (n_vocab,), whose likeliest token has the probability
    `confidence`; for the `known` tokens (k,), which occur in the text so far, it is multiplied by `CONTEXT_BOOST`.
    """
    raised = logits.copy()
    raised[known[known < len(raised)]] += np.float32(math.log(CONTEXT_BOOST))
    ids = top_k(raised, limit)
    return ids, np.exp(raised[ids] - logits.max()) * np.float32(confidence)


def alternatives(chunk: Chunk, limit: int, known: Ids) -> list[tuple[Ids, Floats]]:
    """Return for each token of a chunk up to `limit` candidates for the verifier's token in case it is rejected, with
    their weights, as `likely_corrections`; none where the chunk has no logits."""
    found = []
    for token, confidence, drafted in zip(chunk.ids, chunk.confidence, chunk.drafted, strict=True):
        ids, weights = NO_IDS, NO_FLOATS
        if drafted.logits is not None:
            ids, weights = likely_corrections(drafted.logits, confidence, limit + 1, known)
        others = np.flatnonzero(ids != token)[:limit]
        found.append((ids[others], weights[others]))
    return found


def predict_verdicts(
    positions: Probabilities, confidence: Floats, candidates: list[tuple[Ids, Floats]], limit: int
) -> list[PredictedVerdict]:
    """Return the `limit` likeliest verdicts, likeliest first.

    `positions` (gamma + 1,) as from `ConfidenceAcceptance`, for a chunk of `confidence` (gamma,). `candidates[t]` are
    tokens that the verifier may write if the first t are accepted, with weights as from `likely_corrections`, both
    (k,); for t < gamma they exclude the drafted token, and share the probability that it leaves.
    """
    found = []
    rejected_mass = [*(1.0 - confidence).tolist(), 1.0]
    for accepted, (chance, (ids, weights)) in enumerate(zip(positions.tolist(), candidates, strict=True)):
        total = max(float(weights.sum()), rejected_mass[accepted])
        if total > 0.0:
            shares = zip(ids.tolist(), weights.tolist(), strict=True)
            found += [PredictedVerdict(accepted, token, chance * weight / total) for token, weight in shares]
    return sorted(found, key=lambda guess: -guess.probability)[:limit]


class BranchingDrafter(ModelDrafter):
    """A draft model that also drafts branches, in further sequences of its context. Its chunks have logits."""

    keeps_logits = True
    _branches = 0  # number of the last sequence with a branch

    def draft_many(
        self, state: GenerationState, prefixes: Sequence[Ids], gamma: int, until: Callable[[], bool], *, whole: Ids,
        tail: int,
    ) -> list[tuple[Ids, Chunk]]:  # fmt: skip
        """Draft after several prefixes in one batch per token, until `until` returns True.

        The prefixes are `prefixes`, and `whole` with each of its `tail` likeliest next tokens (without tokens that end
        the turn, or are in `prefixes`): at most as many as the context has further sequences. Return each with up to
        `gamma` drafted tokens, fewer where the context ends, but not for low confidence. The next `propose` after such
        a prefix continues from its cache. Importance is not measured.
        """
        self._pause_meter()
        # `whole` may have been drafted ahead, and be verified before anything else is drafted.
        self._take_over(within(whole, self._shared))
        context, known, rows = self._context, np.unique(within(whole, self._shared)), []
        branches: list[tuple[Ids, ChunkBuilder]] = []  # Branch i is sequence i + 1.

        def length(prefix: Ids) -> int:
            return min(gamma, context.n_ctx - len(prefix) + 1)

        def begin(prefix: Ids) -> None:
            cursor = state.lookup(prefix, committed=False)
            branches.append((prefix, ChunkBuilder(state, gamma, text=prefix, cursor=cursor)))
            self._branches = max(self._branches, len(branches))
            if length(prefix) > 0:
                context.branch(0, len(branches))
                own = within(prefix, self._shared)
                rows.append(SeqRows(len(branches), own[context.sync(own, len(branches)) :], 1))

        taken = {int(prefix[len(whole)]) for prefix in prefixes if len(prefix) > len(whole)}
        for prefix in prefixes:  # Sequence 0 still has the tokens drafted behind `whole`.
            begin(prefix)
        if tail:
            own = within(whole, self._shared)
            rows.append(SeqRows(0, own[context.sync(own) :], 1))
        while rows and not until():
            decoded, rows[:] = list(rows), []
            logits = [view[0][: self._shared] for view in context.decode_rows(decoded)]
            for fed, row, facts in zip(decoded, logits, map(top2, logits), strict=True):
                if fed.seq:
                    prefix, chunk = branches[fed.seq - 1]
                    token = chunk.add(row, facts, keeps_logits=True)
                    if len(chunk.ids) < length(prefix) and not self._model.is_eog(token):
                        rows.append(SeqRows(fed.seq, np.array([token], dtype=np.int32), 1))
                    continue
                for token in likely_corrections(row, facts.p1, tail, known)[0].tolist():
                    if token not in taken and not self._model.is_eog(token):
                        begin(np.append(whole, token).astype(np.int32))
        return [(prefix, chunk.build()) for prefix, chunk in branches]

    def _sync(self, prefix: Ids) -> int:
        self._take_over(prefix)
        return super()._sync(prefix)

    def _take_over(self, prefix: Ids) -> None:
        """Make the branch that shares most of `prefix` the reply's sequence, and drop the others."""
        if not self._branches:
            return
        best = max(range(self._branches + 1), key=lambda seq: common_prefix(self._context.cached(seq), prefix))
        if best:
            self._context.branch(best, 0)
        for seq in range(1, self._branches + 1):
            self._context.clear(seq)
        self._branches = 0


class ParallelDrafter(Drafter):
    """A drafter that continues drafting while waiting for a verdict, and keeps the drafts if the prediction was
    right."""

    def __init__(
        self, drafter: BranchingDrafter, acceptance: ConfidenceAcceptance, stats: Summary, *,
        is_eog: Callable[[int], bool], branches: int = BRANCHES,
    ) -> None:  # fmt: skip
        """Follow up to `branches` guesses at once, for which `drafter` has sequences; `acceptance` predicts where a
        chunk will be rejected, and learns from the verdicts; `stats` counts the guesses."""
        self._drafter, self._acceptance, self._stats, self._is_eog = drafter, acceptance, stats, is_eog
        self._branches = branches
        self._ahead: list[tuple[Ids, Chunk]] = []
        self._leftover: tuple[Ids, Chunk] | None = None  # the rest of the kept branch, beyond the chunk
        self._seconds = 0.0

    def begin(self, state: GenerationState) -> None:
        self._drafter.begin(state)

    def end(self) -> None:
        self._drafter.end()

    def observe(self, state: GenerationState, turn: Round) -> None:  # noqa: ARG002
        if turn.verdict is not None:
            self._acceptance.observe(turn.chunk, turn.verdict.accepted)

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Draft a chunk. Tokens that were drafted ahead behind exactly this text are taken over."""
        prefix = state.ids
        ready = next((chunk for known, chunk in self._ahead if len(chunk) and np.array_equal(known, prefix)), None)
        if self._ahead:
            self._stats.guess(ready is not None, self._seconds)
        else:
            ready = self._drafted_behind(prefix)
        self._ahead, self._leftover = [], None
        if ready is None:
            return self._drafter.propose(state, gamma)
        doubtful = np.flatnonzero(ready.confidence[:gamma] < state.rules.stop_below)
        n = int(doubtful[0]) + 1 if len(doubtful) else gamma
        if len(ready) > n:
            self._leftover = np.concatenate((prefix, ready.ids[:n])), ready.part(n, len(ready))
            ready = ready.part(0, n)
        ready = replace(ready, ahead=len(ready))
        if len(ready) == n or self._is_eog(int(ready.ids[-1])):
            return ready
        return ready.then(self._drafter.propose(state.with_draft(ready.ids), gamma - len(ready)))

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """Draft behind the likeliest verdicts, as many as there is room for."""
        prefix, began = state.ids, perf_counter()
        whole = np.concatenate((prefix, chunk.ids))
        drafted = self._drafted_behind(whole)
        self._ahead, self._leftover = [], None
        if until() or not (predictions := self.predictions(prefix, chunk)):
            return
        prefixes = [
            np.concatenate((prefix, chunk.ids[:accepted], np.array([token], dtype=np.int32)))
            for accepted, token, _ in predictions if accepted < len(chunk)
        ]  # fmt: skip
        tail = len(predictions) - len(prefixes)
        known = tail > 0 and drafted is not None
        if known and drafted is not None:
            prefixes.insert(0, np.concatenate((whole, drafted.ids)))
        found = self._drafter.draft_many(state, prefixes, max(gamma, MAX_AHEAD), until, whole=whole, tail=tail - known)
        if known and drafted is not None:
            longest, more = found[0]
            found[0] = longest[: len(whole) + 1], drafted.part(1, len(drafted)).then(more)
        self._ahead, self._seconds = found, perf_counter() - began

    def _drafted_behind(self, text: Ids) -> Chunk | None:
        """Return the tokens that were drafted ahead behind `text`, in an earlier wait."""
        if self._leftover is None or not np.array_equal(self._leftover[0], text):
            return None
        return self._leftover[1]

    def predictions(self, prefix: Ids, chunk: Chunk) -> list[PredictedVerdict]:
        """Return the predicted verdicts on a chunk behind `prefix`, likeliest first; empty for a chunk without logits.

        After the whole chunk, a prediction stands for the n-th likeliest next token, and its `token` is a placeholder.
        """
        if all(one.logits is None for one in chunk.drafted):
            return []
        positions = self._acceptance.rejection(chunk.confidence.tolist())
        if self._is_eog(int(chunk.ids[-1])):
            positions[-1] = 0.0  # Nothing follows the end.
        candidates = [*alternatives(chunk, ALTERNATIVES, np.unique(prefix)), _BEHIND]
        found = predict_verdicts(positions, chunk.confidence, candidates, 2 * self._branches)
        found = [guess for guess in found if guess.probability > 0.0 and not self._is_eog(guess.token)]
        return found[: self._branches]


_BEHIND = (
    np.arange(-ALTERNATIVES, 0, dtype=np.int32),
    np.array([0.80, 0.06, 0.02, 0.01] + [0.005] * (ALTERNATIVES - 4), dtype=np.float32),
)
"""Placeholders for the likeliest tokens after a wholly accepted chunk, with usual probabilities: the tokens are not
computed yet when branches are allotted."""
