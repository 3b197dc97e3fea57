"""Signals of a drafted chunk, as numbers for a predictor."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edgellm.spec.types import Chunk

Vector = npt.NDArray[np.float64]

NAMES = (
    "doubt of the mean",  # -log of the mean confidence: the paper's c
    "doubt of the least",  # -log of the least confidence
    "doubt of the first",
    "surprise",  # sum of -log confidence: of the whole chunk's probability
    "narrowest margin",
    "mean margin",
    "mean importance",
    "largest importance",
    "importance of the least sure",
    "tokens",
    "place",  # log of 1 + tokens written before
    "doubt so far",  # surprise of all chunks before it: a reply that needs many corrections?
    "agreement",  # log of 1 + matched tokens where the context has the same token, summed over tokens
    "most agreement",
    "dissent",  # the same where the context has a different token
    "most dissent",
    "doubtful dissent",  # with the doubt of the token
    "copied",  # tokens that were taken from the context
    "copied match",  # log of 1 + matched tokens of those
    "copied doubt",  # of the model at those tokens
)
JUDGED = tuple(at for at, name in enumerate(NAMES) if "importance" not in name)
"""Indices of the signals that the fitted gate uses: importance added nothing to confidence (evidence in the profile),
and measuring it takes time."""

_FLOOR = 1e-4  # clips confidences away from 0


def surprise(chunk: Chunk) -> float:
    """Return minus the log of the probability of the whole chunk under the draft model."""
    return float(-np.log(np.clip(chunk.confidence.astype(np.float64), _FLOOR, 1.0)).sum())


def signals(chunk: Chunk, written: int, usual_importance: float = 0.0, so_far: float = 0.0) -> Vector:
    """Return the signals of a chunk of at least one token after `written` tokens, shape (len(NAMES),).

    `usual_importance` replaces the importance of tokens drafted ahead, for which it was not measured. `so_far` is the
    surprise of all earlier chunks of the reply.
    """
    confidence = chunk.confidence.astype(np.float64)
    doubt = -np.log(np.clip(confidence, _FLOOR, 1.0))
    importance = chunk.importance.copy()
    importance[: chunk.ahead] = usual_importance
    least = int(doubt.argmax())
    has = len(importance) > 0
    return np.array(
        (
            -np.log(max(_FLOOR, float(confidence.mean()))),
            doubt[least],
            doubt[0],
            doubt.sum(),
            chunk.margin.min(),
            chunk.margin.mean(),
            importance.mean() if has else usual_importance,
            importance.max() if has else usual_importance,
            importance[least] if has else usual_importance,
            len(chunk),
            np.log1p(written),
            so_far,
            *_context_features(chunk, doubt),
        )
    )


def _context_features(chunk: Chunk, doubt: Vector) -> tuple[float, ...]:
    """Return the signals from `agreement` to `copied doubt`; zeros without a context match."""
    match = chunk.context_match
    if match is None:
        return (0.0,) * 8
    matched = np.log1p(np.where(match.tokens >= 0, match.matched, 0).astype(np.float64))
    same = match.tokens == chunk.ids
    copied = match.copied
    agreement, dissent = np.where(same & ~copied, matched, 0.0), np.where(same, 0.0, matched)
    return (
        agreement.sum(),
        agreement.max(),
        dissent.sum(),
        dissent.max(),
        float((dissent * doubt).sum()),
        float(copied.sum()),
        float(matched[copied].sum()),
        float(doubt[copied].sum()),
    )
