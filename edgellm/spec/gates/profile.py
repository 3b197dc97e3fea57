"""A pair's profile: offline observations, and the gate settings derived from them (Synera, section 5)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.errors import ProfileUnusable, StateDamaged
from edgellm.spec.mechanisms import has, mechanism
from edgellm.spec.types import Ids
from edgellm.state import from_json, read_json, write_state

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

VERSION = 7
_GAMMA_MOST = 1024

NAMES = (
    "doubt of the mean",  # -log of the mean confidence: the paper's c
    "tokens",
    "doubt of the first",
    "surprise",  # sum of -log confidence over the chunk
    "narrowest margin",
    "mean margin",
    "place",  # log of 1 + tokens written before
    "doubt so far",  # surprise of all chunks before it
    "agreement",  # log of 1 + matched tokens where the context has the same token, summed over tokens
    "most agreement",
    "dissent",  # the same for a different token
    "doubtful dissent",  # dissent times the doubt of the token
    "copied",  # tokens that were taken from the context
    "copied doubt",  # doubt of the model at copied tokens
    "prompt difficulty",  # wrong chunks in replies to such prompts (`prompt_difficulty.py`)
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
class ExitPoint:
    """A measured early exit after `layer`: the share of tokens that `left` there, the share of these with which full
    depth agrees, and the seconds per drafted token with the exit and at full depth."""

    layer: int
    left: float
    agreement: float
    seconds: float
    full_seconds: float


@dataclass(frozen=True, slots=True)
class WordWeights:
    """An estimate of a prompt's difficulty by its tokens (`prompt_difficulty.py`): `usual`, and the sum of `weights`
    for those that are in `tokens` (ascending), within the bounds `least` and `most`."""

    usual: float = 0.0
    least: float = 0.0
    most: float = 0.0
    tokens: tuple[int, ...] = ()
    weights: tuple[float, ...] = ()


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
    fully verified replies, and so do the predictor of rejections `rejected`, and `policies`. `batch_seconds[i]` is the
    draft model's time for i + 1 rows, empty if not measured. `hesitates` is the confidence below which the context's
    token is drafted.
    """

    terms: ProfileTerms
    alone: UnverifiedReplies
    c_th: float
    alpha: float
    acceptance: tuple[float, ...]
    rejected: Logistic
    policies: tuple[Policy, ...]
    draft_seconds: float
    verify_seconds: float
    evidence: dict[str, float] = field(default_factory=dict)
    batch_seconds: tuple[float, ...] = ()
    exits: tuple[ExitPoint, ...] = ()
    hesitates: float = 0.0
    difficulty: WordWeights = WordWeights()

    @property
    def has_words(self) -> bool:
        """Return whether the profile contains tokens of its prompts."""
        return bool(self.difficulty.tokens)

    def without_words(self) -> Profile:
        """Return the same profile without tokens of prompts: each prompt is as usual."""
        return replace(self, difficulty=replace(self.difficulty, tokens=(), weights=()))

    def difficulty_of(self, prompt: Ids) -> float:
        """Return about how many wrong chunks the draft model's reply to `prompt` (n,) will have."""
        if not self.has_words or not has("prompt difficulty"):
            return self.difficulty.usual
        return float(mechanism("prompt difficulty").difficulty_of(self.difficulty, prompt))

    @property
    def usual_importance(self) -> float:
        """Return the median of a chunk's importance."""
        return float(np.median(self.alone.importance)) if self.alone.importance else 0.0

    def best_exit(self) -> tuple[int | None, str]:
        """Return the layer after which an early exit pays most, None if it pays nowhere, and why."""
        if not self.exits or not has("early exit"):
            return None, "early exit was not measured"
        best: tuple[int | None, str] = mechanism("early exit").best_exit(self.exits)
        return best

    def save(self, path: Path) -> None:
        """Write the profile as JSON, whole or not at all, readable for the user alone. Raises OSError if that fails."""
        found = {"version": VERSION, **asdict(self)}
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        write_state(path, f"{{\n{lines}\n}}\n")

    @classmethod
    def load(cls, path: Path, *, own: bool = False) -> Profile:
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
    if len(profile.difficulty.tokens) != len(profile.difficulty.weights):
        raise ValueError("the tokens of prompts are not as many as their weights")
    if not 1 <= profile.terms.gamma <= _GAMMA_MOST:
        raise ValueError(f"gamma is {profile.terms.gamma}")
    n = len(NAMES)
    for predictor, wide in ((profile.rejected, n), *((policy.continuation, n + 1) for policy in profile.policies)):
        sizes = len(predictor.centre), len(predictor.scale), len(predictor.weights)
        if sizes not in ((wide, wide, wide), (wide, wide, wide * (2 * wide + 3))):
            raise ValueError(f"a predictor has {sizes} numbers for {wide} signals")
    return profile
