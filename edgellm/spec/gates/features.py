"""Cheap features of a drafted chunk, as numbers that a predictor can weigh."""

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
    "agreement",  # log of 1 + matched tokens where the context says the same, summed over tokens
    "most agreement",
    "dissent",  # the same where it says a different token from the drafted one
    "most dissent",
    "doubtful dissent",  # with the doubt of the token
    "copied",  # tokens that were taken from the context
    "copied match",  # log of 1 + matched tokens of those
    "copied doubt",  # of the model at those tokens
)
JUDGED = tuple(at for at, name in enumerate(NAMES) if "importance" not in name)
"""Places of the signals that the fitted gate weighs: importance told it nothing beyond confidence (evidence in the
profile), and measuring it costs time."""

_FLOOR = 1e-4  # closer to 0 than this, confidences are not told apart


def surprise(chunk: Chunk) -> float:
    """Return minus the log of the probability of the whole chunk under the draft model."""
    return float(-np.log(np.clip(chunk.confidence.astype(np.float64), _FLOOR, 1.0)).sum())


def signals(chunk: Chunk, written: int, usual: float = 0.0, so_far: float = 0.0) -> Vector:
    """Return the signals of a chunk of at least one token behind `written` ones, shape (len(NAMES),).

    `usual` stands for the importance of tokens drafted ahead, for which it was not measured;
    `so_far` is the surprise of all chunks of the reply before it.
    """
    confidence = chunk.confidence.astype(np.float64)
    doubt = -np.log(np.clip(confidence, _FLOOR, 1.0))
    importance = chunk.importance.copy()
    importance[: chunk.ahead] = usual
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
            importance.mean() if has else usual,
            importance.max() if has else usual,
            importance[least] if has else usual,
            len(chunk),
            np.log1p(written),
            so_far,
            *_support(chunk, doubt),
        )
    )


def _support(chunk: Chunk, doubt: Vector) -> tuple[float, ...]:
    """Return what the context says of a chunk, from `agreement` to `copied doubt`; zeros where it was not asked."""
    heard = chunk.context_match
    if heard is None:
        return (0.0,) * 8
    matched = np.log1p(np.where(heard.said >= 0, heard.matched, 0).astype(np.float64))
    same = heard.said == chunk.ids
    copied = heard.copied
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
