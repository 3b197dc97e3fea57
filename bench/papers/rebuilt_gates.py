"""Gates of other papers, rebuilt on a pair of this repository, each under a budget.

PipeSD (Han et al. 2026, arXiv 2605.13319) drafts until the product of the draft's confidences falls below R1, or the
confidence of one token below R2, and then has the draft verified. Here a draft that ends with the reply, and not by
one of the two, stays unverified: that is what a budget saves. The paper tunes R1 and R2 by Bayesian optimisation in 16
samples, for speed. Under a budget only their balance is free, so 16 balances are tried, for quality, and the budget
moves both thresholds. Its schedule of uploads changes times only (`pipesd.py`).

ConfSpec (Liu and He 2026, arXiv 2602.18447) drafts a step of a thought. The small model judges its own step, and the
large one is asked where that judgement is not confident. Models without instructions cannot judge a text, so their mean
log-confidence in the step's tokens stands for it. A step is a line, or eight tokens of a longer one: replies are short.
The paper's large model writes a rejected step anew. Here it corrects the first wrong token, and a new step begins.

R2R (Fu et al. 2025, arXiv 2505.21600) has a small network choose the tokens that the large model writes. It learns
along the large model's replies which tokens of the small one differ and matter: the large model continues behind the
small one's token, and a third model judges whether the text still says the same. Here a token matters if the text that
is continued so has a lower score than the large model's own. The network is the predictor of our gate, fitted to single
tokens from the signals of a profile, in place of hidden states and a hundred logits.

None of the three looks tokens up in the context. All are rebuilt from public descriptions: abstracts, R2R's page and
the README of its code, and for PipeSD a review and the notes of a reproduction; `docs/evidence/papers.md` names them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp

import numpy as np

from bench.papers.pipesd import Trigger
from edgellm.spec.drafters.parallel import truncated
from edgellm.spec.gates.fitting import fit_rejection
from edgellm.spec.gates.offload_policy import JUDGED, Predictor, Vector, signals, surprise
from edgellm.spec.gates.profiler import Run, observed
from edgellm.spec.gates.rules import BudgetController
from edgellm.spec.protocols import Drafter, Gate
from edgellm.spec.state import DraftRules, GenerationState, Suggestions
from edgellm.spec.types import NO_IDS, Chunk, Decision, Ids, Round, Verdict

STEP = 8
"""Tokens of a step at most."""
SAMPLES = 16
"""Balances of PipeSD's thresholds that are tried, as many as the paper tries pairs of them."""
BALANCES = tuple(np.linspace(0.5, 1.0, SAMPLES).tolist())
"""From the product alone to single tokens alone. Below a half a single token never ends a draft: the product, which
contains it, is below its threshold first."""
_SCALES = np.geomspace(1e-4, 40.0, 48)  # of the surprise that ends a draft


class Budget:
    """A budget for chunks of different lengths, kept over all replies by the controller of the pair's own gates, to
    which each token is a decision."""

    def __init__(self, share: float, *, of_passes: bool = False) -> None:
        """Allow a `share` of drafted tokens to be verified; `of_passes`: that many passes for each written token."""
        self._share, self._of_passes, self._controller = share, of_passes, BudgetController()

    def cost(self, tokens: int) -> int:
        """Return what it takes of the budget to verify a chunk of `tokens`, at least one."""
        return 1 if self._of_passes else tokens

    def target(self) -> float:
        """Return the share to spend now, in [0, 1]. Call it once for each chunk."""
        return self._controller.target_share(self._share)

    def record(self, turn: Round) -> None:
        """Count a finished round."""
        chunk, verdict = turn.chunk, turn.verdict
        tokens, spent = len(chunk), 0
        if verdict is not None and tokens:
            spent = self.cost(tokens)
            if self._of_passes:
                tokens = verdict.accepted + len(verdict.tokens)
        for at in range(tokens):
            self._controller.record(at < spent)


