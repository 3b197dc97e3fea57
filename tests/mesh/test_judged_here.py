"""Rules that a stage cannot follow: the device with the text judges drafts, from logits that the last stage sends."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec
from edgellm.mesh.coordinator import Mesh
from edgellm.mesh.verifier import MeshVerifier
from edgellm.spec.protocols import Verifier
from edgellm.spec.state import GenerationState, VerdictTerms
from edgellm.spec.types import Chunk, Constraint, Ids, Penalties, Sampling, Verdict
from edgellm.verifier.in_process import ContextPool, LocalVerifier
from tests.engine.logits import some_ids
from tests.mesh.household import Cut, Device, Whole, even

PROMPT = some_ids(24, 2000, 3)
SCHEMA = '{"type": "object", "properties": {"day": {"type": "string"}}, "required": ["day"]}'
HEAVY = Penalties(repeat=1.3, frequency=2.0, presence=1.0, bias=((7, 3.0),), start=len(PROMPT))
RULES = {
    "penalties": Sampling(penalties=HEAVY),
    "penalties, drawn": Sampling(0.9, seed=5, penalties=HEAVY),
    "min-p": Sampling(2.0, seed=5, min_p=0.01),
    "schema": Sampling(constraint=Constraint(SCHEMA, len(PROMPT))),
    "schema, drawn": Sampling(0.9, seed=5, constraint=Constraint(SCHEMA, len(PROMPT))),
}


@pytest.fixture(scope="module")
def mesh(verifier_cut: Cut, whole: Whole) -> Iterator[MeshVerifier]:
    devices = [Device(f"device {at}", verifier_cut.layers) for at in range(2)]
    opened = Mesh(devices, even(verifier_cut.work, [one.name for one in devices]), verifier_cut.work)
    verifier = MeshVerifier(opened, whole.model.is_eog, grammar=whole.model.grammar)
    yield verifier
    verifier.close()


@pytest.fixture(scope="module")
def local(whole: Whole) -> Iterator[LocalVerifier]:
    n_ctx = 256
    verifier = LocalVerifier(
        whole.model, ContextPool(lambda: Context(whole.model, ContextSpec(n_ctx=n_ctx, threads=1))), n_ctx
    )
    yield verifier
    verifier.close()


def verdicts(verifier: Verifier, state: GenerationState, tokens: int, extra: int = 0) -> list[Verdict]:
    """The verdicts of a reply whose drafts are its own tokens, then others."""
    text, found = PROMPT, []
    session = verifier.open(state)
    while len(text) < len(PROMPT) + tokens:
        ahead = session.submit(text, Chunk()).result().tokens
        draft = np.append(ahead, np.array([9, 11], dtype=np.int32)).astype(np.int32)
        found.append(session.submit(text, Chunk(draft), extra).result())
        text = np.concatenate((text, draft[: found[-1].accepted], found[-1].tokens)).astype(np.int32)
    session.close()
    return found


def told(all_of_them: list[Verdict]) -> list[tuple[int, list[int]]]:
    return [(verdict.accepted, verdict.tokens.tolist()) for verdict in all_of_them]


@pytest.mark.parametrize("rule", RULES)
def test_verdicts_are_those_of_the_whole_model(mesh: MeshVerifier, local: LocalVerifier, rule: str) -> None:
    state = GenerationState(PROMPT, RULES[rule])
    over_devices = verdicts(mesh, state, 16)
    assert told(over_devices) == told(verdicts(local, state, 16))
    assert sum(verdict.accepted for verdict in over_devices) > 0
    assert told(over_devices) != told(verdicts(mesh, GenerationState(PROMPT), 16))  # the rule changes the text


def test_log_probabilities_are_those_of_the_whole_model(mesh: MeshVerifier, local: LocalVerifier) -> None:
    assert mesh.capabilities.logprobs
    state = GenerationState(PROMPT, terms=VerdictTerms(3))
    pairs = zip(verdicts(mesh, state, 12, extra=2), verdicts(local, state, 12, extra=2), strict=True)
    for here, there in pairs:
        assert len(here.logprobs) == len(there.logprobs) == here.accepted + len(here.tokens)
        for one, other in zip(here.logprobs, there.logprobs, strict=True):
            assert one.own == pytest.approx(other.own, abs=1e-4)
            assert one.ids.tolist() == other.ids.tolist()


def test_no_more_of_a_draft_is_sent_than_there_is_room_for_logits(
    mesh: MeshVerifier, monkeypatch: pytest.MonkeyPatch, whole: Whole
) -> None:
    monkeypatch.setattr("edgellm.mesh.verifier.MAX_LOGIT_BYTES", 3 * 4 * mesh.mesh.work.n_vocab)
    own: Ids = np.array(whole.text(PROMPT, 6), dtype=np.int32)
    plain = mesh.open(GenerationState(PROMPT))
    assert plain.submit(PROMPT, Chunk(own[:5])).result().accepted == 5
    plain.close()
    session = mesh.open(GenerationState(PROMPT, terms=VerdictTerms(0)))
    verdict = session.submit(PROMPT, Chunk(own[:5])).result()
    assert (verdict.accepted, verdict.tokens.tolist()) == (2, own[2:3].tolist())
    session.close()
