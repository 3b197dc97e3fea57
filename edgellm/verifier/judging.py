"""The verification rule over the passes of one request: each pass completes more of its verdict (Synera, section
4.2)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgellm.engine import Rows, known
from edgellm.spec.sampling import logprobs
from edgellm.spec.types import Chunk, Verdict
from edgellm.spec.verification import judge, plausible
from edgellm.verifier.requests import VerifyRequest


def judge_pass(request: VerifyRequest, rows: Rows, drafted: int, is_eog: Callable[[int], bool]) -> bool:
    """Apply the rule to the first `drafted` tokens left of the draft; return whether another pass is needed.

    `rows` (drafted + 1, n_vocab) are logits: row i says what comes at place i. The tokens in the request's sequence
    that stand are the first `computed` ones afterwards. Raises EngineFailed where the logits are no numbers.
    """
    chunk, rest = cut(request.left, drafted)
    before = request.before
    accepted, token = judge(chunk, rows, request.sampling, position=before)
    request.passes += 1
    request.held += 1
    if not request.tokens:
        request.accepted += accepted
        if chunk.retrieved:
            request.plausible += plausible(chunk, rows, accepted)
    more = accepted == drafted and len(rest) > 0
    if not more:
        request.tokens.append(token)
    goes_on = more or (len(request.tokens) <= request.extra and not is_eog(token))
    # the last token is decoded again: its row judges the next one
    request.computed = before + accepted - more
    if goes_on or request.logprobs is not None:
        stands = chunk.ids[:accepted] if more else np.append(chunk.ids[:accepted], np.int32(token))
        if request.logprobs is not None and len(stands):
            request.said.extend(logprobs(known(rows, len(stands)), stands, request.logprobs))
        request.ids = np.concatenate((request.ids, stands))
        request.left = rest if more else NOTHING
    return goes_on


def verdict(request: VerifyRequest) -> Verdict:
    """Return the verdict of a request that needs no further pass."""
    likely = None
    if request.draft.retrieved:  # tokens that were not decoded count as plausible
        likely = (*request.plausible, *[True] * (len(request.draft) - len(request.plausible)))
    tokens, said = np.array(request.tokens, np.int32), tuple(request.said)
    return Verdict(request.accepted, tokens, request.seconds, passes=request.passes, plausible=likely, logprobs=said)


def survives(chunk: Chunk) -> list[float]:
    """Return for each token the chance, as its drafter saw it, that it and all before it stand; shape (n,)."""
    drafted = 0 if chunk.retrieved else len(chunk) - chunk.tail
    return [*chunk.confidence[:drafted].cumprod().tolist(), *chunk.confidence[drafted:].tolist()]


def cut(chunk: Chunk, n: int) -> tuple[Chunk, Chunk]:
    """Return the first `n` tokens of a draft, and the rest."""
    if n >= len(chunk):
        return chunk, NOTHING
    drawn, left = chunk.distributions, len(chunk) - n
    first, rest = (None, None) if drawn is None else (drawn[:n], drawn[n:])
    head = Chunk(
        chunk.ids[:n], chunk.confidence[:n], distributions=first, retrieved=chunk.retrieved,
        tail=max(0, chunk.tail - left),
    )  # fmt: skip
    tail = Chunk(
        chunk.ids[n:], chunk.confidence[n:], distributions=rest, retrieved=chunk.retrieved,
        tail=min(chunk.tail, left),
    )  # fmt: skip
    return head, tail


NOTHING = Chunk()