class BudgetedGate(Gate):
    """A gate that counts its rounds under a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget

    def observe(self, state: GenerationState, turn: Round) -> None:  # noqa: ARG002
        """See `Gate.observe`."""
        self._budget.record(turn)


class ChunkThreshold:
    """Turns scores of chunks (higher is better to verify) into decisions that spend a budget."""

    def __init__(self, profiled: Sequence[float] | Vector, tokens: Sequence[int], budget: Budget) -> None:
        """Start from the scores of `profiled` chunks (n,) and their `tokens` (n,), n at least 1."""
        scores, costs = np.asarray(profiled, dtype=np.float64), np.array([budget.cost(count) for count in tokens])
        order = np.argsort(scores)
        self._sorted = scores[order]
        self._above = np.append(costs[order][::-1].cumsum()[::-1], 0) / sum(tokens)  # spent from each one on
        self._budget = budget

    @property
    def budget(self) -> Budget:
        """Return the budget that is spent."""
        return self._budget

    def decide(self, score: float) -> Decision:
        """Return whether a chunk with this score is verified."""
        target = self._budget.target()
        above = float(self._above[self._sorted.searchsorted(score, "right")])
        offload = above < target
        return Decision(
            offload, f"score {score:.3g}: the profiled chunks above it take {above:.0%} of the tokens, of {target:.0%}"
        )


_ANY = sys.maxsize  # tokens of a draft, which ends with the reply
NEVER, AT_ONCE = Trigger(_ANY), Trigger(1)


def balanced(balance: float, scale: float) -> Trigger:
    """Return the trigger at a `balance` between the product alone (0.5) and single tokens alone (1). The larger the
    `scale`, the more surprise ends a draft."""
    return Trigger(_ANY, exp(-scale / (1.0 - balance)) if balance < 1.0 else 0.0, exp(-scale / balance))


def share_spent(replies: Sequence[Sequence[float]], trigger: Trigger, cost: Callable[[int], int]) -> float:
    """Return the share of a budget that replies with these confidences take, if all of their tokens are accepted;
    `cost` is that of a draft of so many tokens."""
    spent = 0
    for reply in replies:
        began, product = 0, 1.0
        for at, confidence in enumerate(reply, 1):
            product *= confidence
            if product < trigger.sequence or confidence < trigger.token:
                spent += cost(at - began)
                began, product = at, 1.0
    return spent / sum(map(len, replies))


class TriggerCurve:
    """The triggers at one balance by the share that they spend."""

    def __init__(self, replies: Sequence[Sequence[float]], balance: float, cost: Callable[[int], int]) -> None:
        """Estimate the shares on profiled `replies` of the draft model, from the confidences of their tokens; `cost` as
        for `share_spent`."""
        self._balance = balance
        shares = [share_spent(replies, balanced(balance, scale), cost) for scale in _SCALES.tolist()]
        self._shares = np.minimum.accumulate(shares)  # fewer drafts end, but these may be longer

    def at(self, share: float) -> Trigger:
        """Return the trigger that spends a share."""
        if not 0.0 < share < 1.0:
            return AT_ONCE if share > 0.0 else NEVER
        scale = exp(float(np.interp(share, self._shares[::-1], np.log(_SCALES)[::-1])))
        return balanced(self._balance, scale)


class _Floor(Suggestions):
    """Ends drafts whose product of confidences is below a floor, and suggests nothing."""

    def __init__(self, floor: float, tokens: int) -> None:
        self._floors = (floor,) * tokens

    def floors(self, seconds: float = 0.0) -> Sequence[float]:  # noqa: ARG002
        """See `Suggestions.floors`."""
        return self._floors


class PipeSDDrafter(Drafter):
    """Drafts until a trigger fires, or the turn ends."""

    def __init__(self, drafter: Drafter, curve: TriggerCurve, budget: Budget) -> None:
        """Draft by `drafter`. The trigger follows `budget` from draft to draft."""
        self._drafter, self._curve, self._budget = drafter, curve, budget
        self._trigger = NEVER

    @property
    def trigger(self) -> Trigger:
        """Return the trigger of the last draft."""
        return self._trigger

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """See `Drafter.propose`."""
        self._trigger = trigger = self._curve.at(self._budget.target())
        rules = DraftRules(stop_below=trigger.token, while_it_pays=True)
        floor = _Floor(trigger.sequence, gamma)
        return self._drafter.propose(
            GenerationState(state.ids, rules=rules, suggestions=floor), min(gamma, trigger.most)
        )


class PipeSDGate(BudgetedGate):
    """Has drafts verified that PipeSD's trigger ended."""

    def __init__(self, drafter: PipeSDDrafter, budget: Budget) -> None:
        super().__init__(budget)
        self._drafter = drafter

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        """See `Gate.decide`."""
        trigger = self._drafter.trigger
        fired = trigger.fires(chunk.confidence)
        return Decision(fired, f"thresholds {trigger.sequence:.3g} of the product, {trigger.token:.3g} of a token")


