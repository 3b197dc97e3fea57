"""A verifier in another process that sleeps in the middle of a reply, and wakes up or is started again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from edgellm.engine import Model
from edgellm.errors import VerifierUnavailable
from edgellm.spec.protocols import GenerationState
from edgellm.spec.types import Chunk, Ids
from testkit.processes.verifier import VerifierProcess
from tests.services.conftest import Alone

ASLEEP = 40.0
"""Seconds: longer than what either side of a connection waits for a sign of life."""


@pytest.fixture
def process(exact: Model) -> Iterator[VerifierProcess]:
    with closing(VerifierProcess(exact.path)) as started:
        yield started


@pytest.mark.nightly
@pytest.mark.parametrize("ends", [False, True], ids=["wakes up", "is started again"])
def test_a_reply_goes_on_when_its_verifier_is_back(
    process: VerifierProcess, exact: Model, prompt: Ids, alone: Alone, ends: bool
) -> None:
    wanted = alone(prompt, 8)
    with closing(process.connect(exact)) as remote, closing(remote.open(GenerationState())) as session:
        text = prompt
        assert session.submit(text, Chunk()).result().tokens.tolist() == wanted[:1]
        process.hang()
        with pytest.raises(VerifierUnavailable):
            session.submit(text, Chunk(), extra=3).result()
        time.sleep(ASLEEP)
        assert not session.ready()
        (process.kill if ends else process.go_on)()
        end = time.monotonic() + 60
        while not session.ready():
            assert time.monotonic() < end
            time.sleep(0.01)
        for token in wanted:
            assert session.submit(text, Chunk()).result().tokens.tolist() == [token]
            text = np.append(text, token).astype(np.int32)
