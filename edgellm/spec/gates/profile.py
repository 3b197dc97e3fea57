"""A pair's profile: offline observations, and the gate settings derived from them (Synera, section 5)."""

import json
from dataclasses import asdict, dataclass, field
from math import log1p
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.errors import ProfileUnusable, StateDamaged
from edgellm.spec.drafting.cost_curve import MAX_DRAFT
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk, Decision
from edgellm.state import from_json, read_json, write_state

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

VERSION = 10

NAMES = (
    "doubt of the mean",  # -log of the mean confidence: the paper's c
    "tokens",
    "surprise",  # sum of -log confidence over the chunk
    "narrowest margin",
    "place",  # log of 1 + tokens written before
    "agreement",  # log of 1 + matched tokens where the context has the same token, summed over tokens
    "dissent",  # the same for a different token
    "copied",  # tokens that were taken from the context
    "copied doubt",  # doubt of the model at copied tokens
)
"""The signals that a chunk is judged by. Importance is none of them: it added nothing to confidence (evidence in the
profile), and measuring it takes time."""


@dataclass(frozen=True, slots=True)
class ProfileTerms:
    """The models of a profile, by the hashes of their files, and what it was made of: `chunks` of `gamma` tokens in
    replies to `prompts`. The attention of `layers` is importance. `origin` is `prompts` or `first replies`."""

    draft_hash: str
    verifier_hash: str
    gamma: int
    layers: tuple[int, ...] = ()
    prompts: int = 0
    chunks: int = 0
    origin: str = "prompts"


@dataclass(frozen=True, slots=True)
class UnverifiedReplies:
    """Samples of replies by the draft model alone: means of chunks, (n,) each, the confidences of single `tokens`, and
    the perplexities of whole replies."""

    confidence: tuple[float, ...]
    importance: tuple[float, ...]
    tokens: tuple[float, ...]
    perplexities: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Logistic:
    """A logistic regression on signals: `sigmoid(bias + weights . features)`.

    Signals are standardised by `centre` and `scale` (1 over the deviation), and the logarithm of their size is taken.
    With as many `weights` as that, the features also have the excess of each signal over its mean, and all products of
    two: doubt means less if the context says the same, and more if a number was just copied.
    """

    centre: tuple[float, ...]
    scale: tuple[float, ...]
    weights: tuple[float, ...]
    bias: float

    def features(self, x: Matrix, *, pairs: bool) -> Matrix:
        """Return the features of signals (n, f): these; with `pairs` also the excesses, and products of two."""
        z: Matrix = (x - np.array(self.centre)) * np.array(self.scale)
        z = np.sign(z) * np.log1p(np.abs(z))
        if not pairs:
            return z
        z = np.column_stack((z, np.maximum(z, 0.0)))
        one, other = np.triu_indices(z.shape[1])
        return np.column_stack((z, z[:, one] * z[:, other]))

    def scores(self, x: Matrix) -> Vector:
        """Return the scores (n,) in (0, 1) for signals (n, f)."""
        features = self.features(x, pairs=len(self.weights) > len(self.centre))
        scores: Vector = 1.0 / (1.0 + np.exp(-np.clip(self.bias + features @ np.array(self.weights), -30.0, 30.0)))
        return scores


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy for budgets near `share`. `continuation` predicts the continuation value from a chunk's signals and
    the log of the chance of a rejection. `scores` (n,) are the values of profiled chunks when the policy was followed
    at that budget."""

    share: float
    continuation: Logistic
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Profile:
    """The profile of a pair of models.

    `c_th`, `alpha` and `acceptance` (share of chunks whose first i + 1 tokens are accepted, i in 0..gamma-1) come from
    fully verified replies, and so do the predictor of rejections `rejected`, and `policies`. `hesitates` is the
    confidence below which the context's token is drafted.
    """

    terms: ProfileTerms
    alone: UnverifiedReplies
    c_th: float
    alpha: float
    acceptance: tuple[float, ...]
    rejected: Logistic
    policies: tuple[Policy, ...]
    evidence: dict[str, float] = field(default_factory=dict)
    hesitates: float = 0.0

    @property
    def usual_importance(self) -> float:
        """Return the median of a chunk's importance."""
        return float(np.median(self.alone.importance)) if self.alone.importance else 0.0

    def save(self, path: Path) -> None:
        """Write the profile as JSON, whole or not at all, readable for the user alone. Raises OSError if that fails."""
        found = {"version": VERSION, **asdict(self)}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        write_state(path, f"{{\n{lines}\n}}\n")

    @classmethod
    def load(cls, path: Path, *, own: bool = False) -> "Profile":
        """Load a saved profile. `own`: the file belongs to edgellm, so it must not be a link. Raises ProfileUnusable:
        there is no such file, or it is not a profile of this version."""
        try:
            found = read_json(path, _parse, links=not own)
        except StateDamaged as error:
            raise ProfileUnusable(error.what, "Make a new one with edgellm profile.") from None
        if found is None:
            raise ProfileUnusable(f"There is no file {path}.", "Make one with edgellm profile.")
        return found


