"""More devices than the verifier has room for, all at once, and each gets the verifier's own text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Model
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.drafters.model import ModelDrafter
from edgellm.spec.gates.rules import AlwaysGate
from edgellm.spec.loop import generate
from edgellm.spec.protocols import GenerationLimits, GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import GREEDY, Ids, Sampling, Token
from tests.services.conftest import ANYWHERE, PATIENT, POSITIONS, Alone

DEVICES, SLOTS, TOKENS = 6, 3, 12


@pytest.fixture
def prompts(exact: Model) -> list[Ids]:
    return [exact.tokenize(f"Device {i} asks where the {thing} is, and why. " * (i + 1)) for i, thing in enumerate(
        ("mug", "key", "lamp", "book", "coat", "bag")
    )]  # fmt: skip


def reply(draft: Model, remote: RemoteVerifier, prompt: Ids, sampling: Sampling) -> list[int]:
    """One device's reply, drafted by the draft model."""
    drafter = ModelDrafter(draft, Context(draft, ContextSpec(n_ctx=POSITIONS, threads=1)))
    events = generate(
        GenerationState(prompt, sampling, GenerationLimits(TOKENS, POSITIONS)),
        vocabulary=draft,
        drafter=drafter,
        gate=AlwaysGate(),
        verifier=remote,
        stats=Summary(),
    )
    written = [event.id for event in events if isinstance(event, Token)]
    drafter.close()
    return written


def upto_end(model: Model, ids: list[int]) -> list[int]:
    ends = [i for i, token in enumerate(ids) if model.is_eog(token)]
    return ids[: ends[0]] if ends else ids


@pytest.mark.parametrize("shared_connection", [True, False])
def test_every_reply_is_the_verifiers_own(
    f32_pair: tuple[Path, Path], exact: Model, alone: Alone, prompts: list[Ids], shared_connection: bool
) -> None:
    with (
        Model.load(f32_pair[0]) as draft,
        VerifierServer(exact, ANYWHERE, sessions=SLOTS, context=POSITIONS, threads=1) as server,
        ThreadPoolExecutor(DEVICES) as pool,
    ):
        remotes = [
            RemoteVerifier(server.address, draft.vocabulary, timing=PATIENT)
            for _ in range(1 if shared_connection else DEVICES)
        ]
        replies = [
            pool.submit(reply, draft, remotes[i % len(remotes)], prompt, GREEDY) for i, prompt in enumerate(prompts)
        ]
        for prompt, written in zip(prompts, replies, strict=True):
            assert written.result() == upto_end(exact, alone(prompt, TOKENS))
        for remote in remotes:
            remote.close()
        counters = server.counters
    assert counters.evictions > 0
    assert counters.widest <= SLOTS  # that batches are shared at all is tested where time plays no part


def test_a_seed_gives_the_same_reply_in_company_and_alone(
    f32_pair: tuple[Path, Path], exact: Model, prompts: list[Ids]
) -> None:
    """Random numbers depend on seed and position alone, not on evictions or on who else is there."""
    sampling = Sampling(temperature=0.7, seed=5)
    with (
        Model.load(f32_pair[0]) as draft,
        VerifierServer(exact, ANYWHERE, sessions=SLOTS, context=POSITIONS, threads=1) as server,
        ThreadPoolExecutor(DEVICES) as pool,
    ):
        remote = RemoteVerifier(server.address, draft.vocabulary, timing=PATIENT)
        together = list(pool.map(lambda prompt: reply(draft, remote, prompt, sampling), prompts))
        one_by_one = [reply(draft, remote, prompt, sampling) for prompt in prompts]
        remote.close()
    assert together == one_by_one
    assert len({tuple(np.array(ids)[:8]) for ids in together}) > 1
