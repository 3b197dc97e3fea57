"""The verification rule: which drafted tokens are accepted, and which token follows them.

Speculative sampling (Leviathan et al. 2023, Chen et al. 2023) with truncated distributions: the result is distributed
exactly as if the verifier had written alone, whichever distribution the drafts were drawn from.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.engine import LazyLogits, Rows, in_blocks
from edgellm.errors import SAME_VERSION, EngineFailed, ProtocolError
from edgellm.spec.constraint import ReplyGrammar
from edgellm.spec.sampling import Uniforms, draw, exact_distribution, penalised, probability, uniforms
from edgellm.spec.types import NO_IDS, Chunk, Distribution, Floats, Ids, Sampling


def judge(
    chunk: Chunk, rows: Rows, sampling: Sampling, position: int, text: Ids = NO_IDS,
    grammar: ReplyGrammar | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Return the number of accepted tokens of `chunk`, and the verifier's own token after them.

    `rows` (len(chunk) + 1, n_vocab) are the verifier's logits: row i predicts place i of the chunk, the last row the
    token after it. `position` is the number of tokens before the chunk and selects the random numbers; `text`
    (position,) are those tokens, which penalties and the `grammar` need.
    """
    if sampling.greedy and sampling.penalties is None and grammar is None:
        return verify_greedy(chunk.ids, rows)
    return verify_sampling(chunk, rows, sampling, uniforms(sampling.seed, position, len(chunk) + 1), text, grammar)


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


def verify_sampling(
    chunk: Chunk, rows: Rows, sampling: Sampling, uniforms: Uniforms, text: Ids = NO_IDS,
    grammar: ReplyGrammar | None = None,
) -> tuple[int, int]:  # fmt: skip
    """Accept a draft x with probability min(1, p(x)/q(x)), and answer a rejection from the residual.

    p is the verifier's distribution after penalties, temperature, truncation and grammar; q is the one that x was
    drawn from. At each place penalties and grammar see the tokens of `text` and the drafted ones before the place.
    Without distributions, x was not drawn: it is compared with the verifier's own draw, so it is accepted with
    probability p(x) and otherwise answered from the residual, and the text is the same as without drafts. `rows` is
    (n + 1, n_vocab); `uniforms` (n + 1, at least 2) holds the test of place i at [i, 0] and the draw at [i, 1].
    """
    return accept_by(chunk, lambda place: _target(rows[place], sampling, text, chunk.ids[:place], grammar), uniforms)


def accept_by(chunk: Chunk, target: Callable[[int], Distribution], uniforms: Uniforms) -> tuple[int, int]:
    """Judge a chunk as `verify_sampling` does, by the verifier's distribution `target` of each place."""
    for i, drafted in enumerate(chunk.ids.tolist()):
        p = target(i)
        if chunk.distributions is None:
            if (drawn := draw(p, uniforms[i, 1])) != drafted:
                return i, drawn
            continue
        q = chunk.distributions[i]
        if uniforms[i, 0] * probability(q, drafted) >= probability(p, drafted):
            return i, draw(residual(p, q), uniforms[i, 1])
    last = len(chunk)
    return last, draw(target(last), uniforms[last, 1])


def _target(row: Floats, sampling: Sampling, text: Ids, drafted: Ids, grammar: ReplyGrammar | None) -> Distribution:
    """Return the verifier's distribution after `text` and `drafted`."""
    if sampling.penalties is None and grammar is None:
        return exact_distribution(row, sampling)
    before = np.concatenate((text, drafted))
    if sampling.penalties is not None:
        row = penalised(row, before, sampling.penalties)
    found = exact_distribution(row, sampling)
    return found if grammar is None else grammar.limited(found, row, before)


LIKELY = 0.1
"""The threshold of equation 3 of CoordGen: a rejected token of this probability may still come."""


def plausible(chunk: Chunk, rows: Rows, accepted: int) -> tuple[bool, ...]:
    """Return which tokens of `chunk` have at least probability `LIKELY` in their row of `rows` (len(chunk) + 1,
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


def residual(p: Distribution, q: Distribution) -> Distribution:
    """Return max(0, p - q), renormalised: the distribution to draw from after a rejection.

    It is over the full support of p; q is aligned by token id, and a token that q cut off keeps all of its p.
    """
    left = p.probs.astype(np.float64)
    places = p.ids.searchsorted(q.ids)
    places[places == len(p.ids)] = 0
    shared = p.ids[places] == q.ids
    left[places[shared]] -= q.probs[shared]
    ids = p.ids[left > 0.0]
    left = left[left > 0.0]
    if not len(ids):  # p equals q up to rounding: a rejection has no weight, and p is what remains
        return p
    return Distribution(ids, (left / left.sum()).astype(np.float32))


def check_chunk(chunk: Chunk, n_vocab: int) -> None:
    """Check a chunk that was received over a link.

    Raises:
        ProtocolError: an id is outside the vocabulary, or the distributions are invalid.
    """
    _check_ids(chunk.ids, n_vocab, "A drafted token")
    if chunk.distributions is None:
        return
    if len(chunk.distributions) != len(chunk):
        found = len(chunk.distributions)
        raise ProtocolError(f"{len(chunk)} drafted tokens came with {found} distributions.", SAME_VERSION)
    for drafted, q in zip(chunk.ids.tolist(), chunk.distributions, strict=True):
        _check_ids(q.ids, n_vocab, "A token of a draft's distribution")
        if len(q.ids) != len(q.probs) or np.any(np.diff(q.ids) <= 0):
            raise ProtocolError("A draft's distribution is not in ascending order of distinct tokens.", SAME_VERSION)
        if not np.all(q.probs > 0) or not abs(float(q.probs.sum(dtype=np.float64)) - 1.0) < 1e-3:
            raise ProtocolError("The probabilities of a draft's distribution do not sum to 1.", SAME_VERSION)
        if probability(q, drafted) == 0.0:
            raise ProtocolError(f"Token {drafted} has probability 0 in the distribution sent with it.", SAME_VERSION)


def _check_ids(ids: Ids, n_vocab: int, what: str) -> None:
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= n_vocab):
        raise ProtocolError(f"{what} is outside the vocabulary of {n_vocab} tokens.", SAME_VERSION)
