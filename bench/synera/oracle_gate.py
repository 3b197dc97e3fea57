"""An oracle gate, which knows verdicts and right replies, and spends its budget where the score gains most."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edgellm.engine import Model
from edgellm.spec.ngram.sources import ContextLookup
from edgellm.spec.protocols import Drafter, DraftRules, GenerationState, Session
from edgellm.spec.types import Ids


@dataclass(frozen=True, slots=True)
class Course:
    """Scores of a reply with its first 0, 1, 2 ... rejected chunks corrected; chunks of the uncorrected reply."""

    scores: tuple[float, ...]
    chunks: int


def path(
    prompt: Ids, score: Callable[[str], float], *, alphabet: Model, drafter: Drafter, session: Session,
    gamma: int, most: int, lookup_below: float = 0.0,
) -> Course:  # fmt: skip
    """Write the reply with its first rejected chunks corrected, for every number of them; return the scores."""
    scores: list[float] = []
    chunks = 0
    while True:
        text, corrected, drafted = _written(prompt, len(scores), alphabet, drafter, session, gamma, most, lookup_below)
        if corrected < len(scores):  # there was nothing more to correct
            return Course(tuple(scores), chunks)
        chunks = chunks or drafted
        scores.append(score(text))


def _written(
    prompt: Ids,
    corrections: int,
    alphabet: Model,
    drafter: Drafter,
    session: Session,
    gamma: int,
    most: int,
    lookup_below: float,
) -> tuple[str, int, int]:
    """Return the reply with at most `corrections` corrections, their number, and that of the drafted chunks."""
    ids, pieces, corrected, chunks = prompt, [], 0, 0
    rules = DraftRules(lookup_below=lookup_below, context=ContextLookup(prompt) if lookup_below else None)
    while len(ids) < len(prompt) + most:
        chunk = drafter.propose(GenerationState(ids, rules=rules), gamma)
        new, chunks = chunk.ids, chunks + 1
        if corrected < corrections:
            verdict = session.submit(ids, chunk).result()
            if verdict.accepted < len(chunk):
                new = np.concatenate((chunk.ids[: verdict.accepted], verdict.tokens[:1]))
                corrected += 1
        ended = next((at for at, token in enumerate(new.tolist()) if alphabet.is_eog(token)), None)
        pieces += [alphabet.piece(token) for token in new[:ended].tolist()]
        ids = np.concatenate((ids, new))
        if ended is not None:
            break
    return b"".join(pieces).decode(errors="replace"), corrected, chunks


def oracle(paths: Sequence[Course], budget: float) -> list[float]:
    """Return each reply's score if `budget` of all chunks goes to the corrections that gain most for their number."""
    left = budget * sum(path.chunks for path in paths)
    offers = []
    for at, path in enumerate(paths):
        best = 0
        while best < len(path.scores) - 1:  # the upper hull of the path: the average gain of further corrections
            rates = [(path.scores[k] - path.scores[best]) / (k - best) for k in range(best + 1, len(path.scores))]
            step = int(np.argmax(rates)) + best + 1
            if rates[step - best - 1] <= 0:
                break
            offers.append((rates[step - best - 1], at, best, step))
            best = step
    scores = [path.scores[0] for path in paths]
    for _, at, start, step in sorted(offers, key=lambda offer: -offer[0]):
        if step - start <= left:
            scores[at] = paths[at].scores[step]
            left -= step - start
    return scores