def _parse(found: dict[str, object]) -> Profile:
    """Return the profile in JSON. Invalid JSON raises KeyError, TypeError or ValueError."""
    if found.pop("version") != VERSION:
        raise ValueError(f"its version is not {VERSION}")
    profile = from_json(Profile, found)
    if not (profile.policies and all(asdict(profile.alone).values()) and all(one.scores for one in profile.policies)):
        raise ValueError("measurements are missing")
    if not 1 <= profile.terms.gamma <= MAX_DRAFT:
        raise ValueError(f"gamma is {profile.terms.gamma}")
    n = len(NAMES)
    for predictor, wide in ((profile.rejected, n), *((policy.continuation, n + 1) for policy in profile.policies)):
        sizes = len(predictor.centre), len(predictor.scale), len(predictor.weights)
        if sizes not in ((wide, wide, wide), (wide, wide, wide * (2 * wide + 3))):
            raise ValueError(f"a predictor has {sizes} numbers for {wide} signals")
    return profile


SHARES = (0.1, 0.2, 0.4)
"""Budgets for which a policy is fitted and evidence is collected."""

MEAN_DOUBT, TOKENS = map(NAMES.index, ("doubt of the mean", "tokens"))
CONTEXT = slice(NAMES.index("agreement"), len(NAMES))
"""The signals that only chunks have whose tokens were looked up in the context."""

_FLOOR = 1e-4  # least confidence in logarithms


def signals(chunk: Chunk, written: int) -> Vector:
    """Return the signals of a chunk of at least one token after `written` tokens, shape (len(NAMES),)."""
    confidence = chunk.confidence.astype(np.float64)
    doubt, mean = -np.log(np.clip(confidence, _FLOOR, 1.0)), max(_FLOOR, float(confidence.mean()))
    margin = min((one.margin for one in chunk.drafted), default=1.0)
    return np.array(
        (
            -np.log(mean), len(chunk), doubt.sum(), margin, np.log1p(written),
            *_context_signals(chunk, doubt),
        )
    )  # fmt: skip


def _context_signals(chunk: Chunk, doubt: Vector) -> tuple[float, ...]:
    """Return the signals `CONTEXT`; zeros without a match in the context."""
    agreement = dissent = copied = copied_doubt = 0.0
    for token, drafted, doubted in zip(chunk.ids.tolist(), chunk.drafted, doubt.tolist(), strict=False):
        if drafted.copied:
            copied, copied_doubt = copied + 1.0, copied_doubt + doubted
        elif drafted.offered == token:
            agreement += log1p(drafted.matched)
        elif drafted.offered >= 0:
            dissent += log1p(drafted.matched)
    return agreement, dissent, copied, copied_doubt


def with_chance(x: Matrix, rejected: Vector) -> Matrix:
    """Return what `Policy.continuation` is predicted from: signals (n, f) and the chances of a rejection (n,)."""
    return np.column_stack((x, np.log(rejected + 1e-6)))


class FittedJudge:
    """A judge of the chunks of one reply by their value. Values drift, because unverified replies diverge from verified
    ones, so a chunk is verified if its value is above that quantile of the profiled values."""

    def __init__(self, profile: Profile, budget: float, seed: int = 0) -> None:
        self._profile, self._seed = profile, seed
        self._policy = min(profile.policies, key=lambda policy: abs(policy.share - budget))
        self._sorted = np.sort(np.array(self._policy.scores))
        self._p_correct = 1.0  # probability that the reply so far equals the verifier's

    def __call__(self, state: GenerationState, chunk: Chunk, target: float) -> Decision:
        """Decide on a chunk, so that the share `target` of all is verified."""
        seen = signals(chunk, state.written)[None]
        rejected = self._profile.rejected.scores(seen)
        p_rejected = float(rejected[0])
        continuation = float(self._policy.continuation.scores(with_chance(seen, rejected))[0])
        value = self._p_correct * p_rejected * continuation
        below, place = self._rank(value, draw(self._seed, state.written))
        why = (
            f"{p_rejected:.0%} chance of rejection, {self._p_correct:.0%} that the reply is correct so far: score"
            f" {value:.3g}, above {below:.0%} of the profiled chunks; {target:.0%} are to be verified"
        )
        if place >= target:
            self._p_correct *= 1.0 - p_rejected
        return Decision(place < target, why)

    def _rank(self, value: float, tie: float) -> tuple[float, float]:
        """Return the share of profiled values below one, and its rank among them and itself: 0 is the highest, and 1
        the end. `tie` in [0, 1) ranks equal values."""
        n = len(self._sorted)
        below, up_to = (int(self._sorted.searchsorted(value, side)) for side in ("left", "right"))
        return below / n, (n - up_to + tie * (up_to - below + 1)) / (n + 1)


def draw(seed: int, place: int) -> float:
    """Return the random number in [0, 1) of a place."""
    return float(np.random.Generator(np.random.Philox(key=seed & 2**64 - 1, counter=place)).random())
