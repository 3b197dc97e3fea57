"""The requests to stock servers and their answers, a row for each place of a chunk; and the verdict from rows: pure
functions, which trust nothing in the rows.

A stock server tells only the likeliest tokens of a row. Penalties move tokens, and a grammar removes them. As long as
the remaining tokens stand above the least likely known token, no unknown token could take their place, and the outcome
is that of the whole row. Otherwise the row is undecided, and the server is asked for that token again, steered.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from edgellm.spec.params import MAX_BIAS
from edgellm.spec.sampling import ReplyGrammar, distribution, draw
from edgellm.spec.types import Distribution, Ids, Logprobs, Penalties, Sampling, Verdict

Top: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens of a place with their log-probabilities, before temperature and truncation."""


class RowsUnusable(Exception):
    """The error of rows that contradict themselves, the request or the vocabulary."""


_MALFORMED = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


@contextmanager
def readable() -> Iterator[None]:
    """Read JSON that may be anything as if it were of the expected form. Raise RowsUnusable where it is not."""
    try:
        yield
    except _MALFORMED as error:
        raise RowsUnusable(f"{error!r:.100}") from None


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
    Cached prefixes are shared only within a `salt`, if the server can do that. With `steering`, there is no draft, and
    one token is asked for.
    """

    prefix: Ids
    draft: Ids
    sampling: Sampling
    top: int = 0
    extra: int = 0
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


class Undecided(Exception):
    """The likeliest tokens of a row do not decide the next token. A server that follows `steering` does, by the rule
    `sampling`; None: no server can be asked for it."""

    def __init__(self, steering: Steering | None, sampling: Sampling) -> None:
        super().__init__()
        self.steering, self.sampling = steering, sampling


def distribution_of_top(
    top: Top, sampling: Sampling, n_vocab: int, text: Ids, grammar: ReplyGrammar | None = None
) -> Distribution:
    """Return the distribution that `spec.verification` draws from behind `text` (n,), by the likeliest tokens of a row
    of `n_vocab` logits. Raises Undecided: the tokens do not decide it; RowsUnusable: the tokens are fewer than
    `sampling.top_k`."""
    if not sampling.greedy and not 0 < sampling.top_k <= len(top):
        raise RowsUnusable(f"{len(top)} likeliest tokens, and top_k is {sampling.top_k}")
    ordered = sorted(top)
    ids = np.array([token for token, _ in ordered], dtype=np.int32)
    values = np.array([logprob for _, logprob in ordered], dtype=np.float32)
    bias: dict[int, float] = {}
    if sampling.penalties is not None:
        bias = added(sampling.penalties, text)
        known = set(ids.tolist())
        floor = float(values.min()) + max([0.0, *(amount for token, amount in bias.items() if token not in known)])
        values = values + np.array([bias.get(token, 0.0) for token in ids.tolist()], dtype=np.float32)
        certain = values >= (floor if len(ids) < n_vocab else -inf)
        ids, values = ids[certain], values[certain]
        if len(ids) < (1 if sampling.greedy else sampling.top_k):
            raise _penalised_too_far(bias, sampling, text, n_vocab, grammar)
    found = distribution(values, sampling)
    found = Distribution(ids[found.ids], found.probs)
    if grammar is None:
        return found
    left = grammar.kept(found, text)
    if left is not None:
        return left
    allowed = np.isin(ids, grammar.allowed(ids, text))
    if not allowed.any():
        among = grammar.allowed(np.arange(n_vocab, dtype=np.int32), text)
        raise Undecided(_steering(bias, among), replace(sampling, temperature=0.0))
    best = np.where(allowed, values, -inf).argmax()
    return Distribution(ids[best : best + 1], np.ones(1, dtype=np.float32))


def added(penalties: Penalties, text: Ids) -> dict[int, float]:
    """Return the amounts that `penalties` add to the logits behind `text` (n,), by token; not the repeat penalty, which
    divides logits, and no server tells these."""
    found = dict(penalties.bias)
    if penalties.frequency or penalties.presence:
        seen, times = np.unique(text[penalties.start :], return_counts=True)
        for token, count in zip(seen.tolist(), times.tolist(), strict=True):
            found[token] = found.get(token, 0.0) - count * penalties.frequency - penalties.presence
    return found


def _penalised_too_far(
    bias: dict[int, float], sampling: Sampling, text: Ids, n_vocab: int, grammar: ReplyGrammar | None
) -> Undecided:
    among = None if grammar is None else grammar.allowed(np.arange(n_vocab, dtype=np.int32), text)
    if among is not None and not sampling.greedy and len(among) < n_vocab:  # Steered draws differ.
        return Undecided(None, sampling)
    return Undecided(_steering(bias, among), sampling)


def _steering(bias: dict[int, float], among: Ids | None) -> Steering | None:
    if any(abs(amount) > MAX_BIAS for amount in bias.values()):
        return None
    return Steering(tuple(sorted(bias.items())), None if among is None else tuple(among.tolist()))


_ROUNDING = 1e-2  # tolerated excess over 1 of probabilities from half-precision servers


def verdict(
    request: RowRequest, reply: RowReply, n_vocab: int, logprobs: int | None = None,
    is_eog: Callable[[int], bool] = lambda _token: False, grammar: ReplyGrammar | None = None,
) -> Verdict:  # fmt: skip
    """Return the verdict on the draft of `request` by the rows of `reply`; with `logprobs`, those of its tokens and of
    that many others. `is_eog` as in `matching`; `grammar` is the reply's, if any. Raises RowsUnusable: the rows are too
    few, or not of a vocabulary of `n_vocab` tokens and its probabilities; Undecided: their likeliest tokens do not
    decide the first token."""
    draft, continues = request.draft, reply.tier is Tier.CONTINUE
    rows = checked(reply.rows, 1 if continues else len(draft) + 1, n_vocab)
    if request.ruled or (reply.tier is Tier.SCORE and not request.sampling.greedy):
        accepted, own = chosen(rows, request, reply.tier, n_vocab, grammar)
        tokens = [own]
    else:
        accepted, tokens = matching(draft.tolist(), [row.token for row in rows], is_eog)
        tokens = tokens if continues else tokens[:1]
    written = [*draft[:accepted].tolist(), *tokens]
    return Verdict(
        accepted,
        np.array(tokens, dtype=np.int32),
        seconds=reply.seconds or 0.0,
        bytes_up=reply.bytes_up,
        bytes_down=reply.bytes_down,
        passes=len(rows) if continues else 1,
        cached=min(reply.cached or 0, len(request.prefix)),
        logprobs=() if logprobs is None else tuple(_logprobs(rows, written, logprobs)),
    )


def matching(draft: list[int], own: list[int], is_eog: Callable[[int], bool]) -> tuple[int, list[int]]:
    """Accept the draft while each token is the server's own in its place, greedy or drawn; return the number of
    accepted tokens, and the server's tokens behind them.

    A server writes nothing behind a token that ends the turn, for which `is_eog` returns True. A draft with the same
    end is accepted as a whole, and the end stands for the token behind it, which no reply shows.
    """
    if own == draft and is_eog(own[-1]):
        return len(draft), own[-1:]
    differing = (at for at, (mine, theirs) in enumerate(zip(draft, own, strict=False)) if mine != theirs)
    accepted = next(differing, min(len(draft), len(own) - 1))
    return accepted, own[accepted:]


def chosen(
    rows: Sequence[Row], request: RowRequest, tier: Tier, n_vocab: int, grammar: ReplyGrammar | None
) -> tuple[int, int]:
    """Judge a draft by the choices of `request`'s sampling rule among the likeliest tokens of each row; return how many
    tokens are accepted, and the chosen token behind them. The text ends where the rows follow another text, or do not
    decide. Raises Undecided: the first row does not decide."""
    sampling, draft, place = request.sampling, request.draft, len(request.prefix)
    text, own = np.concatenate((request.prefix, draft)), 0
    for at, row in enumerate(rows[: len(draft) + 1]):
        try:
            target = distribution_of_top(_top(row), sampling, n_vocab, text[: place + at], grammar)
        except Undecided:
            if not at:
                raise
            return at - 1, own
        own = draw(target, sampling.seed, place + at)
        follows = at < len(draft) and own == draft[at]
        if not follows or (tier is Tier.CONTINUE and own != row.token):
            return at, own
    return min(len(rows), len(draft) + 1) - 1, own


@readable()
def checked(rows: Sequence[Row], at_least: int, n_vocab: int) -> Sequence[Row]:
    """Return `rows`. Raises RowsUnusable if they are too few, or not rows of the vocabulary."""
    if len(rows) < at_least:
        raise RowsUnusable(f"{len(rows)} rows instead of {at_least}")
    for row in rows:
        _check_id(row.token, n_vocab)
        if row.top is None:
            continue
        for token, logprob in row.top:
            _check_id(token, n_vocab)
            if not math.isfinite(logprob) or logprob > _ROUNDING:
                raise RowsUnusable(f"a log-probability of {logprob:g}")
        if len({token for token, _ in row.top}) < len(row.top):
            raise RowsUnusable("a token twice in one row")
        if (total := sum(math.exp(logprob) for _, logprob in row.top)) > 1.0 + _ROUNDING:
            raise RowsUnusable(f"probabilities that add up to {total:g}")
    return rows


def _check_id(token: int, n_vocab: int) -> None:
    if not isinstance(token, int | np.integer) or not 0 <= token < n_vocab:
        raise RowsUnusable(f"token {str(token)[:40]} of a vocabulary of {n_vocab}")


def _top(row: Row) -> Top:
    if row.top is None:
        raise RowsUnusable("a row without log-probabilities")
    return row.top


def _logprobs(rows: Sequence[Row], written: Sequence[int], k: int) -> Iterator[Logprobs]:
    for row, token in zip(rows, written, strict=False):
        best = sorted(_top(row), key=lambda entry: (-entry[1], entry[0]))
        own = next((logprob for other, logprob in best if other == token), None)
        if own is None:
            raise RowsUnusable(f"token {token} is not among its likeliest tokens")
        ids = np.array([other for other, _ in best[:k]], dtype=np.int32)
        yield Logprobs(own, ids, np.array([logprob for _, logprob in best[:k]], dtype=np.float64))
