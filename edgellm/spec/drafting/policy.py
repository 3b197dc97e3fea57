"""The draft policy: how much to draft in a round, and from which source.

A bandit with a cost model. Its arms are a plain round, a copy of n tokens, and a draft model's draft. A copy is judged
by the chance of each token and by the cost curve, a draft model by the mean tokens and seconds of its rounds. The arm
with the highest gain is used: expected tokens, less its seconds at the recent price of a second (Dinkelbach 1967). A
source without an expected gain is tried within an allowance, which grows with the time and with the savings of right
drafts; so where nothing is right, replies take as long as without drafts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from edgellm.spec.drafting.acceptance import EvidenceAcceptance
from edgellm.spec.drafting.cost_curve import MAX_DRAFT, CostCurve, DecodeCost
from edgellm.spec.drafting.model_arm import EXPLORATION, LEAST_WEIGHT, Arm, ModelArm
from edgellm.spec.types import Round, TryingCost


@dataclass(frozen=True, slots=True)
class Tuning:
    """The constants of choosing. "Decodes" are decodes of one row."""

    memory: float = 0.98  # weight of each round in the price of a token after the next one: about fifty rounds
    least_gain: float = 0.02  # tokens to gain: no curve is measured more exactly than that

    reply_tokens: float = 40.0  # expected tokens of a reply before the first reply has ended

    first_credit: float = 0.8  # decodes that copies may cost before any was right, about four short drafts; saved again
    least_credit: float = 8.0
    """Least decodes for copies after a right one, as right copies come in clusters; and before any under a doubtful
    curve, where longer decodes have to be tried first."""
    most_credit: float = 16.0  # most decodes saved by right copies that others may cost: about one long wrong draft
    debt: float = 0.3  # overdraft for a lookup where the latest tokens have stood in the text before
    free_draft: float = 0.5  # decodes that a copy may always cost if they are left: two or three tokens
    most_loss: float = 2.0  # most decodes that count of a loss: its estimate may be wrong
    known_tokens: int = 3  # repeated tokens in a row from which on a lookup is likely to find the next token
    lookup: float = 5e-5  # seconds that a lookup takes, until some were timed
    interrupted: float = 2.0  # lookups longer than this times the usual were interrupted, and count as this


TUNING = Tuning()


class Allowance:
    """The exploration budget of one source, in decodes of one row: a share of the time, up to `full`, and the savings
    of right drafts."""

    def __init__(self, full: float, first: float = 0.0) -> None:
        self._full, self.left = full, first

    def earn(self, decodes: float) -> None:
        """Add the share of this time."""
        if self.left < self._full:
            self.left = min(self._full, self.left + EXPLORATION * decodes)

    def spend(self, decodes: float, debt: float = 0.0) -> None:
        """Spend `decodes`, but never below `-debt`: a disturbance must not end exploration."""
        self.left = max(-debt, self.left - min(decodes, TUNING.most_loss))

    def credit(self, decodes: float) -> None:
        """Add the decodes that a draft has saved, or would have."""
        self.left = max(TUNING.least_credit, min(TUNING.most_credit, self.left + decodes))


@dataclass(frozen=True, slots=True)
class Bid:
    """The draft of a round: the first `copies` of the offered tokens, or up to `asks` tokens of the draft model.
    `refused` tokens would be copied if the allowance covered them."""

    copies: int = 0
    asks: int = 0
    refused: int = 0


class DraftPolicy:
    """The decisions on drafts, in one reply after another, by what earlier rounds taught."""

    def __init__(self, curve: CostCurve, copies: EvidenceAcceptance | None = None) -> None:
        """Decide by `curve`; `copies` has the chances of copied tokens."""
        self.copies = copies or EvidenceAcceptance()
        self._models: dict[str, ModelArm] = {}
        self._others = Arm()  # rounds without a draft model
        self._lookup = TUNING.lookup  # mean seconds
        self._reply_tokens = TUNING.reply_tokens  # mean tokens of a reply
        self.use_curve(curve)
        self.begin(0)

    def use_curve(self, curve: CostCurve) -> None:
        """Decide by another curve from now on."""
        self.cost = DecodeCost(curve)
        first = TUNING.least_credit if curve.doubtful else TUNING.first_credit
        self._allowance = Allowance(TUNING.first_credit, first)  # budget of copies
        self._tokens, self._seconds = 1.0, self.cost.single  # sums over recent rounds, decaying

    def begin(self, prompt: int, model: str = "", *, linked: bool = False) -> None:
        """Begin a reply to `prompt` tokens. `model` names the draft model, "" is none. `linked`: the verifier is on
        another device, which reads the prompt while the draft model does."""
        self.cost.begin(prompt)
        self._model = self._models.setdefault(model, ModelArm()) if model else None
        self._linked, self._written = linked, 0
        self._asks_next = False  # True if only a copy, or the unread prompt, kept the draft model from drafting
        self._spent: dict[str, float] = defaultdict(float)  # decodes in this reply, by the fields of `TryingCost`
        if self._model is not None:
            self._model.begin(prompt)

    def end(self) -> None:
        """End the reply."""
        if self._model is not None:
            self._model.end_stretch()
        self._reply_tokens += LEAST_WEIGHT * (self._written - self._reply_tokens)

    @property
    def price(self) -> float:
        """Return the tokens that a second is worth: the recent tokens per second, at least those of plain rounds."""
        return max(self._tokens / self._seconds, 1.0 / self.cost.single)

    def looks(self, known: int) -> bool:
        """Return whether to look for copies, where the latest `known` tokens have occurred in this order before."""
        debt = TUNING.debt if known >= TUNING.known_tokens else 0.0
        return self._lookup / self.cost.single <= self._allowance.left + debt

    def bid(self, survives: Sequence[float], room: int) -> Bid:
        """Return the draft, at most `room` tokens; `survives[i]` is the chance that the first i + 1 offered copies are
        all accepted."""
        model = self._model if self._model is not None and self._model.uses_model else None
        tries = model is not None and model.tries()
        left = max(0.0, self._reply_tokens - self._written)
        usable = model is not None and (tries or model.repays(left, self._others.pace))
        other = model.rounds if model is not None and usable and not tries else None
        copies, wanted = self._copies(survives[:room], other)
        plain = Bid(copies, 0, wanted if copies < wanted else 0)
        self._asks_next = False
        if model is None or not usable or not (tries or self._gains(model.rounds)) or (copies and not tries):
            return plain
        if not self._written and (copies or (not self._linked and model.delays())):
            self._asks_next = True
            return plain
        return Bid(0, min(room, model.most))

    def _copies(self, survives: Sequence[float], other: Arm | None) -> tuple[int, int]:
        """Return how many offered tokens to copy, and how many if the allowance covered them. A copy has to gain more
        than a plain round, and than `other`."""
        cost, price, left = self.cost, self.price, self._allowance.left
        best, wanted, expected = 0, 0, 1.0
        gain = 1.0 - price * (cost.single + cost.change(0))
        if other is not None:
            gain = max(gain, other.tokens - price * other.seconds)
        highest = gain = gain + TUNING.least_gain
        most = cost.single * (1.0 + max(0.5 * left, min(TUNING.free_draft, left)))
        for n, chance in enumerate(survives[:MAX_DRAFT], 1):
            expected += chance
            seconds, change = cost.seconds(n, expected), cost.change(n)
            value = expected - price * (seconds + change)
            if value > highest:
                wanted, highest = n, value
            if value > gain and seconds + 2.0 * change <= most:
                best, gain = n, value
        longest = min(len(survives), MAX_DRAFT)
        if best < longest and cost.is_untried(longest):
            taken = (cost.seconds(longest, expected) - cost.seconds(best, 1.0)) / cost.single
            if min(taken, TUNING.most_loss) <= left:
                return longest, longest
        return best, wanted

    def _gains(self, rounds: Arm) -> bool:
        """Return whether `rounds` gain more than plain rounds, or are unknown."""
        price, single = self.price, self.cost.single
        return not rounds.rounds or rounds.tokens - price * rounds.seconds > 1.0 - price * single

    def floors(self) -> list[float]:
        """Return the break-even chance for each place of the draft model's draft."""
        seconds = 0.0 if self._model is None else self._model.drafts.pace
        return [self.price * (slope + seconds) for slope in self.cost.slopes]

    def floor(self, rows: int) -> float:
        """Return the break-even chance of a copy behind `rows` drafted tokens."""
        return self.price * self.cost.slopes[rows]

    def useful(self, survives: Sequence[float], rows: int = 0) -> int:
        """Return how many further tokens pay behind `rows` verified ones; `survives` are their chances."""
        best, gain, expected, before = 0, 0.0, 0.0, self.cost.seconds(rows, 0.0)
        for n, chance in enumerate(survives[: MAX_DRAFT - rows], 1):
            expected += chance
            value = expected - self.price * (self.cost.seconds(rows + n, expected) - before)
            if value > gain:
                best, gain = n, value
        return best

    def survives(self, confidence: Sequence[float]) -> list[float]:
        """Return the chances to survive of the draft model's tokens, by their confidence."""
        return [] if self._model is None else self._model.acceptance.survives(confidence)

    def looked(self, seconds: float) -> None:
        """Account for a lookup, and for learning from it."""
        seconds = min(seconds, TUNING.interrupted * self._lookup)
        self._lookup += LEAST_WEIGHT * (seconds - self._lookup)
        decodes = seconds / self.cost.single
        self._allowance.spend(decodes, TUNING.debt)
        self._spent["lookups"] += decodes

    def drafted(self, tokens: int, seconds: float) -> None:
        """Record that the draft model drafted `tokens` in this round, which took `seconds`."""
        if self._model is not None:
            self._model.drafted(tokens, seconds, first=not self._written)

    def reads_ahead(self) -> bool:
        """Return whether the draft model is to read the prompt now, while the verifier does; asked once a round."""
        asks, self._asks_next = self._asks_next, False
        return asks

    def read_prompt(self, seconds: float) -> None:
        """Record that the draft model has read the prompt while the verifier did."""
        if self._model is not None:
            self._model.drafted(1, seconds, first=not self._written, while_waiting=True)

    def observe(self, turn: Round) -> None:
        """Learn from a round with a verdict."""
        chunk, verdict, model = turn.chunk, turn.verdict, self._model
        if verdict is None:
            return
        tokens, copied = verdict.accepted + len(verdict.tokens), len(chunk) if chunk.retrieved else 0
        first, asked = not self._written, model is not None and model.asked
        self._written += tokens
        if copied or not len(chunk):
            expected = float(chunk.confidence.sum()) / self.copies.trust if copied else 0.0
            self.copies.record_draft(expected, verdict.accepted)
        if copied:
            self.settle(loss := self.cost.loss(copied, verdict.accepted))
            self._spend("copies", loss)
        self._allowance.earn(tokens)
        if not first:  # The first round's time includes the prompt's.
            self._tokens = TUNING.memory * self._tokens + tokens
            self._seconds = TUNING.memory * self._seconds + turn.seconds
            self.cost.observe(None if asked and self._linked else len(chunk), tokens, turn.waiting)
            if asked:
                self._spend("model", turn.seconds / self.cost.single - tokens)
            else:
                self._others.add(tokens, turn.seconds)
        if model is not None:
            model.observe(chunk, verdict.accepted, tokens, turn.seconds, first=first)

    def settle(self, loss: float) -> None:
        """Account for a copy's `loss` in decodes, negative for a saving; also that of a refused copy."""
        if loss > 0.0:
            self._allowance.spend(loss)
        else:
            self._allowance.credit(-loss)

    def _spend(self, name: str, loss: float) -> None:
        """Note a loss in decodes, negative for a saving."""
        self._spent[name if loss > 0.0 else "saved"] += abs(loss)

    def explain(self, survives: Sequence[float], bid: Bid, *, looked: bool) -> str:
        """Return the reason for a bid."""
        if bid.asks:
            tried = self._model is not None and self._model.trials
            return "the draft model gains most" if tried else "the draft model is tried"
        if bid.copies:
            expected = 1.0 + sum(survives[: bid.copies])
            cost = self.cost.seconds(bid.copies, expected) / self.cost.single
            return f"{bid.copies} drafted: {expected:.1f} tokens expected in the time of {cost:.1f}"
        paused = "" if self._model is None or self._model.uses_model else "; the draft model is paused: it did not pay"
        if not looked:
            return f"no lookup: earlier ones have not paid{paused}"
        if not survives:
            return f"no draft is retrieved{paused}"
        if bid.refused:
            return f"{bid.refused} tokens might be copied, but wrong copies have used up what may be spent{paused}"
        return f"a draft has a {survives[0]:.0%} chance, and {self._second}{paused}"

    def slow_model(self, name: str) -> str:
        """Return how much slower replies are with this draft model, as a sentence; "" where that is not known."""
        arm = self._models.get(name)
        if arm is None or not arm.stretches.second_loses:
            return ""
        without, with_model = (each.pace * 1e3 for each in arm.stretches.arms)
        return f"A token takes {with_model:.1f} ms with the {name} and {without:.1f} ms without it"

    def account(self) -> TryingCost:
        """Return the cost and savings of exploration in this reply, and the present choice."""
        return TryingCost(**self._spent, reason=self.reason)

    @property
    def _second(self) -> str:
        return (
            f"a second row costs {(self.cost.seconds(1, 1.0) - self.cost.single) / self.cost.single:.0%} of the first"
        )

    @property
    def reason(self) -> str:
        """Return the present choice and its reason, in one sentence."""
        found = f"{self._second}; {self.copies.trust:.0%} of the expected copies were right"
        if self._model is None:
            return found
        without, with_model = (arm.pace / self.cost.single for arm in self._model.stretches.arms)
        if not (without and with_model):
            return f"{found}; the draft model is being tried"
        used = "used" if self._model.uses_model else "paused"
        return f"{found}; the draft model is {used}: {with_model:.2f} decodes a token, {without:.2f} without it"
