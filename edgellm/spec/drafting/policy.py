"""The draft policy: how much to draft in a round, and from which source.

A bandit with a cost model. Its arms are a plain round, a copy of n tokens, and a draft model's draft. A copy is judged
by the chance of each token and by the cost curve, a draft model by the mean tokens and seconds of its rounds. The arm
with the highest gain is used: expected tokens, less its seconds at the recent price of a second (Dinkelbach 1967). A
draft model without an expected gain is tried within an allowance, which grows with the time and with the savings of
right drafts; it is not even tried where drafts as right as can be hoped would not repay their rows and its own time.
Copies need no allowance: each offer, drafted or not, teaches how often such offers are right.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from edgellm.spec.drafting.acceptance import DECAY, ConfidenceAcceptance, EvidenceAcceptance
from edgellm.spec.drafting.cost_curve import MAX_DRAFT, CostCurve, DecodeCost
from edgellm.spec.types import Chunk, Round, Verdict


@dataclass(frozen=True, slots=True)
class Tuning:
    """The constants of choosing. "Decodes" are decodes of one row."""

    exploration: float = 0.004  # share of the time for tries of a draft model
    latest: float = 0.1  # weight of the latest round in the mean of a way to write, once there are many
    left: float = 100.0  # expected tokens of a reply that are yet to come
    first_try: float = 0.2  # decodes that trying a draft model may cost at first, where drafts are cheap
    most_credit: float = 16.0  # most decodes saved by right drafts that wrong ones may cost
    hope: float = 0.8  # acceptance rate of a draft model that nothing is known of: pairs of one family reach that
    slower: float = 1.05  # a draft model that takes this many times longer, more than single rounds differ, is slow


TUNING = Tuning()


class Arm:
    """An arm of a bandit: the mean tokens and seconds of its latest rounds."""

    def __init__(self, tokens: float = 0.0, seconds: float = 0.0) -> None:
        """Expect so many tokens and seconds, until a round is added."""
        self.tokens, self.seconds, self.count = tokens, seconds, 0

    def add(self, tokens: float, seconds: float) -> None:
        """Add a round."""
        self.count += 1
        weight = max(TUNING.latest, 1.0 / self.count)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)

    @property
    def pace(self) -> float:
        """Return the seconds per token; 0 if nothing is known."""
        return self.seconds / self.tokens if self.tokens else 0.0


class ModelArm:
    """A draft model, by the means of rounds with it, and of its drafts."""

    rounds_tried = 4
    """Rounds with a draft model before it is judged: fewer are too few for its mean."""
    first_draft = 4  # most tokens of a draft before any was verified: trying a useless model is to cost little

    def __init__(self) -> None:
        self.rounds, self.drafts = Arm(), Arm()
        self.acceptance, self.allowance = ConfidenceAcceptance(), TUNING.first_try
        self.known_survival: Sequence[float] = ()
        self._seconds = self._read = 0.0  # expected seconds of a drafted token; those of reading in this round
        self.begin(0, 0)

    def expect(self, seconds: float, known_survival: Sequence[float]) -> None:
        """Expect so many seconds of a drafted token, and these shares of drafts whose first i + 1 tokens are
        accepted."""
        self._seconds, self.known_survival = seconds, known_survival

    def begin(self, prompt: int, hoped_length: int) -> None:
        """Begin a reply to `prompt` tokens, in which drafts of `hoped_length` tokens would pay, 0 if none, were they
        as right as can be hoped."""
        self.unread, self.hoped_length = prompt, hoped_length  # `unread`: tokens to read before it can draft
        self.has_read = self.asked = False

    @property
    def is_judged(self) -> bool:
        """Return whether enough rounds with the model are known."""
        return self.rounds.count >= self.rounds_tried

    @property
    def token_seconds(self) -> float:
        """Return the seconds of a drafted token."""
        return self.drafts.pace or self._seconds

    @property
    def most(self) -> int:
        """Return the longest draft: twice the mean tokens of a round."""
        return ceil(2.0 * self.rounds.tokens) if self.rounds.count else self.first_draft

    def settle(self, decodes: float) -> None:
        """Add `decodes` that were earned or saved to the allowance, or take away those that were lost: a disturbance
        does not end exploration."""
        self.allowance = max(0.0, min(TUNING.most_credit, self.allowance + decodes))

    def drafted(self, tokens: int, seconds: float) -> None:
        """Record a draft that took `seconds`, reading of the text included."""
        prompt, self.unread = self.unread, 0
        self.has_read, self.asked, self._read = True, True, 0.0
        if prompt:
            self._read = max(0.0, seconds - tokens * self.token_seconds)
        else:
            self.drafts.add(tokens, seconds)

    def observe(self, chunk: Chunk, accepted: int, tokens: int, seconds: float, *, first: bool) -> None:
        """Learn from a round of `seconds` that wrote `tokens`; the `first` one's time includes the prompt's."""
        if self.asked:
            self.acceptance.observe(chunk, accepted)
            if not first:
                self.rounds.add(tokens, seconds - self._read)
        self.asked = False


@dataclass(frozen=True, slots=True)
class Bid:
    """The draft of a round: the first `copies` of the offered tokens, or up to `asks` tokens of the draft model."""

    copies: int = 0
    asks: int = 0


class DraftPolicy:
    """The decisions on drafts, in one reply after another, by what earlier rounds taught."""

    def __init__(self, curve: CostCurve, copy_chances: EvidenceAcceptance | None = None) -> None:
        """Decide by `curve`, and by the `copy_chances`, those of copied tokens."""
        self.copy_chances = copy_chances or EvidenceAcceptance()
        self._models: dict[str, ModelArm] = {}
        self._plain, self._others = Arm(), Arm()  # rounds without a draft, and without a draft model
        self.use_curve(curve)
        self.begin(0)

    def use_curve(self, curve: CostCurve) -> None:
        """Decide by another curve from now on."""
        self.cost = DecodeCost(curve)
        self._tokens = self._decodes = 1.0  # tokens and duration of recent rounds, decaying sums

    def meet(self, model: str, seconds: float, acceptance: Sequence[float] = ()) -> None:
        """Learn beforehand of a draft model that a token takes it about so many `seconds`, and the shares of its drafts
        whose first i + 1 tokens are accepted, if known."""
        self._arm(model).expect(seconds, acceptance)

    def _arm(self, model: str) -> ModelArm:
        return self._models.setdefault(model, ModelArm())

    def begin(self, prompt: int, model: str = "", *, linked: bool = False) -> None:
        """Begin a reply to `prompt` tokens. `model` names the draft model, "" is none. `linked`: the verifier is in
        another process or on another device, and reads the prompt while the draft model does."""
        self._model = self._arm(model) if model else None
        self._linked, self._prompt, self._written = linked, prompt, 0
        self.cost.move(prompt)
        if self._model is not None:
            self._model.begin(prompt, self._hoped(self._model)[0])

    @property
    def price(self) -> float:
        """Return the recent tokens per second, at least those of plain rounds: a second is worth as much."""
        return max(self._tokens / self._decodes, 1.0) / self.cost.single

    def looks(self, known: int) -> bool:
        """Return whether to look for copies, where the latest `known` tokens have occurred in this order before: the
        more a further row costs, the more of them it takes for a copy that pays."""
        return known > round(self.cost.loss(1, 0))

    def bid(self, survives: Sequence[float], room: int) -> Bid:
        """Return the draft, at most `room` tokens; `survives[i]` is the chance that the first i + 1 offered copies are
        all accepted. Before a reply's first token the draft model is asked only if the verifier is across a link: then
        both read the prompt at the same time."""
        model = self._model if self._written or self._linked else None
        paying = None if model is None else self._paying()
        asks = 0 if model is None else self._tries(model) if paying is None else model.most
        other = self._hoped(model)[1] if asks and paying is None and model is not None else paying
        # A copy has to gain more than a plain round, and than `other`.
        least = 0.0 if other is None else self._gain(other) - 1.0 + self.price * self.cost.single
        copies = self.useful(survives[:room], least=max(0.0, least))
        return Bid(copies) if copies else Bid(0, min(room, asks))

    def _paying(self) -> Arm | None:
        """Return the rounds with the draft model; None if they are unknown or do not pay. The hoped-for round stands in
        until the model is judged, if its acceptance is known, or across a link: a round trip takes longer than a
        draft."""
        model = self._model
        if model is None:
            return None
        rounds = model.rounds
        if not model.is_judged:
            if not (self._linked or model.known_survival):
                return None
            rounds = self._hoped(model)[1]
        saved = TUNING.left * ((self._others.pace or self.cost.single) - rounds.pace)
        pays = saved > self._reading(model)
        return rounds if self._gain(rounds) > self._gain(self._without) and (model.has_read or pays) else None

    def _tries(self, model: ModelArm) -> int:
        """Return how many tokens of the draft model the allowance covers, were they all wrong; 0 where even right ones
        would not pay, and across a link until rounds without it are measured."""
        if self._linked and model.is_judged and self._plain.count < model.rounds_tried:
            return 0
        most = min(model.most, model.hoped_length)
        left = model.allowance - (0.0 if self._linked else self._reading(model) / self.cost.single)
        drafting = model.token_seconds / self.cost.single
        losses = ((n, self.cost.loss(n, 0) + n * drafting) for n in range(most, 0, -1))
        return next((n for n, loss in losses if loss <= left), 0)

    def _hoped(self, model: ModelArm) -> tuple[int, Arm]:
        """Return the best length of the model's drafts if they are as right as is known, or can be hoped, 0 if none
        pays; and the round of that length, at least of one token."""
        hopes = model.known_survival or [TUNING.hope**n for n in range(1, MAX_DRAFT)]
        n = self.useful(hopes, token_seconds=model.token_seconds)
        drafted = max(n, 1)
        seconds = self.cost.seconds(drafted) + drafted * model.token_seconds
        return n, Arm(1.0 + sum(hopes[:drafted]), seconds)

    def _reading(self, model: ModelArm) -> float:
        """Return the seconds that the model takes to read the text before it can draft: its rows are as cheap beside a
        single one as the verifier's."""
        row = self.cost.table[-1] / (MAX_DRAFT + 1) / self.cost.single
        return model.unread * row * model.token_seconds

    @property
    def _without(self) -> Arm:
        """Return a round without a draft: by the curve, but as measured across a link, where a verifier may write
        several tokens."""
        return self._plain if self._linked and self._plain.count else Arm(1.0, self.cost.single)

    def _gain(self, rounds: Arm) -> float:
        """Return the tokens that rounds gain, less their seconds at the present price: across a link at that of plain
        rounds, as round trips take time that passes do not."""
        price = 1.0 / self._plain.pace if self._linked and self._plain.tokens else self.price
        return rounds.tokens - price * rounds.seconds

    def floors(self) -> list[float]:
        """Return the break-even chance for each place of the draft model's draft."""
        seconds = 0.0 if self._model is None else self._model.token_seconds
        return [self.price * (slope + seconds) for slope in self.cost.slopes]

    def floor(self, rows: int) -> float:
        """Return the break-even chance of a copy behind `rows` drafted tokens."""
        return self.price * self.cost.slopes[rows]

    def useful(
        self, survives: Sequence[float], rows: int = 0, token_seconds: float = 0.0, least: float = 0.0
    ) -> int:  # fmt: skip
        """Return how many further ones pay behind `rows` drafted tokens, if they gain more than `least`; `survives`
        are their chances, and each is yet to be drafted in `token_seconds`."""
        best, gain, expected, before, price = 0, least, 0.0, self.cost.seconds(rows), self.price
        for n, chance in enumerate(survives[: MAX_DRAFT - rows], 1):
            expected += chance
            seconds = self.cost.seconds(rows + n) - before + n * token_seconds
            value = expected - price * seconds
            if value > gain:
                best, gain = n, value
        return best

    def survives(self, confidence: Sequence[float]) -> list[float]:
        """Return the chances to survive of the draft model's tokens, by their confidence."""
        return [] if self._model is None else self._model.acceptance.survives(confidence)

    def drafted(self, tokens: int, seconds: float) -> None:
        """Record that the draft model drafted `tokens` in this round, which took `seconds`."""
        if self._model is not None:
            self._model.drafted(tokens, seconds)

    def observe(self, turn: Round) -> None:
        """Learn from a round with a verdict."""
        chunk, verdict, model = turn.chunk, turn.verdict, self._model
        if verdict is None:
            return
        tokens, copied = verdict.accepted + len(verdict.tokens), len(chunk) if chunk.retrieved else 0
        first, asked = not self._written, model is not None and model.asked
        self._written += tokens
        if (position := self._prompt + self._written) >= self.cost.position + MAX_DRAFT:
            self.cost.move(position)
        if copied or not len(chunk):
            expected = float(chunk.confidence.sum()) / self.copy_chances.trust if copied else 0.0
            self.copy_chances.record_draft(expected, verdict.accepted)
        if model is not None:
            model.settle(TUNING.exploration * tokens)
        if not first:  # The first round's time includes the prompt's.
            self._tokens = DECAY * self._tokens + tokens
            self._decodes = DECAY * self._decodes + turn.seconds / self.cost.single
            if self._linked:
                self.cost.observe(len(chunk), verdict.accepted + 1, self._first_pass(chunk, verdict))
            else:
                self.cost.observe(len(chunk), tokens, turn.waiting)
            if asked and model is not None:
                model.settle(-(turn.seconds - tokens * self._without.pace) / self.cost.single)
            else:
                self._others.add(tokens, turn.seconds)
                if not len(chunk):
                    self._plain.add(tokens, turn.seconds)
        if model is not None:
            model.observe(chunk, verdict.accepted, tokens, turn.seconds, first=first)

    def _first_pass(self, chunk: Chunk, verdict: Verdict) -> float:
        """Return the seconds of the pass over a chunk at a verifier across a link, which may write on, token by token;
        0 if it does not say."""
        mean = verdict.seconds / verdict.passes
        return max(mean, verdict.seconds - (verdict.passes - 1) * self.cost.single) if len(chunk) else mean

    def explain(self, survives: Sequence[float], bid: Bid, *, looked: bool) -> str:
        """Return the reason for a bid."""
        if bid.asks:
            return "the draft model is tried" if self._paying() is None else "the draft model gains most"
        if bid.copies:
            expected = 1.0 + sum(survives[: bid.copies])
            cost = self.cost.seconds(bid.copies) / self.cost.single
            return f"{bid.copies} drafted: {expected:.1f} tokens expected in the time of {cost:.1f}"
        model = self._model_state() if self._paying() is None else ""
        if not looked:
            return f"no lookup: too little of the text has occurred before, where {self._second_row}{model}"
        if not survives:
            return f"no draft is retrieved{model}"
        return f"a draft has a {survives[0]:.0%} chance, and {self._second_row}{model}"

    def slow_model(self, name: str, *, judged: bool = False) -> str:
        """Return that replies are slower with this draft model, in a sentence; "" where that is not known. If `judged`,
        by rounds with it alone."""
        model = self._models.get(name)
        if model is None:
            return ""
        without = self._others.pace or self.cost.single
        if model.is_judged:
            if model.rounds.pace <= TUNING.slower * without:
                return ""
            taken, rest = f"takes {model.rounds.pace * 1e3:.1f}", ", and tried again now and then"
        else:
            best, hoped = self._hoped(model)
            if judged or best or not self.cost.given.filled:
                return ""  # An estimate is no reason to say so.
            taken, rest = f"would take at least {hoped.pace * 1e3:.1f}", ""
        here = f"A token {taken} ms with the {name} and {without * 1e3:.1f} ms without it"
        return f"{here}, so drafts are left out{rest}."

    @property
    def _second_row(self) -> str:
        return f"a second row costs {(self.cost.seconds(1) - self.cost.single) / self.cost.single:.0%} of the first"

    @property
    def reason(self) -> str:
        """Return the present choice and its reason, in one sentence."""
        copies = f"{self.copy_chances.trust:.0%} of the expected copies were right"
        return f"{self._second_row}; {copies}{self._model_state()}"

    def _model_state(self) -> str:
        """Return whether the draft model is used, and why, as the end of a sentence; "" without one."""
        if self._model is None:
            return ""
        if not self._model.is_judged:
            state = "being tried" if self._model.hoped_length else "left out: even right drafts would not pay"
            return f"; the draft model is {state}"
        used = "paused" if self._paying() is None else "used"
        with_model, without = (pace / self.cost.single for pace in (self._model.rounds.pace, self._others.pace))
        return f"; the draft model is {used}: {with_model:.2f} decodes a token, {without:.2f} without it"
