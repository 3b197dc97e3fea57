"""Requests that wait for a batch."""

from __future__ import annotations

import numpy as np

from edgellm.spec.types import GREEDY, NO_IDS, Chunk
from edgellm.spec.verifier import Tenant, VerifyRequest
from edgellm.verifier.judgement import Job


def want(session: int, unseen: int, drafted: int, arrival: int = 0, device: str = "", turn: int = 0) -> Job:
    draft = Chunk(np.zeros(drafted, np.int32))
    request = VerifyRequest(session, GREEDY, 0, NO_IDS, draft, tenant=Tenant(device))
    return Job(request, np.zeros(unseen, np.int32), arrival=arrival, turn=turn)
