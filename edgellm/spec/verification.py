"""The verification rule: which drafted tokens are accepted, and which token follows them.

Drafter-invariant speculative sampling (Daliri et al. 2024): draft model and verifier draw by the same random numbers,
and a draft is accepted where it equals the verifier's own draw. Unlike rejection sampling (Leviathan et al. 2023, Chen
et al. 2023), this leaves a sampled text as the verifier writes it alone, accepts copies as well as drawn tokens, and
needs no distribution of the drafts.
"""

from __future__ import annotations

import numpy as np

from edgellm.engine import LazyLogits, Rows, in_blocks
from edgellm.errors import EngineFailed
from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.sampling import distribution, draw, penalised
from edgellm.spec.types import NO_IDS, Chunk, Ids, Sampling


def judge(
    draft: Ids, rows: Rows, sampling: Sampling, position: int, text: Ids = NO_IDS, grammar: ReplyGrammar | None = None
) -> tuple[int, int]:
    """Return the number of accepted tokens of the `draft` (n,), and the verifier's own token after them.

    A draft is accepted while each token is the verifier's own: its most probable token, or its draw at that position
    after penalties, temperature, truncation and grammar. So the text is what the verifier writes alone,
    whatever is drafted. `rows` (n + 1, n_vocab) are the verifier's logits: row i predicts place i of the draft, the
    last row the token after it. `position` is the number of tokens before the draft; `text` (position,) are these
    tokens, for penalties and the `grammar`, which at each place also see the drafted tokens before it.
    """
    if sampling.greedy and sampling.penalties is None and grammar is None:
        return verify_greedy(draft, rows)

    def own_at(place: int) -> int:
        row, before = rows[place], np.concatenate((text, draft[:place]))
        if sampling.penalties is not None:
            row = penalised(row, before, sampling.penalties)
        found = distribution(row, sampling)
        if grammar is not None:
            found = grammar.limited(found, row, before)
        return draw(found, sampling.seed, position + place)

    for place, drafted in enumerate(draft.tolist()):
        if (own := own_at(place)) != drafted:
            return place, own
    return len(draft), own_at(len(draft))


def verify_greedy(draft_ids: Ids, rows: Rows) -> tuple[int, int]:
    """Accept the drafts (n,) while each is the most probable token of its row; `rows` is (n + 1, n_vocab)."""
    drafted = draft_ids.tolist()
    accepted = 0
    for block in in_blocks(rows):
        for row, answer in enumerate(block.argmax(axis=1).tolist()):
            if accepted < len(drafted) and drafted[accepted] == answer:
                accepted += 1
                continue
            if not np.isfinite(block[row, answer]):
                raise EngineFailed(
                    "The verifier's output is not a number.", "Its file may be damaged: download it again."
                )
            return accepted, answer
    raise ValueError("there is no row after the drafts")


LIKELY = 0.1
"""The threshold of equation 3 of CoordGen: a rejected token of this probability may still come."""


def plausible(chunk: Chunk, rows: Rows, accepted: int) -> tuple[bool, ...]:
    """Return which tokens of `chunk` have at least probability `LIKELY` in their row of `rows` (len(chunk) or more,
    n_vocab).

    Accepted tokens count as plausible, whatever their probability; so do tokens whose row was not computed. Only tokens
    within that factor of the row's maximum can qualify, so only they need a sum over the vocabulary.
    """
    n = len(chunk)
    if isinstance(rows, LazyLogits):
        n, rows = min(n, rows.known), rows.upto(rows.known)
    found = [True] * accepted + [False] * (n - accepted) + [True] * (len(chunk) - n)
    if accepted == n:
        return tuple(found)
    left = rows[accepted:n]
    own = left[np.arange(n - accepted), chunk.ids[accepted:n]]
    best = left.max(axis=1)
    for at in np.flatnonzero(own - best >= np.log(LIKELY)).tolist():
        found[accepted + at] = bool(np.exp(own[at] - best[at]) >= LIKELY * np.exp(left[at] - best[at]).sum())
    return tuple(found)
