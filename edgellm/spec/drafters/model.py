"""A draft model as the drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from edgellm.engine import Context, Model
from edgellm.spec.drafting.policy import DraftPolicy
from edgellm.spec.ngram.retriever import NO_OFFER, Retriever
from edgellm.spec.ngram.sources import MIN_MATCH, Cursor
from edgellm.spec.params import mechanism
from edgellm.spec.protocols import Drafter, GenerationState
from edgellm.spec.sampling import Top2, distribution, draw, penalised, top2
from edgellm.spec.types import NO_CHUNK, Chunk, Drafted, Floats, Ids, Round, Sampling

if TYPE_CHECKING:
    from edgellm.spec.drafters.importance import AttentionMeter


class ChunkBuilder:
    """A chunk under way: chooses each token from its logits, and records the facts about it."""

    def __init__(
        self, state: GenerationState, gamma: int, *, text: Ids | None = None, sampling: Sampling | None = None,
        cursor: Cursor | None = None, floors: Sequence[float] = (),
    ) -> None:  # fmt: skip
        """Begin a chunk of up to `gamma` tokens after `text` (by default the reply so far), by `sampling` (by default
        the reply's, and its grammar).

        The chunk ends after a token of low confidence, as `state.rules` say, and where the product of the confidences
        falls below the entry of `floors` for that place. `cursor` offers the context's tokens.
        """
        rules = state.rules
        self._rules, self._gamma, self._floors = rules, gamma, floors
        self._sampling = state.sampling if sampling is None else sampling
        self._text = state.ids if text is None else text
        self._grammar = rules.grammar if sampling is None else None
        self._cursor = cursor
        self.ids: list[int] = []
        self._survival = 1.0
        self._confidence: list[float] = []
        self._drafted: list[Drafted] = []

    def add(self, logits: Floats, facts: Top2, exit_layer: int | None = None, *, keeps_logits: bool = False) -> int:
        """Add the next token, chosen from `logits` (n_vocab,), whose top two are `facts`, and return it."""
        sampling, grammar = self._sampling, self._grammar
        if sampling.penalties is not None:
            logits = penalised(logits, self._so_far(), sampling.penalties)
            facts = top2(logits)
        if grammar is not None and not grammar.follows(self._so_far(), np.array([facts.id], dtype=np.int32)):
            facts = top2(grammar.masked(logits, self._so_far()))
        token = facts.id
        if not (sampling.greedy or self._rules.greedy):
            found = distribution(logits, sampling)
            if grammar is not None:
                found = grammar.limited(found, logits, self._so_far())
            token = draw(found, sampling.seed, len(self._text) + len(self.ids))
        drafted = Drafted(facts.p1 - facts.p2, None, exit_layer, logits.copy() if keeps_logits else None)
        if self._cursor is not None:
            drafted = self._look_up(self._cursor, token, facts.p1, drafted)
            token = drafted.offered if drafted.copied else token
            self._cursor.advance(token)
        self.ids.append(token)
        self._confidence.append(facts.p1)
        self._survival *= facts.p1
        self._drafted.append(drafted)
        return token

    def _so_far(self) -> Ids:
        return np.concatenate((self._text, np.array(self.ids, dtype=np.int32)))

    def _look_up(self, cursor: Cursor, token: int, confidence: float, drafted: Drafted) -> Drafted:
        """Return `drafted` with what the context offers, and whether that replaces `token`: if the model is not
        confident."""
        offered, matched, _ = cursor.offer()
        differs = offered >= 0 and offered != token and matched >= MIN_MATCH
        copied = differs and confidence < self._rules.lookup_below and self._grammar is None
        return drafted._replace(offered=offered, matched=matched, copied=copied)

    def full(self) -> bool:
        at = len(self.ids)
        if at >= self._gamma or (self._confidence[-1] < self._rules.stop_below and not self._drafted[-1].copied):
            return True
        return at <= len(self._floors) and self._survival < self._floors[at - 1]

    def build(self, importance: Floats | None = None) -> Chunk:
        """Return the finished chunk."""
        if importance is not None:
            measured = zip(self._drafted, importance.tolist(), strict=True)
            self._drafted = [drafted._replace(importance=each) for drafted, each in measured]
        confidence = np.array(self._confidence, dtype=np.float32)
        return Chunk(np.array(self.ids, dtype=np.int32), confidence, drafted=tuple(self._drafted))


def within(ids: Ids, shared: int | None) -> Ids:
    """Return `ids` (n,) for a model that has only tokens below `shared`: all others become 0."""
    return ids if shared is None else np.where(ids < shared, ids, 0).astype(np.int32)


Step: TypeAlias = tuple[Floats, Top2, int | None]
"""A row of logits, its top two, and the layer after which the model was left; None at full depth."""


class ModelDrafter(Drafter):
    """A drafter with a model. The context is the drafter's own, and is closed with it. The reply is in sequence 0."""

    keeps_logits = False

    def __init__(self, model: Model, context: Context, layers: tuple[int, ...] = (), shared: int | None = None) -> None:
        """Take over `context`, which captures the attention of `layers`, the importance of drafted tokens. Only ids
        below `shared` are drafted, where the verifier's vocabulary has another length."""
        self._model, self._context, self._shared = model, context, shared
        self._meter: AttentionMeter | None = None
        if layers:
            self._meter = mechanism("importance").AttentionMeter(context.captured, layers)

    def begin(self, state: GenerationState) -> None:
        self._context.set_cancel(state.should_stop, state.prompt_progress(self._model.name))

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """Draft a chunk. Its last token is decoded only with a later text that contains it."""
        prefix, meter = within(state.ids, self._shared), self._meter
        chunk = ChunkBuilder(state, gamma, cursor=state.lookup(prefix), floors=state.rules.floors())
        self._pause_meter()
        row, facts, layer = self._first(state, prefix)
        if meter is not None:
            meter.start(len(prefix), gamma)
        while True:
            token = chunk.add(row, facts, layer, keeps_logits=self.keeps_logits)
            if chunk.full() or self._model.is_eog(token):
                break
            row, facts, layer = self._step(np.array([token], dtype=np.int32))
            if meter is not None:
                meter.record()
        return chunk.build(None if meter is None else meter.importance(len(chunk.ids)))

    def _first(self, state: GenerationState, prefix: Ids) -> Step:  # noqa: ARG002
        """Decode what is new in `prefix` (n,), and return the step behind it."""
        return self._step(prefix[self._sync(prefix) :])

    def _step(self, ids: Ids) -> Step:
        """Decode `ids`, and return the step behind them."""
        row = self._context.decode(ids)[-1, : self._shared]
        return row, top2(row), None

    def _sync(self, prefix: Ids) -> int:
        """Have the reply's sequence begin with as much of `prefix` as is known; return how many tokens that are."""
        return self._context.sync(prefix)

    def _pause_meter(self) -> None:
        if self._meter is not None:
            self._meter.pause()

    def end(self) -> None:
        self._context.set_cancel(None)

    def importance_by_layer(self, n: int) -> Floats | None:
        """Return the importance of the first `n` tokens of the last chunk, (layers, n); None if it is not measured."""
        return None if self._meter is None else self._meter.by_layer(n)

    def close(self) -> None:
        self._context.close()


class HybridDrafter(Drafter):
    """A drafter of copies or a draft model's tokens, whichever the policy expects to gain more."""

    def __init__(
        self, policy: DraftPolicy, retriever: Retriever, model: Drafter | None = None, gamma: int = 0, *,
        name: str = "model", linked: bool = False, crowded: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        """Let the `model`, known to the policy by its `name`, draft at most `gamma` tokens. `linked`: the verifier is
        in another process or on another device, and reads the prompt while the model does. Nothing is drafted, and
        nothing learnt, while the verifier is `crowded`."""
        self._policy, self._retriever, self._model, self._gamma = policy, retriever, model, gamma
        self._name, self._linked, self._crowded = name if model is not None else "", linked, crowded
        self._waits = False  # True: the verifier is crowded
        self.needs_verdict = model is None or model.needs_verdict

    def begin(self, state: GenerationState) -> None:
        self._policy.begin(state.prompt_tokens, self._name, linked=self._linked)
        self._retriever.begin(state.ids)
        if self._model is not None:
            self._model.begin(state)

    def end(self) -> None:
        if self._model is not None:
            self._model.end()

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        self._waits = self._crowded()
        if self._waits:
            return Chunk(reason="other replies are being written" if state.explain else "")
        policy, retriever = self._policy, self._retriever
        known = retriever.follow(state.ids)
        looks = known >= 0 and policy.looks(known)
        offer = retriever.offers(policy.floor, gamma) if looks else NO_OFFER
        bid = policy.bid(offer.survives, gamma)
        reason = policy.explain(offer.survives, bid, looked=looks or known < 0) if state.explain else ""
        if bid.asks and self._model is not None:
            return self._drafted(self._model, state, min(self._gamma, bid.asks), gamma, reason)
        return offer.chunk(bid.copies, reason) if bid.copies or reason else NO_CHUNK

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
        if n < len(survives) or not n or not self._retriever.has_sources:
            return chunk
        more = self._retriever.offers(policy.floor, gamma - n, chunk.ids.tolist(), survives[-1])
        useful = policy.useful(more.survives, n)
        return chunk.then(more.chunk(useful)) if useful else chunk

    def look_ahead(self, state: GenerationState, chunk: Chunk, gamma: int, until: Callable[[], bool]) -> None:
        if self._model is not None and not chunk.retrieved:
            self._model.look_ahead(state, chunk, min(gamma, self._gamma), until)

    def unverified(self, state: GenerationState, chunk: Chunk, gamma: int) -> Chunk:
        """Return the draft model's tokens, drafted now if `chunk` is a copy."""
        if self._model is None or self.needs_verdict:
            return NO_CHUNK
        gamma = min(gamma, self._gamma)
        model_drafted_nothing = chunk.retrieved or not len(chunk)
        own = self._model.propose(state, gamma) if model_drafted_nothing else chunk.part(0, len(chunk) - chunk.tail)
        return self._model.unverified(state, own, gamma)

    def observe(self, state: GenerationState, turn: Round) -> None:
        if self._model is not None:
            self._model.observe(state, turn)
        if turn.verdict is None or self._waits:
            return
        self._retriever.observe(turn.chunk, turn.verdict)
        self._policy.observe(turn)
