"""What is asked of a stock server, and what it answers: a row for each place of a chunk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from edgellm.spec.types import Ids, Sampling

Top: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens of a place with their log-probabilities, before temperature and truncation."""


class RowsUnusable(Exception):
    """Rows contradict themselves, the request or the vocabulary."""


class Tier(StrEnum):
    """How a server verifies a chunk, the best way first."""

    SCORE = "score"  # one pass over the draft, with the likeliest tokens of each place
    FAN_OUT = "fan-out"  # a prompt for each place in one request, of one token each
    CONTINUE = "continue"  # as many tokens as the chunk has and one more, compared with it


MEANING = {
    Tier.SCORE: "one pass scores the whole chunk",
    Tier.FAN_OUT: "one request has a prompt for each place of the chunk",
    Tier.CONTINUE: "the server writes the tokens itself, and the chunk is compared with them",
}


class Row(NamedTuple):
    """A place of a chunk: the `token` that the server takes there, and its `top` if it was asked for."""

    token: int
    top: Top | None = None


@dataclass(frozen=True, slots=True)
class Steering:
    """What a server does before it takes a token: add `bias` to the logits of those ids, and take one `among` these ids
    alone, if there are any."""

    bias: tuple[tuple[int, float], ...] = ()
    among: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A question: what comes after `prefix` (n,), and after each token of `draft` (m,) behind it.

    With `top`, rows include that many likeliest tokens. If nothing is drafted, up to `extra` further tokens may be
    answered. `repeats`: the server may have computed `prefix` to its last token already, so that it may have no row for
    the first place. Requests of one `session` extend each other otherwise. What a server has computed of a prefix is
    used for requests of the same `salt` alone, where the server can keep them apart. With `steering` nothing is
    drafted, and one token is asked for.
    """

    prefix: Ids
    draft: Ids
    sampling: Sampling
    top: int = 0
    extra: int = 0
    session: str = ""
    repeats: bool = False
    salt: str = ""
    steering: Steering | None = None

    @property
    def decisive(self) -> bool:
        """Return whether the likeliest tokens of rows suffice to draw as `sampling` says."""
        return self.steering is None and not self.sampling.greedy and 0 < self.sampling.top_k <= self.top

    @property
    def ruled(self) -> bool:
        """Return whether tokens are chosen from the likeliest ones of rows by a rule that the server does not know."""
        return self.steering is None and self.sampling.ruled

    @property
    def drawing(self) -> Sampling:
        """Return how a server is to draw that writes several tokens: the likeliest ones where they are chosen here."""
        return replace(self.sampling, temperature=0.0) if self.ruled else self.sampling

    @property
    def places(self) -> int:
        """Return the number of tokens that a server answers with which writes them itself."""
        return len(self.draft) + 1 + self.extra


@dataclass(frozen=True, slots=True)
class RowReply:
    """The rows of a request. By `Tier.CONTINUE` each row follows the rows before it, else the draft before it.

    `cached` tokens of the prefix were not computed again, None if the server does not say; `seconds` is the computing
    time, None likewise. `bytes_up` and `bytes_down` crossed the network.
    """

    tier: Tier
    rows: tuple[Row, ...]
    cached: int | None = None
    seconds: float | None = None
    bytes_up: int = 0
    bytes_down: int = 0


class Upstream(ABC):
    """A stock server that verifies. Coroutines run in the loop of its client."""

    dialect: str
    """The name of the server's kind."""
    name: str
    """The name of the model, as the server has it."""
    tier: Tier
    """How chunks are verified."""
    reason: str
    """Why they are verified like that, as a clause."""
    context_length: int | None = None
    """The number of positions of a text; None if the server does not say."""
    chat_template: str = ""
    """The chat template of the model; empty where the server does not show it."""
    recomputes: bool = False
    """Whether the server computes the whole prompt for each verdict."""
    by_text: bool = False
    """Whether the server takes no token ids, so that texts are sent and compared."""
    most_top: int = 0
    """How many likeliest tokens rows can include."""
    steers: bool = False
    """Whether a request may have a `Steering`."""
    at_once: int | None = None
    """How many requests the server computes at once; None if it does not say."""

    @abstractmethod
    async def rows(self, request: RowRequest) -> RowReply:
        """Return the rows for `request`.

        Raises:
            VerifierLost: the server is gone, refuses, or answers with something else.
            VerifierBusy: it takes no request now.
        """

    @abstractmethod
    async def check(self) -> None:
        """Check that the server is there and still has the same model. Raises as `rows`."""

    async def tokenize(self, text: str) -> Sequence[int] | None:  # noqa: ARG002
        """Return the ids of `text` by the server's tokenizer; None where it cannot be asked. Raises as `rows`."""
        return None

    async def detokenize(self, ids: Sequence[int]) -> str | None:  # noqa: ARG002
        """Return the text of `ids` by the server's tokenizer; None where it cannot be asked. Raises as `rows`."""
        return None
