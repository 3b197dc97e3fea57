"""The requests to stock servers, and their answers: a row for each place of a chunk."""

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
    """The error of rows that contradict themselves, the request or the vocabulary."""


class Tier(StrEnum):
    """The ways to verify a chunk at a server, the best first."""

    SCORE = "score"  # one pass over the draft, with the likeliest tokens of each place
    FAN_OUT = "fan-out"  # a prompt for each place in one request, of one token each
    CONTINUE = "continue"  # tokens that the server writes, one more than the chunk has


MEANING = {
    Tier.SCORE: "one pass scores the whole chunk",
    Tier.FAN_OUT: "one request has a prompt for each place of the chunk",
    Tier.CONTINUE: "the server writes the tokens itself, and the chunk is compared with them",
}


class Row(NamedTuple):
    """A place of a chunk: the `token` that the server takes there, and the `top` if requested."""

    token: int
    top: Top | None = None


@dataclass(frozen=True, slots=True)
class Steering:
    """A rule for the choice of a token by a server: add `bias` to the logits of these ids, and choose `among` these ids
    alone, if given."""

    bias: tuple[tuple[int, float], ...] = ()
    among: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class RowRequest:
    """A request for the tokens after `prefix` (n,), and after each token of `draft` (m,) behind it.

    With `top`, rows include that many likeliest tokens. Without a draft, up to `extra` further tokens may be answered.
    `repeats`: the server may have cached `prefix` to its last token, and have no row for the first place. Otherwise the
    requests of one `session` extend each other. Cached prefixes are shared only within a `salt`, if the server can do
    that. With `steering`, there is no draft, and one token is asked for.
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
        """Return whether the likeliest tokens of rows suffice to draw by `sampling`."""
        return self.steering is None and not self.sampling.greedy and 0 < self.sampling.top_k <= self.top

    @property
    def ruled(self) -> bool:
        """Return whether tokens are chosen here, from the likeliest of rows, by a rule unknown to the server."""
        return self.steering is None and self.sampling.ruled

    @property
    def drawing(self) -> Sampling:
        """Return the sampling of a server that writes several tokens: greedy if tokens are chosen here."""
        return replace(self.sampling, temperature=0.0) if self.ruled else self.sampling

    @property
    def places(self) -> int:
        """Return the number of tokens in the answer of a server that writes them itself."""
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
    """The server's name of the model."""
    tier: Tier
    """The way to verify chunks."""
    reason: str
    """The reason for the tier, as a clause."""
    context_length: int | None = None
    """The number of positions of a text; None if the server does not say."""
    chat_template: str = ""
    """The chat template of the model; empty where the server does not show it."""
    recomputes: bool = False
    """True if the server computes the whole prompt for each verdict."""
    by_text: bool = False
    """True if the server takes no token ids, so that texts are sent and compared."""
    most_top: int = 0
    """The most likeliest tokens in a row."""
    steers: bool = False
    """True if a request may have a `Steering`."""
    at_once: int | None = None
    """The number of requests that the server computes at once; None if unknown."""

    @abstractmethod
    async def rows(self, request: RowRequest) -> RowReply:
        """Return the rows for `request`.

        Raises:
            VerifierLost: the server is gone, refuses, or answers with something else.
            VerifierBusy: it takes no request now.
        """

    @abstractmethod
    async def check(self) -> None:
        """Check that the server is up and still has the model."""

    async def tokenize(self, text: str) -> Sequence[int] | None:  # noqa: ARG002
        """Return the ids of `text` by the server's tokenizer, if available."""
        return None

    async def detokenize(self, ids: Sequence[int]) -> str | None:  # noqa: ARG002
        """Return the text of `ids` by the server's tokenizer, if available."""
        return None
