"""Drafts of a speculator change the number of passes, and not the text."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from edgellm.engine import Context, ContextSpec, Message, Model, ModelFile
from edgellm.engine.model import LoadSpec
from edgellm.spec.drafters.model import ChunkBuilder
from edgellm.spec.drafters.speculator import SpeculatorDrafter, draft
from edgellm.spec.protocols import DraftRules, GenerationLimits, GenerationState
from edgellm.spec.stats import Summary
from edgellm.spec.types import GREEDY, Chunk, Penalties, Sampling, Source, Token
from edgellm.verifier.in_process import LocalVerifier
from testkit.gguf.architectures import WITH_MTP
from tests.conftest import Architectures, Heads
from tests.spec.running import going, tokens

QUESTION = "Where is the mug, and where is the key?"
PENALTIES = Penalties(repeat=1.3, frequency=0.4, presence=0.2, bias=((7, -2.0),))
RULES = [
    GREEDY,
    Sampling(temperature=0.7, seed=3),
    Sampling(temperature=1.3, top_k=0, top_p=1.0, seed=4),
    Sampling(penalties=PENALTIES),
    Sampling(temperature=0.8, seed=5, min_p=0.02, penalties=PENALTIES),
]
MOST = 24

Verify = Callable[[Model], LocalVerifier]


@pytest.fixture
def verify() -> Iterator[Verify]:
    with ExitStack() as closing:

        def opened(model: Model) -> LocalVerifier:
            verifier = LocalVerifier(model, ContextSpec(n_ctx=256, threads=1, rolls_back=True, speculates=True))
            closing.callback(verifier.close)
            return verifier

        yield opened


def run(
    model: Model, verifier: LocalVerifier, sampling: Sampling, *, drafts: bool, most: int = MOST
) -> tuple[list[Token], Summary]:
    state = GenerationState(
        model.chat_prompt([Message("user", QUESTION)]), sampling, GenerationLimits(most, 256, gamma=4)
    )
    stats = Summary()
    drafter = SpeculatorDrafter(model.is_eog) if drafts else None
    return tokens(going(state, drafter, verifier, vocabulary=model, stats=stats)), stats


EAGLE3: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen35", {"own": True}),
    ("gpt-oss", {"layers": (1, 2, 4), "norms": True}),
]


@pytest.mark.parametrize(("name", "head"), [*((name, None) for name in WITH_MTP), *EAGLE3])
def test_the_text_is_the_verifiers_own_greedy_and_sampled(
    architectures: Architectures, heads: Heads, name: str, head: dict[str, Any] | None, verify: Verify
) -> None:
    path = architectures(name, mtp="useful") if head is None else architectures(name)
    eagle3 = None if head is None else ModelFile.open(heads(name, **head))
    with Model.load(path, LoadSpec(speculates=True, eagle3=eagle3)) as model:
        verifier, accepted = verify(model), 0
        for sampling in RULES:
            alone, _ = run(model, verifier, sampling, drafts=False)
            drafted, stats = run(model, verifier, sampling, drafts=True)
            assert [token.id for token in drafted] == [token.id for token in alone]
            accepted += stats.accepted
            assert stats.tested > stats.accepted
            assert {Source.ACCEPTED, Source.CORRECTED, Source.VERIFIER} >= {t.source for t in drafted} - {Source.BONUS}
        assert accepted > 0


def test_a_chunk_ends_where_further_tokens_do_not_pay(architectures: Architectures) -> None:
    with (
        Model.load(architectures("qwen35", mtp="useful"), LoadSpec(speculates=True)) as model,
        Context(model, ContextSpec(n_ctx=128, threads=1, speculates=True)) as context,
    ):
        assert context.speculator is not None
        ids = model.chat_prompt([Message("user", QUESTION)])
        context.decode(ids[:-1])

        layer, state = context.speculator, GenerationState(ids)

        def drafted(gamma: int, pays: int = 99) -> int:
            """Return the length of a chunk of which so many tokens pay."""
            chunk = ChunkBuilder(state, gamma, floors=[0.0] * (pays - 1) + [1.1] * gamma)
            return len(draft(layer, state, chunk, model.is_eog))

        assert [drafted(gamma) for gamma in (1, 5)] == [1, 5]
        assert [drafted(5, pays) for pays in (1, 3)] == [1, 3]
        assert len(draft(layer, state, ChunkBuilder(state, 5), lambda _token: True)) == 1


def test_nothing_is_drafted_where_not_even_a_sure_token_pays(architectures: Architectures, verify: Verify) -> None:
    with Model.load(architectures("glm4moe", mtp="useful"), LoadSpec(speculates=True)) as model:
        verifier = verify(model)
        for rules, drafted in ((DraftRules(), 1), (DraftRules(floors=lambda: [1.0]), 0)):
            state = GenerationState(model.chat_prompt([Message("user", QUESTION)]), rules=rules)
            session, drafter = verifier.open(state), SpeculatorDrafter(model.is_eog)
            session.submit(state.ids, Chunk())
            drafter.begin(state)
            state.append(5)
            assert len(drafter.propose(state, 1)) == drafted
            session.close()
