"""Verify requests as tests write them."""

from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import GREEDY, NO_IDS, Chunk, Ids, Sampling


def request(
    round: int,  # noqa: A002
    position: int,
    prefix: Ids,
    draft: Chunk,
    extra: int = 0,
    logprobs: int | None = None,
) -> VerifyRequest:
    """Return a greedy request as it goes over a link."""
    return VerifyRequest(0, GREEDY, position, prefix, draft, extra, logprobs, round)


def judged(draft: Chunk, sampling: Sampling, position: int, logits: bool = False) -> VerifyRequest:
    """Return a request as it goes through a mesh, whose parcels bring the tokens before the draft."""
    return VerifyRequest(0, sampling, position, NO_IDS, draft, logits=logits)