class StepDrafter(Drafter):
    """Drafts a step at a time: to the end of a line, or `STEP` tokens."""

    def __init__(self, drafter: Drafter, piece: Callable[[int], bytes]) -> None:
        """Draft by `drafter`; `piece` returns a token's bytes."""
        self._drafter, self._piece = drafter, piece

    def propose(self, state: GenerationState, gamma: int) -> Chunk:
        """See `Drafter.propose`."""
        chunk = self._drafter.propose(state, min(gamma, STEP))
        ends = (at for at, token in enumerate(chunk.ids.tolist(), 1) if b"\n" in self._piece(token))
        return truncated(chunk, next(ends, len(chunk)))


class StepGate(BudgetedGate):
    """Has the steps verified that the draft model doubts most (ConfSpec)."""

    def __init__(self, threshold: ChunkThreshold) -> None:
        super().__init__(threshold.budget)
        self._threshold = threshold

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        """See `Gate.decide`."""
        return self._threshold.decide(doubt(chunk))


def doubt(chunk: Chunk) -> float:
    """Return minus the mean log-confidence in a chunk's tokens."""
    return surprise(chunk) / len(chunk)


class RouterGate(BudgetedGate):
    """Routes single tokens by a predictor of those that differ (R2R). One gate serves one reply."""

    def __init__(self, predictor: Predictor, threshold: ChunkThreshold) -> None:
        """Share `threshold` with all replies: the budget holds over all of them."""
        super().__init__(threshold.budget)
        self._predictor, self._threshold = predictor, threshold
        self._so_far = 0.0

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:
        """See `Gate.decide`."""
        score = self._predictor.score(signals(chunk, state.written, so_far=self._so_far)[list(JUDGED)])
        self._so_far += surprise(chunk)
        return self._threshold.decide(score)


class WatchingGate(Gate):
    """Verifies nothing, and keeps what was drafted."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []

    def decide(self, state: GenerationState, chunk: Chunk) -> Decision:  # noqa: ARG002
        """See `Gate.decide`."""
        self.chunks.append(chunk)
        return Decision(False, "this gate only watches")


@dataclass(frozen=True, slots=True)
class Observations:
    """What the rebuilt gates are fitted on.

    `router` predicts which tokens differ, and `scores` (n,) are its predictions for tokens of replies that it has not
    seen. `replies` are the draft model's own: for each of its steps the confidences of the step's tokens.
    """

    router: Predictor
    scores: Vector
    replies: tuple[tuple[tuple[float, ...], ...], ...]

    @classmethod
    def of(cls, runs: Sequence[Run], replies: Sequence[Sequence[Chunk]]) -> Observations:
        """Fit the router on `runs` of single tokens along the verifier's replies, and keep the steps of `replies`."""
        fitted = fit_rejection(runs)
        kept = tuple(tuple(tuple(step.confidence.tolist()) for step in reply) for reply in replies)
        return cls(fitted.predictor, fitted.unseen, kept)

    @property
    def confidences(self) -> list[list[float]]:
        """Return the confidences of each reply's tokens."""
        return [[value for step in reply for value in step] for reply in self.replies]

    def routing(self, budget: Budget) -> ChunkThreshold:
        """Return the threshold of the router's scores at a budget."""
        return ChunkThreshold(self.scores, [1] * len(self.scores), budget)

    def escalation(self, budget: Budget) -> ChunkThreshold:
        """Return the threshold of the doubt in steps at a budget."""
        steps = [Chunk(confidence=np.array(step, dtype=np.float32)) for reply in self.replies for step in reply]
        lengths = [len(step.confidence) for step in steps]
        doubts = [surprise(step) / length for step, length in zip(steps, lengths, strict=True)]
        return ChunkThreshold(doubts, lengths, budget)


def token_run(
    drafter: Drafter, is_eog: Callable[[int], bool], prompt: Ids, reply: Ids, ended: bool,
    matters: Callable[[int, int], bool],
) -> Run:  # fmt: skip
    """Return what `drafter` would write at each place of the verifier's `reply` (n,) to `prompt` (m,), as chunks of one
    token; `ended`: the verifier ended its turn behind it.

    `matters` returns whether another token at a place makes the reply worse. Only those that do are rejected.
    """
    seen, so_far = [], 0.0
    for at in range(len(reply) + ended):
        chunk = drafter.propose(GenerationState(np.concatenate((prompt, reply[:at]))), 1)
        token = int(chunk.ids[0])
        same = is_eog(token) if at == len(reply) else token == int(reply[at])
        seen.append(observed(chunk, at, Verdict(int(same or not matters(at, token)), NO_IDS), so_far))
        so_far += surprise(chunk)
    return Run(tuple(seen), (), (), (), ())
