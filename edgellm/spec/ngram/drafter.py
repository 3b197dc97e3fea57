"""The retrieval drafter, which copies from the context, past conversations, the model's own predictions, and rejected
drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from operator import itemgetter
from time import perf_counter
from typing import TypeAlias

import numpy as np

from edgellm.spec.draft_length import DraftLengthController
from edgellm.spec.ngram.acceptance_model import AcceptanceModel, agrees, evidence
from edgellm.spec.ngram.calibration import Calibration
from edgellm.spec.ngram.duty_cycle import DutyCycle
from edgellm.spec.ngram.reuse import Reuse
from edgellm.spec.ngram.sources import NO_CURSOR, Cursor, DraftSource
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState, Suggestions
from edgellm.spec.types import NO_FLOATS, Chunk, Expected, Ids, Round, TryingCost, Verdict

HOPELESS = 0.02
Candidate: TypeAlias = tuple[int, float, int]
"""A token, its chance, and its `evidence`."""
Candidates: TypeAlias = list[list[Candidate]]
"""The candidates for one place after another, the likeliest first."""


class RetrievalDrafter(Drafter, Suggestions):
    """A drafter that copies from its sources: the likeliest token at each place, as long as that pays by the cost
    curve."""

    def __init__(
        self,
        sources: Mapping[str, DraftSource],
        chances: AcceptanceModel,
        length: DraftLengthController,
        *,
        inside: Callable[[int], bool],
        is_eog: Callable[[int], bool],
        reuse: Reuse | None = None,
        hopeless: float = HOPELESS,
        calibration: Calibration | None = None,
        duty: DutyCycle | None = None,
    ) -> None:
        """Draft from `sources`, by name, in the order of the priors of `chances`.

        `reuse` and `calibration` are among them if used. `inside` tells whether a token continues a word, `is_eog`
        whether it ends the turn. A draft ends where its next token would be reached and accepted with a probability
        below `hopeless`. `duty` decides in which rounds drafts are looked up; None: in all.
        """
        self._sources = tuple(sources.values())
        self._chances, self._length, self._inside, self._is_eog = chances, length, inside, is_eog
        self._reuse, self._calibration, self._hopeless, self._duty = reuse, calibration, hopeless, duty
        self._prompt: Ids | None = None  # while the sources have not begun
        self._known = 0  # tokens of the text that the sources know
        self._looked, self._looking = True, 0.0  # in this round, and for how many seconds
        self._plain_rounds, self._plain_seconds = 0, 0.0  # without a lookup or a draft, not learned from yet
        self._rest = 0  # rounds until the next look at whether a lookup is due
        self._refused: list[int] = []  # a draft that was not allowed
        self._right = 0  # tokens of it that were written
        self._together = 1  # so many of them are learned from together
        self._candidates: Candidates = []  # options of the last draft, from place `_first_place` of its chunk on
        self._first_place = 0
        self._found: tuple[int, list[int], list[float]] = 0, [], []  # the last draft: text before it, tokens, chances
        self._first = True  # before the reply's first verdict
        self.copied = dict.fromkeys(sources, 0)
        """Accepted tokens of the reply by the source that offered them."""

    def begin(self, state: GenerationState) -> None:
        """See `Drafter.begin`. The prompt is indexed when something is first looked up."""
        self._prompt = state.ids
        self._looked = self._duty is None
        if self._duty is None:
            self._extend_sources(state.ids)
        else:
            self._duty.begin(state.ids)
        self.copied = dict.fromkeys(self.copied, 0)
        self._first, self._together, self._refused, self._rest = True, 1, [], 0

    def propose(self, state: GenerationState, gamma: int, *, alternative: tuple[float, float] | None = None) -> Chunk:
        """See `Drafter.propose`. `alternative` is the expected result of an empty chunk, as tokens and seconds;
        None: the verifier's next token."""
        duty = self._duty
        if duty is None:
            return self._propose(state, gamma, alternative, inf)
        if self._rest:
            self._rest -= 1
            return Chunk(reason=duty.reason) if state.explain else _NOTHING
        if not self._sources or not duty.due(state.committed):
            self._looked, self._candidates, self._first_place, self._rest = False, _NO_CANDIDATES, 0, duty.rest
            return Chunk(reason=duty.reason) if state.explain else _NOTHING
        began = perf_counter()
        self._looked = True
        self._learn_plain()
        chunk = self._propose(state, gamma, alternative, duty.allowed)
        self._looking = perf_counter() - began
        return chunk

    @property
    def rest(self) -> int:
        """Return for how many rounds nothing will be looked up."""
        return self._rest

    def rested(self, rounds: int, seconds: float) -> None:
        """Learn from rounds of `rest` in which `propose` was not called, each of one token, which took `seconds`
        together."""
        self._rest -= rounds
        self._wrote_plainly(rounds, seconds)

    def _propose(
        self, state: GenerationState, gamma: int, alternative: tuple[float, float] | None, allowed: float
    ) -> Chunk:
        self._first_place = 0
        self._extend_sources(state.committed)
        ids, survives, self._candidates = self._retrieve(gamma)
        trust = self._chances.trust
        survives = [trust * chance for chance in survives]
        self._found = len(state.ids), ids, survives
        n = min(self._length.choose(survives, alternative, allowed), gamma)  # an arbitrary row needs room, too
        if not n and allowed < inf and not self._refused:
            self._refused, self._right = ids[: self._length.wanted(survives, alternative)], 0
        reason = self._length.explain(survives, n, alternative) if state.explain else ""
        if not n:
            return Chunk(reason=reason) if reason else _NOTHING
        if (more := n - len(ids)) > 0:
            ids, survives = ids + ids[-1:] * more, survives + [0.0] * more
        confidence = np.array(survives[:n], dtype=np.float32)
        return Chunk(np.array(ids[:n], dtype=np.int32), confidence, retrieved=True, reason=reason)

    def pays(self, model_round: tuple[float, float]) -> bool:
        """Return whether `model_round`, tokens and seconds for them, is better than a decode without drafts."""
        return self._length.pays(model_round)

    def useful_length(self, survives: Sequence[float]) -> int:
        """Return how many tokens of another draft pay, if the first i + 1 are accepted with probability
        `survives[i]`."""
        return self._length.choose_additional(0, survives)

    def floors(self, seconds: float = 0.0) -> list[float]:
        """See `Suggestions.floors`: the chance to survive is meant."""
        return self._length.floors(seconds=seconds)

    def extended(self, chunk: Chunk, gamma: int, alive: float) -> Chunk:
        """Return `chunk`, another drafter's draft after the prefix of the last `propose`, extended by copied tokens up
        to `gamma` in all; unchanged if nothing pays. The chunk is accepted whole with probability `alive`."""
        n = len(chunk)
        if not self._looked or alive < self._hopeless or self._is_eog(int(chunk.ids[-1])):
            return chunk
        ids, survives, self._candidates = self._retrieve(gamma - n, chunk.ids.tolist(), alive)
        self._first_place = n
        more = self._length.choose_additional(n, survives)
        if not more:
            return chunk
        confidence = np.array(survives[:more], dtype=np.float32)
        return replace(
            chunk,
            ids=np.concatenate((chunk.ids, np.array(ids[:more], dtype=np.int32))),
            confidence=np.concatenate((chunk.confidence, confidence)),
            margin=np.concatenate((chunk.margin, confidence)),
            importance=NO_FLOATS,
            exit_layers=None if chunk.exit_layers is None else chunk.exit_layers + (None,) * more,
            logits=None if chunk.logits is None else chunk.logits + (NO_FLOATS,) * more,
            tail=more,
        )

    def _extend_sources(self, prefix: Ids) -> None:
        """Extend the sources by the reply's new tokens, behind the prompt."""
        if self._prompt is not None:
            prompt, self._known = self._prompt.tolist(), len(self._prompt)
            self._prompt = None
            for source in self._sources:
                source.begin(prompt)
        if len(prefix) > self._known:
            new = prefix[self._known :].tolist()
            for source in self._sources:
                source.extend(new)
            self._known = len(prefix)

    @property
    def needs_verdict(self) -> bool:
        """See `Drafter.needs_verdict`."""
        return True

    @property
    def wants_expected(self) -> bool:
        """See `Suggestions.wants_expected`."""
        return self._calibration is not None

    def expect(self, expected: Expected) -> None:
        """See `Suggestions.expect`."""
        if self._calibration is not None:
            self._calibration.expect(expected)

    def suggest(self, state: GenerationState, drafted: Sequence[int], floors: Sequence[float]) -> list[int]:
        """See `Suggestions.suggest`: nothing where no lookup was due in this round."""
        if not self._looked:
            return []
        self._extend_sources(state.committed)
        length, ids, survives = self._found
        if drafted or length != len(state.ids):
            on_trial = state.ids[len(state.committed) :].tolist()
            ids, survives, _ = self._retrieve(len(floors), [*on_trial, *drafted], floors=floors)
        pays = [chance >= floor for chance, floor in zip(survives, floors, strict=False)]
        return ids[: pays.index(False) if False in pays else len(pays)]

    def _retrieve(
        self, most: int, drafted: Sequence[int] = (), alive: float = 1.0, floors: Sequence[float] | None = None
    ) -> tuple[list[int], list[float], Candidates]:
        """Return up to `most` tokens after the reply and `drafted` (accepted with probability `alive`), for each the
        probability that it and all before it are accepted, and all candidates for their places and the next one.

        Tokens that cannot pay are skipped, except for the first; with `floors`, the required probability at each place,
        the first too.
        """
        cursors = [
            (1 << place, cursor)
            for place, source in enumerate(self._sources)
            if (cursor := source.cursor()) is not NO_CURSOR
        ]
        for token in drafted:
            for _, cursor in cursors:
                cursor.advance(token)
        ids: list[int] = []
        survives: list[float] = []
        offered: Candidates = []
        places = self._length.places(len(drafted)) if floors is None else len(floors)
        for at in range(min(most, places)):
            options = self._offers(cursors)
            if not options:
                break
            offered.append(options)
            token, chance, _ = options[0]
            alive *= chance
            if alive < self._hopeless:
                break
            if floors is not None:
                if alive < floors[at]:
                    break
            elif ids and alive < self._length.floor(len(drafted) + at):
                break
            ids.append(token)
            survives.append(alive)
            if self._is_eog(token):
                break
            for _, cursor in cursors:
                cursor.advance(token)
        return ids, survives, offered

    def _offers(self, cursors: Sequence[tuple[int, Cursor]]) -> list[Candidate]:
        """Return the tokens that are offered, the likeliest first. Each cursor comes with its source's bit."""
        offers: dict[int, tuple[int, int, float]] = {}
        offering = 0
        for bit, cursor in cursors:
            token, matched, share = cursor.offer()
            if token < 0:
                continue
            offering |= bit
            known = offers.get(token)
            if known is None:
                offers[token] = bit, matched, share
            else:
                agree, longest, largest_share = known
                offers[token] = (
                    agree | bit,
                    max(longest, matched),
                    max(largest_share, share),
                )
        found: list[Candidate] = []
        for token, (agree, matched, share) in offers.items():
            kind = evidence(agree, offering ^ agree, matched, share, self._inside(token))
            found.append((token, self._chances.chance(kind), kind))
        if len(found) > 1:
            found.sort(key=_chance, reverse=True)
        return found

    def observe(self, state: GenerationState, turn: Round, *, shared: bool = False) -> None:  # noqa: ARG002
        """See `Drafter.observe`. `shared`: another drafter has used some of the round's time, even if its draft was
        dropped."""
        verdict = turn.verdict
        if verdict is None:
            return
        first, self._first = self._first, False
        done = not (self._looked or shared or first or self._refused)
        if done and turn.chunk is _NOTHING and len(verdict.tokens) == 1:  # as most rounds where nothing is copied
            self._wrote_plainly(1, turn.seconds)
            return
        began, duty = perf_counter(), self._duty
        self._learn(turn, verdict, first=first, shared=shared)
        if duty is not None:
            self._account(duty, turn, verdict, shared=shared and not first)
            if self._looked:
                duty.looked(self._looking + perf_counter() - began)

    def _account(self, duty: DutyCycle, turn: Round, verdict: Verdict, *, shared: bool) -> None:
        """Account for what a round has cost, and saved; `shared` as for `observe`."""
        n, written = len(turn.chunk), verdict.accepted + len(verdict.tokens)
        duty.wrote(written, self._length.loss(n, verdict.accepted) if n and turn.chunk.retrieved else 0.0)
        if shared:
            duty.wrote_with_model(written, turn.seconds)
        if self._refused:
            self._follow_refused(turn.chunk, verdict)

    def _follow_refused(self, chunk: Chunk, verdict: Verdict) -> None:
        """Compare what was written with the draft that was not allowed, and account for it once it is known that it
        would have paid, or how much of it would have been accepted."""
        for token in (*chunk.ids[: verdict.accepted].tolist(), *verdict.tokens.tolist()):
            right = token == self._refused[self._right]
            self._right += right
            loss = self._length.loss(len(self._refused), self._right)
            if not right or loss < 0.0 or self._right == len(self._refused):
                if self._duty is not None:
                    self._duty.refused(loss)
                self._refused = []
                return

    def _learn(self, turn: Round, verdict: Verdict, *, first: bool, shared: bool) -> None:
        """Learn from a round, the reply's `first` or a later one; `shared` as for `observe`."""
        chunk, accepted = turn.chunk, verdict.accepted
        n = len(chunk)
        if not first:  # the first round's time includes the prompt's
            drafts = None if shared or (n and not chunk.retrieved) else n
            self._length.learn(drafts, accepted + len(verdict.tokens), turn.seconds)
        if chunk.retrieved or not n:
            self._chances.record_draft(float(chunk.confidence.sum()) / self._chances.trust if n else 0.0, accepted)
        if self._candidates:
            self._learn_offers(chunk, verdict)
        if self._reuse is not None and chunk.retrieved:
            self._reuse.rejected(chunk.ids.tolist(), accepted, verdict.plausible)

    def _learn_offers(self, chunk: Chunk, verdict: Verdict) -> None:
        """Learn from every offer for a place, drafted or not: that costs nothing, and avoids bias."""
        accepted = verdict.accepted
        copied = 0 if chunk.retrieved else len(chunk) - chunk.tail  # the place from which on tokens were copied
        truth = [*chunk.ids[:accepted].tolist(), *verdict.tokens[:1].tolist()]
        for at, (answer, offered) in enumerate(
            zip(truth[self._first_place :], self._candidates, strict=False), self._first_place
        ):
            for token, _, kind in offered:
                self._chances.learn(kind, token == answer)
                if token == answer and copied <= at < accepted:
                    agree = agrees(kind)
                    for bit, name in enumerate(self.copied):
                        self.copied[name] += agree >> bit & 1

    def _wrote_plainly(self, rounds: int, seconds: float) -> None:
        """Count rounds without a lookup or a draft, each of one token, and learn from them once they are enough."""
        self._plain_rounds += rounds
        self._plain_seconds += seconds
        if self._plain_rounds >= self._together:
            self._learn_plain()
            self._together = min(2 * self._together, _MOST_TOGETHER)

    def _learn_plain(self) -> None:
        """Learn from the rounds since the last one with a lookup."""
        if self._plain_rounds:
            self._length.learn_plain(self._plain_rounds, self._plain_seconds)
            self._chances.record_nothing(self._plain_rounds)
            if self._duty is not None:
                self._duty.wrote(self._plain_rounds, 0.0)
            self._plain_rounds, self._plain_seconds = 0, 0.0

    def end(self) -> None:
        """See `Drafter.end`."""
        self._learn_plain()

    @property
    def cost(self) -> TryingCost | None:
        """Return what trying has cost and saved in this reply; None where it is not accounted for."""
        return None if self._duty is None else self._duty.cost


_chance = itemgetter(1)
_NOTHING = Chunk()
_NO_CANDIDATES: Candidates = []
_MOST_TOGETHER = 32  # rounds; the first ones of a reply show soon whether the cost curve is wrong
