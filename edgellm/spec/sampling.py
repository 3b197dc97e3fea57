"""From logits to a token: truncated distributions, grammars, and randomness that depends only on seed and position."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.engine.gguf.reader import ModelFile
from edgellm.errors import EngineFailed
from edgellm.spec.types import NO_IDS, Constraint, Distribution, Expected, Floats, Ids, Logprobs, Penalties, Sampling
from edgellm.storage.catalog import catalog

Times: TypeAlias = npt.NDArray[np.float64]

_MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # constants of SplitMix64 (Steele et al. 2014): increment and mixing factors
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_COLDEST = 1e-6  # least temperature: lower ones change nothing, and their quotients would overflow
_HOTTEST = 1e30  # highest temperature: all tokens are alike there, and higher ones would overflow
_LEAST = float(np.finfo(np.float32).tiny)  # least weight that stays above 0 after normalisation


def draw(distribution: Distribution, seed: int, position: int) -> int:
    """Return the token at `position` of a text of `seed`, drawn from `distribution` by an exponential race.

    The first of the `arrival_times`, each divided by its token's probability, wins, so each token wins with exactly its
    probability: the Gumbel-max trick in other terms. Draft model and verifier draw by the same times, and the nearer
    their distributions are, the more often they draw the same token: with at least probability (1 - d) / (1 + d) for a
    total variation distance d (Daliri, Musco and Suresh 2024, "Coupling without Communication and Drafter-Invariant
    Speculative Decoding").
    """
    if len(distribution.ids) == 1:
        return int(distribution.ids[0])
    return int(distribution.ids[(arrival_times(seed, position, distribution.ids) / distribution.probs).argmin()])


def arrival_times(seed: int, position: int, ids: Ids) -> Times:
    """Return exponentially distributed times with mean 1 for the tokens `ids` (k,) at a position; shape (k,).

    They depend on seed, position and token alone: not on the other tokens, on the order of calls, or on how a text was
    cut into chunks, so a replay or a rebuilt session draws the same.
    """
    key = _mixed_number((_mixed_number(seed & _MASK) + position * GOLDEN) & _MASK)
    words = np.uint64(key) + (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    words ^= words >> np.uint64(31)
    found: Times = -np.log(((words >> np.uint64(11)) + 0.5) * 2.0**-53)
    return found


def _mixed_number(word: int) -> int:
    word = (word ^ (word >> 30)) * _FIRST & _MASK
    word = (word ^ (word >> 27)) * _SECOND & _MASK
    return word ^ (word >> 31)


REPEAT_WINDOW = 64
"""Last tokens of the text that the repeat penalty looks at, as in llama.cpp and Ollama."""


def penalised(logits: Floats, text: Ids, penalties: Penalties) -> Floats:
    """Return a copy of `logits` (n_vocab,), which follow `text` (n,), changed by `penalties`.

    The repeat penalty is that of CTRL (Keskar et al. 2019); frequency and presence are subtracted as OpenAI's API
    defines them. Ids outside `logits` have no effect.
    """
    changed = logits.copy()
    if penalties.repeat != 1.0:
        seen = np.unique(text[-REPEAT_WINDOW:])
        seen = seen[seen < len(logits)]
        old = changed[seen]
        changed[seen] = np.where(old > 0.0, old / np.float32(penalties.repeat), old * np.float32(penalties.repeat))
    if penalties.frequency or penalties.presence:
        seen, times = np.unique(text[penalties.start :], return_counts=True)
        known = seen < len(logits)
        changed[seen[known]] -= (times[known] * penalties.frequency + penalties.presence).astype(np.float32)
    if penalties.bias:
        ids, amounts = zip(*penalties.bias, strict=True)
        places = np.array(ids)
        known = places < len(logits)
        changed[places[known]] += np.array(amounts, dtype=np.float32)[known]
    return changed


@dataclass(frozen=True, slots=True)
class Choice:
    """The set that a verifier chooses tokens from: whole rows of logits, or the `likely` likeliest tokens of a place,
    all that a stock server tells (0: it tells none). `draws_itself`: the server draws sampled tokens."""

    likely: int | None = None
    draws_itself: bool = False

    def draws_alike(self, sampling: Sampling) -> bool:
        """Return whether tokens are drawn by `draw`, and not by a server's own random numbers."""
        if sampling.greedy or self.likely is None:
            return True
        return 0 < sampling.top_k <= self.likely and (sampling.ruled or not self.draws_itself)

    def nearest(self, sampling: Sampling) -> Sampling:
        """Return `sampling`, with a `top_k` that tells enough for a rule with penalties or a constraint."""
        if self.likely and sampling.ruled and not self.draws_alike(sampling):
            return replace(sampling, top_k=self.likely)
        return sampling

    def refusal(self, sampling: Sampling) -> str:
        """Return why tokens cannot be chosen by a rule with penalties or a constraint, as a clause; "" if they can."""
        if self.likely is None or not sampling.ruled:
            return ""
        if not self.likely:
            return "it does not tell which tokens are likely"
        if sampling.penalties is not None and sampling.penalties.repeat != 1.0:
            return "the repeat penalty divides logits, which it does not tell"
        if not self.draws_alike(sampling):
            top_k = sampling.top_k or "not set"
            return f"it tells the {self.likely} likeliest tokens of a place, and top_k is {top_k}"
        return ""


WHOLE_ROWS = Choice()


def distribution(logits: Floats, sampling: Sampling) -> Distribution:
    """Return the distribution to draw from, for `logits` of shape (n_vocab,).

    Temperature first, then top-k, then top-p over what top-k left, then min-p, then renormalised. Equal logits are kept
    in order of token id, so the result does not depend on the machine. Greedy: all mass on the most probable token.

    Raises:
        EngineFailed: the logits hold a NaN, or no finite value.
    """
    truncated = _truncated(logits, sampling)
    if sampling.min_p <= 0.0 or len(truncated.ids) == 1:
        return truncated
    kept = truncated.probs >= np.float32(sampling.min_p) * truncated.probs.max()
    probs = truncated.probs[kept]
    return Distribution(truncated.ids[kept], probs / np.float32(probs.sum(dtype=np.float64)))


def _truncated(logits: Floats, sampling: Sampling) -> Distribution:
    """Return `distribution` without min-p."""
    best = int(logits.argmax())
    top = float(logits[best])
    check_peak(top)
    if sampling.greedy or sampling.top_k == 1:
        return Distribution(np.array([best], dtype=np.int32), np.ones(1, dtype=np.float32))
    cold = np.float32(min(max(sampling.temperature, _COLDEST), _HOTTEST))
    if 0 < sampling.top_k < len(logits):
        ids = top_k(logits, sampling.top_k)
        weights = np.exp((logits[ids] - top) / cold)
        held = weights.cumsum(dtype=np.float64)
        total = held[-1]
    else:
        everything = np.exp((logits - top) / cold)
        total = float(np.add.reduce(everything, dtype=np.float64))
        # The tokens below this floor add up to less than top-p cuts away: they need not be sorted.
        near = np.flatnonzero(everything > max(_LEAST, (1.0 - sampling.top_p) * total / (len(logits) + 1)))
        if sampling.top_p >= 1.0:
            return Distribution(near.astype(np.int32), everything[near] / np.float32(total))
        ids = near[(-everything[near]).argsort(kind="stable")]
        weights = everything[ids]
        held = weights.cumsum(dtype=np.float64)
    n = len(weights) if weights[-1] > _LEAST else int(np.count_nonzero(weights > _LEAST))
    if sampling.top_p < 1.0:
        n = min(n, int(held.searchsorted(sampling.top_p * total)) + 1)
    by_id = ids[:n].argsort()
    return Distribution(ids[by_id].astype(np.int32), weights[by_id] / np.float32(held[n - 1]))


def likeliest(rows: Floats, start: int) -> Expected:
    """Return the likeliest next token of each of `rows` (n, n_vocab), logits behind the positions from `start` on."""
    ids, best = rows.argmax(axis=1), rows.max(axis=1)
    return Expected(start, ids.astype(np.int32), 1.0 / np.exp(rows - best[:, None]).sum(axis=1, dtype=np.float32))


def logprobs(rows: Floats, tokens: Ids, k: int) -> Iterator[Logprobs]:
    """Yield for each token of `tokens` (n,) its log probability by its row of logits `rows` (n or more, n_vocab), and
    those of the `k` likeliest tokens.

    These are logarithms of the model's own softmax, whatever the reply is drawn from.
    """
    for row, token in zip(rows, tokens.tolist(), strict=False):
        best, top = top_k(row, k) if k else NO_IDS, float(row.max())
        total = top + math.log(float(np.exp(row - np.float32(top)).sum(dtype=np.float64)))
        yield Logprobs(float(row[token]) - total, best, row[best].astype(np.float64) - total)


@dataclass(frozen=True, slots=True)
class Top2:
    """The most probable token, its probability, and that of the runner-up."""

    id: int
    p1: float
    p2: float


def top2(logits: Floats) -> Top2:
    """Return argmax and the two largest softmax probabilities over the full vocabulary; on a tie the lowest id wins.

    `logits` has shape (n_vocab,) or (1, n_vocab). Raises EngineFailed: the largest logit is not a number or not finite.
    """
    row = logits.reshape(-1)
    first = int(row.argmax())
    peak = row[first]
    check_peak(peak)
    shifted = row - peak
    total = float(np.add.reduce(np.exp(shifted, out=shifted)))
    below, above = row[:first], row[first + 1 :]
    # The arrays' methods instead of the bare reductions would double the cost on a small vocabulary.
    second = max(np.maximum.reduce(below, initial=-np.inf), np.maximum.reduce(above, initial=-np.inf))
    return Top2(first, 1.0 / total, math.exp(second - peak) / total)


def top_k(logits: Floats, k: int) -> Ids:
    """Return the `k` most probable ids (min(k, n_vocab),), most probable first; on a tie the lowest id. Raises
    EngineFailed: a logit is not a number, or the largest one not finite."""
    row = logits.reshape(-1)
    check_peak(row.max())
    n = len(row)
    k, groups = max(0, min(k, n)), 1_024
    floor = np.float32(-np.inf)
    if 0 < k <= groups <= n:
        # k groups have a maximum of at least the k-th largest maximum, so nothing below it is among the k largest.
        maxima = row[: n - n % groups].reshape(-1, groups).max(axis=0)
        floor = np.partition(maxima, groups - k)[groups - k]
    candidates = np.flatnonzero(row >= floor)
    return candidates[np.argsort(-row[candidates], kind="stable")[:k]].astype(np.int32)


def check_peak(peak: float | np.float32) -> None:
    """Raise EngineFailed where the largest logit `peak` is not a number or not finite."""
    if not math.isfinite(peak):
        raise EngineFailed(f"The model's largest logit is {peak}.", "Its file may be damaged: download it again.")


# llama.cpp's keys behind `general.sampling.`, each with our name, and its least and largest useful value.
_KEYS: Mapping[str, tuple[str, float, float]] = MappingProxyType(
    {
        "temp": ("temperature", 0.0, 100.0), "top_k": ("top_k", 0, 2**31 - 1), "top_p": ("top_p", 1e-6, 1.0),
        "min_p": ("min_p", 0.0, 1.0), "penalty_repeat": ("repeat_penalty", 0.5, 2.0),
    }
)  # fmt: skip
_UNSAID: Mapping[str, Any] = MappingProxyType({"temperature": 0.7, "min_p": 0.05})


@dataclass(frozen=True, slots=True)
class ModelSampling:
    """The default sampling of a model's replies, and the `origin` of its figures. Figures left out there are off, but
    for `top_k`, as in llama.cpp."""

    temperature: float
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    origin: str = ""

    def figures(self) -> dict[str, float]:
        """Return the figures by their names."""
        return {name: value for name, value in asdict(self).items() if name != "origin"}

    def told_by(self, choice: Choice) -> Self:
        """Return the sampling that a verifier with `choice` can follow: a stock server tells only its likeliest tokens,
        and no logits, which the repeat penalty divides."""
        if choice.likely is None:
            return self
        return replace(self, top_k=min(self.top_k or choice.likely, choice.likely or self.top_k), repeat_penalty=1.0)


def sampling_of(file: ModelFile) -> ModelSampling:
    """Return the sampling of the model in `file`. A value of the file out of range counts as left out."""
    metadata = file.header.metadata
    names = [str(metadata.get(f"general.{key}", "")) for key in ("name", "basename")]
    card = catalog().sampling_of(file.path.stem, *names)
    said = {}
    for key, (name, least, most) in _KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and least <= value <= most:
            said[name] = int(value) if name == "top_k" else round(value, 6)  # The file has 32-bit floats.
    origins = [*["the model's file"] * bool(said), *["its card"] * bool(card.keys() - said.keys())]
    return _sampling({**card, **said}, " and ".join(origins))


def sampling_elsewhere(name: str, text: ModelFile) -> ModelSampling:
    """Return the sampling of a remote model by its `name`, else that of `text`, a model with its tokenizer."""
    card = catalog().sampling_of(name)
    return _sampling(card, "its card") if card else sampling_of(text)


def _sampling(wanted: Mapping[str, Any], origin: str) -> ModelSampling:
    if not wanted:
        return ModelSampling(**_UNSAID, origin="the default: neither the file nor a card says")
    return ModelSampling(**{"temperature": _UNSAID["temperature"], **wanted}, origin=origin)


_LEAST_ALLOWED = np.float32(-1e30)  # least logit of an allowed token: those that a translated row lacks stay drawable


class GrammarState(Protocol):
    """The part of `edgellm.engine.grammar.matcher.Grammar` that is used. `text` is the reply, without its thought."""

    def mask(self, text: Ids) -> npt.NDArray[np.bool_]: ...

    def forced(self, text: Ids) -> bytes: ...


class ReplyGrammar:
    """The grammar of one reply, for one drafter or verifier, as it remembers the text that was asked about last."""

    @classmethod
    def of(cls, constraint: Constraint | None, compile_schema: Callable[[str], GrammarState] | None) -> Self | None:
        """Return the grammar of a reply with `constraint`; `compile_schema` compiles its JSON schema. None if either is
        None."""
        if constraint is None or compile_schema is None:
            return None
        return cls(compile_schema(constraint.schema), constraint)

    def __init__(self, grammar: GrammarState, constraint: Constraint) -> None:
        self._grammar, self._start = grammar, constraint.start
        self._after = np.array(constraint.after, dtype=np.int32)

    def limited(self, distribution: Distribution, logits: Floats, text: Ids) -> Distribution:
        """Return the allowed part of a `distribution` made of `logits` (n_vocab,), which follow `text` (n,)."""
        left = self.kept(distribution, text)
        if left is not None:
            return left
        best = int(self.masked(logits, text).argmax())
        return Distribution(np.array([best], dtype=np.int32), np.ones(1, dtype=np.float32))

    def kept(self, distribution: Distribution, text: Ids) -> Distribution | None:
        """Return the allowed part of a `distribution` behind `text` (n,); None if it is empty."""
        if (mask := self._mask(text)) is None or (kept := mask[distribution.ids]).all():
            return distribution
        if not kept.any():
            return None
        probs = distribution.probs[kept]
        return Distribution(distribution.ids[kept], probs / np.float32(probs.sum(dtype=np.float64)))

    def allowed(self, candidates: Ids, text: Ids) -> Ids:
        """Return those of the `candidates` (k,) that may follow `text` (n,)."""
        mask = self._mask(text)
        return candidates if mask is None else candidates[mask[candidates]]

    def masked(self, logits: Floats, text: Ids) -> Floats:
        """Return `logits` (n_vocab,), which follow `text`, with those of forbidden tokens at minus infinity."""
        if (mask := self._mask(text)) is None:
            return logits
        if not (allowed := mask[: len(logits)]).any():
            raise EngineFailed("No token of the vocabulary continues the reply.", "Use another JSON schema.")
        return np.where(allowed, np.maximum(logits, _LEAST_ALLOWED), np.float32(-np.inf))

    def follows(self, text: Ids, drafted: Ids) -> int:
        """Return how many of the `drafted` tokens (k,) may follow `text`, one after the other."""
        whole = np.concatenate((text, drafted))
        for n, token in enumerate(drafted.tolist()):
            if (mask := self._mask(whole[: len(text) + n])) is not None and not mask[token]:
                return n
        return len(drafted)

    def prepare(self, text: Ids, drafted: Ids) -> None:
        """Compute in advance the masks that a verdict on `drafted` (k,) behind `text` needs."""
        if self.follows(text, drafted) == len(drafted):
            self._mask(np.concatenate((text, drafted)))

    def forced(self, text: Ids) -> bytes:
        """Return the only bytes that may follow `text` (n,); none where there is a choice."""
        part = self._part(text)
        return b"" if part is None else self._grammar.forced(part)

    def _mask(self, text: Ids) -> npt.NDArray[np.bool_] | None:
        """Return which tokens may follow `text`; None where the grammar has not begun."""
        part = self._part(text)
        return None if part is None else self._grammar.mask(part)

    def _part(self, text: Ids) -> Ids | None:
        """Return the part of `text` that the grammar is about; None where it has not begun."""
        reply, n = text[self._start :], len(self._after)
        if not n:
            return reply
        if len(reply) < n:
            return None
        found = np.flatnonzero((np.lib.stride_tricks.sliding_window_view(reply, n) == self._after).all(axis=1))
        return reply[found[0] + n :] if len(found) else None
