"""The records used in decoding. All are frozen; arrays in them are never written to after creation."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ids: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]

NO_IDS: Ids = np.empty(0, dtype=np.int32)
NO_FLOATS: Floats = np.empty(0, dtype=np.float32)


class Source(StrEnum):
    """The origin of a token, and whether the verifier vouches for it."""

    DRAFT = "draft"  # token of the draft model, unchecked
    ACCEPTED = "accepted"  # drafted, and the verifier agreed
    CORRECTED = "corrected"  # the verifier's own, in place of a rejected draft token
    BONUS = "bonus"  # the verifier's own, after a wholly accepted chunk
    RETRIEVED = "retrieved"  # copied from something already seen, and the verifier agreed
    PARALLEL = "parallel"  # drafted while waiting for a verdict, and kept
    VERIFIER = "verifier"  # token of the verifier alone


UNVERIFIED = frozenset({Source.DRAFT, Source.PARALLEL})


class Channel(StrEnum):
    """The part of a reply that a token belongs to."""

    THINKING = "thinking"
    ANSWER = "answer"


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The natural logarithms of probabilities at a place, of the distribution before temperature and truncation."""

    own: float  # the written token
    ids: Ids  # the likeliest tokens, likeliest first, (k,)
    logprobs: npt.NDArray[np.float64]  # theirs, (k,)


@dataclass(frozen=True, slots=True)
class Token:
    """One token of a reply. One that ends a thought and begins the answer comes twice, once for each `channel`."""

    id: int
    piece: bytes  # need not be whole UTF-8 characters; empty for markup around a thought
    source: Source
    confidence: float | None = None  # as in `Chunk`; None if it was not drafted
    importance: float | None = None  # as in `Chunk`; None if it was not measured
    exit_layer: int | None = None  # as in `Chunk`
    round: int = 0  # number of the draft-gate-verify round
    logprobs: Logprobs | None = None  # the verifier's, if requested
    channel: Channel = Channel.ANSWER


@dataclass(frozen=True, slots=True)
class Penalties:
    """Changes of the logits by the text before them."""

    repeat: float = 1.0  # divides positive logits of the last `REPEAT_WINDOW` tokens, and multiplies negative ones
    frequency: float = 0.0  # subtracted once for each time that the reply has the token
    presence: float = 0.0  # subtracted if the reply has the token
    bias: tuple[tuple[int, float], ...] = ()  # ascending ids, with additions to their logits
    start: int = 0  # first token of the reply


