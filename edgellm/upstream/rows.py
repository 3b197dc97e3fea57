"""The requests to stock servers, and their answers: a row for each place of a chunk."""

from __future__ import annotations

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
    def writes_on(self) -> bool:
        """Return whether the server is to write several tokens, without a draft."""
        return bool(self.extra) and not len(self.draft)

    @property
    def prompts(self) -> list[list[int]]:
        """Return the text before each place."""
        prefix, draft = self.prefix.tolist(), self.draft.tolist()
        return [prefix + draft[:n] for n in range(len(draft) + 1)]

    @property
    def fanned_out(self) -> Tier:
        """Return the tier of rows that were asked for one by one: such as decide are those of a score."""
        return Tier.SCORE if self.decisive else Tier.FAN_OUT

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
