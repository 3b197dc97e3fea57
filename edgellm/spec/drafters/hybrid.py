"""Drafting by the draft policy: copies, or the draft model's tokens and copies behind them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.ngram.retriever import NO_OFFER, Retriever
from edgellm.spec.protocols import Drafter
from edgellm.spec.state import GenerationState
from edgellm.spec.types import Chunk, Round, Verdict

_NOTHING = Chunk()
_REST_STEP, _MOST_REST = 2, 5
"""For every two rounds in a row without a lookup, one more round is skipped, up to five: a skipped round costs next to
nothing even beside a decode of a tiny model."""


class HybridDrafter(Drafter):
    """A drafter of copies or a draft model's tokens, whichever the policy expects to gain more."""

    def __init__(
        self, policy: DraftPolicy, copies: Retriever, model: Drafter | None = None, gamma: int = 0, *,
        name: str = "model", linked: bool = False, crowded: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Let the `model`, known to the policy by its `name`, draft at most `gamma` tokens. `linked`: the verifier is
        on another device, which reads the prompt while the model does. Nothing is drafted, and nothing learnt, while
        the verifier is `crowded`."""
        self._policy, self._copies, self._model, self._gamma = policy, copies, model, gamma
        self._name, self._linked, self._crowded = name if model is not None else "", linked, crowded
        self._waits = False  # True: the verifier is crowded
        self.needs_verdict = model is None or model.needs_verdict
        self._looking = 0.0  # seconds of this round's lookup
        self._refused: list[int] = []  # tokens of a copy that the allowance did not cover
        self._right = 0  # refused tokens that were written
        self._unknown = 0  # rounds in a row without a lookup
        self._rest = 0  # next rounds to skip

    def begin(self, state: GenerationState) -> None:
        self._policy.begin(state.prompt_tokens, self._name, linked=self._linked)
        self._copies.begin(state.ids)
        self._refused, self._unknown, self._rest = [], 0, 0
        if self._model is not None:
            self._model.begin(state)

    def end(self) -> None:
        self._policy.end()
        if self._model is not None:
            self._model.end()

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        self._waits = self._crowded()
        if self._waits:
            return Chunk(reason="other replies are being written" if state.explain else "")
        if self._rest and not state.explain:
            self._rest -= 1
            return _NOTHING
        policy, copies, began = self._policy, self._copies, perf_counter()
        known = copies.follow(state.committed)
        looks = known >= 0 and policy.looks(known)
        offer = copies.offers(policy.floor, gamma) if looks else NO_OFFER
        bid = policy.bid(offer.survives, gamma)
        if bid.refused and not self._refused:
            self._refused, self._right = list(offer.ids[: bid.refused]), 0
        self._looking = perf_counter() - began if looks else 0.0
        reason = policy.explain(offer.survives, bid, looked=looks or known < 0) if state.explain else ""
        asks = bid.asks and self._model is not None
        self._unknown = 0 if asks or (looks and known > 0) else self._unknown + 1
        if asks and self._model is not None:
            return self._drafted(self._model, state, min(self._gamma, bid.asks), gamma, reason)
        self._rest = 0 if looks else min(self._unknown // _REST_STEP, _MOST_REST)
        return offer.chunk(bid.copies, reason) if bid.copies or reason else _NOTHING

    def _drafted(self, model: Drafter, state: GenerationState, asks: int, gamma: int, reason: str) -> Chunk:
        """Return the part of the model's draft that pays, continued by copies if all of it does."""
        policy, began = self._policy, perf_counter()
        chunk = model.propose(state, asks)
        policy.drafted(len(chunk), perf_counter() - began)
        survives = policy.survives(chunk.confidence.tolist())
        n = policy.useful(survives)
        chunk = chunk.part(0, n)
        if reason:
            chunk = replace(chunk, reason=reason)
        if n < len(survives) or not n or not self._copies:
            return chunk
        more = self._copies.offers(policy.floor, gamma - n, chunk.ids.tolist(), survives[-1])
        useful = policy.useful(more.survives, n)
        return chunk.then(more.chunk(useful)) if useful else chunk

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        """Draft ahead behind the draft model's tokens. Behind a copy, let the draft model only read the prompt while
        the verifier does, if it would have drafted otherwise."""
        if self._model is None:
            return
        if not chunk.retrieved:
            self._model.look_ahead(state, chunk, min(gamma, self._gamma), until)
        elif not until() and self._policy.reads_ahead():
            began = perf_counter()
            self._model.propose(state, 1)
            self._policy.read_prompt(perf_counter() - began)

    def unverified(self, state: GenerationState, chunk: Chunk, gamma: int) -> Chunk:
        """Return the draft model's tokens, drafted now if `chunk` is a copy."""
        if self._model is None or self.needs_verdict:
            return _NOTHING
        gamma = min(gamma, self._gamma)
        copied = chunk.retrieved or not len(chunk)
        own = self._model.propose(state, gamma) if copied else chunk.part(0, len(chunk) - chunk.tail)
        return self._model.unverified(state, own, gamma)

    def observe(self, state: GenerationState, turn: Round) -> None:
        if self._model is not None:
            self._model.observe(state, turn)
        if turn.verdict is None or self._waits:
            return
        began = perf_counter()
        self._copies.observe(turn.chunk, turn.verdict)
        self._policy.observe(turn)
        if self._refused:
            self._follow_refused(turn.chunk, turn.verdict)
        if self._looking:
            self._policy.looked(self._looking + perf_counter() - began)

    def _follow_refused(self, chunk: Chunk, verdict: Verdict) -> None:
        """Compare the written tokens with the refused copy, until the copy would have saved time, or is known to be
        wrong or wholly right; credit a saving."""
        for token in (*chunk.ids[: verdict.accepted].tolist(), *verdict.tokens.tolist()):
            right = token == self._refused[self._right]
            self._right += right
            loss = self._policy.cost.loss(len(self._refused), self._right)
            if not right or loss < 0.0 or self._right == len(self._refused):
                self._refused = []
                if loss < 0.0:
                    self._policy.settle(loss)
                return

    def close(self) -> None:
        if self._model is not None:
            self._model.close()
