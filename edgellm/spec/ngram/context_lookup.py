"""Precedents: what followed the same words before in the context, to check a small model's drafts against.

A small model knows how an answer goes on, and hesitates at the name, the number or the time that stands in the
question. There what followed the same words before is right more often than its own first guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engine import common_prefix
from edgellm.spec.ngram.sources import ContextIndex, Cursor
from edgellm.spec.types import NO_IDS, Chunk, Ids, Verdict

MATCHED = 2
"""Tokens that a precedent has to have matched to count against the model; one alone is hardly ever right."""
_STEPS = tuple(step / 20.0 for step in range(1, 20))
_LEAST = 0.1  # of the tokens taken from the context; a smaller gain in right ones is chance


@dataclass(frozen=True, slots=True)
class Seen:
    """A token at which the context differed from the model: how sure the model was, and which of them was right."""

    confidence: float
    drafted: bool
    said: bool


class ContextLookup:
    """A lookup in one text: a prompt, and the reply to it so far."""

    def __init__(self, prompt: Ids) -> None:
        """Begin with `prompt` (n,)."""
        self._context = ContextIndex()
        self._context.begin(prompt.tolist())
        self._tail = NO_IDS  # the part of the last prefix that is not indexed

    def cursor(self, prefix: Ids, stands: bool = True) -> Cursor:
        """Return a cursor at the end of `prefix` (n,), which begins with the prompt.

        The part that it shares with the last one that `stands` is indexed; the rest may be speculative, and is only
        read."""
        context = self._context
        tail = prefix[len(context.text) :]
        if stands:
            common = common_prefix(tail, self._tail)
            context.extend(tail[:common].tolist())
            self._tail = tail = tail[common:]
        cursor = context.cursor()
        for token in tail.tolist():
            cursor.advance(token)
        return cursor


def differed(chunk: Chunk, verdict: Verdict) -> list[Seen]:
    """Return the judged tokens at which the context differed from the model's draft."""
    heard = chunk.precedent
    if heard is None:
        return []
    truth = [*chunk.ids[: verdict.accepted].tolist(), *verdict.tokens[:1].tolist()]
    found = []
    for at, right in enumerate(truth[: len(chunk)]):
        said, drafted = int(heard.said[at]), int(chunk.ids[at])
        if said >= 0 and said != drafted and heard.matched[at] >= MATCHED:
            found.append(Seen(float(chunk.confidence[at]), drafted == right, said == right))
    return found


def hesitation(seen: Sequence[Seen]) -> float:
    """Return the confidence below which a model does better to take the context's token, in steps; 0.0 if it never
    does.

    That is where the context is right more often than the model, over all that is less sure.
    """
    confidence = np.array([each.confidence for each in seen])
    gains = np.array([float(each.said) - float(each.drafted) for each in seen])
    best, gained = 0.0, 0.0
    for step in _STEPS:
        below = confidence < step
        gain = float(gains[below].sum())
        if gain > gained and gain > _LEAST * float(below.sum()):
            best, gained = step, gain
    return best