@dataclass(frozen=True, slots=True)
class Constraint:
    """A JSON `schema`, as text, that the reply must be valid by: from token `start` on, or behind the first tokens
    there that equal `after`, the end of a thought."""

    schema: str
    start: int
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """The rule for choosing the next token. Temperature 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 switch
    truncation off."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 0.95
    seed: int = 0
    min_p: float = 0.0
    penalties: Penalties | None = None
    constraint: Constraint | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature <= 0.0

    @property
    def ruled(self) -> bool:
        """Return whether penalties or a constraint change the logits by the text."""
        return self.penalties is not None or self.constraint is not None


GREEDY = Sampling()


@dataclass(frozen=True, slots=True)
class Distribution:
    """A truncated, renormalised next-token distribution: `probs[i]` > 0 is the probability of token `ids[i]`.

    Shapes (k,), ids ascending. Aligned by token id, never by index.
    """

    ids: Ids
    probs: Floats


class Drafted(NamedTuple):
    """The facts about a token that a draft model has drafted."""

    margin: float = 1.0  # the model's top-1 probability minus its top-2
    importance: float | None = None  # mean attention to it from itself and later drafted tokens, if measured
    exit_layer: int | None = None  # layer after which the model exited, from 0; None at full depth
    logits: Floats | None = None  # the model's (n_vocab,), if requested
    offered: int = -1  # the token that followed the longest match in the context; -1 without a match
    matched: int = 0  # length of the match
    copied: bool = False  # whether the offered token replaced the model's own


@dataclass(frozen=True, slots=True)
class Chunk:
    """Up to gamma drafted tokens that are verified together. Shapes (n,)."""

    ids: Ids = field(default_factory=lambda: NO_IDS)
    confidence: Floats = field(default_factory=lambda: NO_FLOATS)
    """The draft model's top-1 probability; for a copied token the chance that it and all before it are accepted."""
    retrieved: bool = False  # all tokens are copied
    drafted: tuple[Drafted, ...] = ()  # facts about each token; empty where none are known
    ahead: int = 0  # first tokens, which were drafted while waiting for a verdict
    tail: int = 0  # last tokens, which were copied after a model's draft
    reason: str = ""  # why it is as long, if explanations are requested

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def from_context(self) -> int:
        """Return the number of tokens taken from the context in place of the draft model's own."""
        return sum(one.copied for one in self.drafted)

    @property
    def importance(self) -> float | None:
        """Return the mean importance of the tokens of which it was measured; None without any."""
        measured = [one.importance for one in self.drafted if one.importance is not None]
        return sum(measured) / len(measured) if measured else None

    def part(self, start: int, end: int) -> "Chunk":
        """Return the tokens from `start` to `end`, with all that is known of them."""
        n = len(self)
        if start == 0 and end >= n:
            return self
        at = slice(start, end)
        return replace(
            self, ids=self.ids[at], confidence=self.confidence[at], drafted=self.drafted[at],
            tail=max(0, min(n, end) - max(start, n - self.tail)),
        )  # fmt: skip

    def then(self, other: "Chunk") -> "Chunk":
        """Return the concatenation with a chunk of the same drafter, or with copies, of which less is known."""
        if not len(self):
            return other
        n = len(other)
        return replace(
            self, ids=np.concatenate((self.ids, other.ids)),
            confidence=np.concatenate((self.confidence, other.confidence)),
            drafted=self.drafted and (*self.drafted, *(other.drafted or (Drafted(),) * n)),
            tail=n if other.retrieved else other.tail,
        )  # fmt: skip


NO_CHUNK = Chunk()


@dataclass(frozen=True, slots=True)
class Expected:
    """The likeliest next token behind each position from `start` on: `ids` and `probs`, shapes (n,)."""

    start: int
    ids: Ids
    probs: Floats


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's verdict on a chunk: the first `accepted` tokens are kept and followed by its own `tokens`.

    `tokens[0]` is the correction if `accepted < len(chunk)`, else the bonus token; further ones only if the verifier
    was asked to continue alone.
    """

    accepted: int
    tokens: Ids
    seconds: float = 0.0  # the verifier's computing time, without queueing
    bytes_up: int = 0  # across a link
    bytes_down: int = 0
    passes: int = 1
    cached: int = 0  # tokens before the draft that were not read for it, as the verifier had them
    plausible: tuple[bool, ...] | None = None
    """For each token of a retrieved chunk, whether it was accepted, not decoded, or had at least the probability
    `LIKELY` (CoordGen's equation 3). None for other chunks, and from a verifier that does not tell."""
    logprobs: tuple[Logprobs, ...] = ()  # those of the accepted tokens and of `tokens`, if requested


@dataclass(frozen=True, slots=True)
class Decision:
    """A gate's answer, with its reason (every automatic choice carries one)."""

    offload: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Round:
    """One round of draft, gate and verdict, with `perf_counter` times."""

    number: int  # from 0
    chunk: Chunk
    decision: Decision
    verdict: Verdict | None
    began: float
    asked: float  # verification request
    answered: float  # verdict

    @property
    def drafting(self) -> float:
        """Return the seconds of drafting and deciding."""
        return self.asked - self.began

    @property
    def waiting(self) -> float:
        """Return the seconds of waiting for the verdict."""
        return self.answered - self.asked

    @property
    def seconds(self) -> float:
        return self.answered - self.began


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`model` has read `done` of the `total` tokens of a prompt, the first `cached` of which it knew before."""

    model: str
    cached: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Notice:
    """An event to report to the user once: the verifier is lost or back, or a request was adjusted, such as by leaving
    out `turns_left_out`, too many for the context."""

    text: str
    turns_left_out: int = 0


@dataclass(frozen=True, slots=True)
class Explanation:
    """The reason for an automatic choice: in this round, or for the whole reply if `round` is None."""

    round: int | None
    text: str


Event: TypeAlias = Token | Notice | Explanation
"""An event of a running reply."""
