"""Drafts that are trees: the text is the verifier's own, and a twig that stands is taken over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, Model
from edgellm.spec.curve import CostCurve
from edgellm.spec.gates import AlwaysGate
from edgellm.spec.local import LocalVerifier
from edgellm.spec.loop import Limits, generate
from edgellm.spec.options import SOURCES
from edgellm.spec.pool import ContextPool
from edgellm.spec.records import GREEDY, Chunk, Ids, Sampling, Source, Token, Twig, Verdict, standing
from edgellm.spec.retrieval.memory import Memory, Talk
from edgellm.spec.stats import Stats

POSITIONS, MOST = 512, 32
FREE = CostCurve((1, 64), (1.0, 1.001))


@pytest.fixture(scope="module")
def model(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[1]) as loaded:
        yield loaded


@pytest.fixture
def verifier(model: Model) -> Iterator[LocalVerifier]:
    found = LocalVerifier(
        model, ContextPool(lambda: Context(model, n_ctx=POSITIONS, n_seq=3, spare=64, threads=1)), POSITIONS
    )
    yield found
    found.close()


def chunk(ids: list[int], *twigs: tuple[int, list[int]]) -> Chunk:
    sure = np.full(len(ids), 0.5, dtype=np.float32)
    grown = tuple(Twig(at, np.array(some, np.int32), np.full(len(some), 0.5, np.float32)) for at, some in twigs)
    return Chunk(np.array(ids, np.int32), sure, retrieved=True, twigs=grown)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1.0, seed=3)], ids=["greedy", "sampled"])
def test_the_branch_that_stands_is_the_one_that_the_verifier_writes(
    model: Model, verifier: LocalVerifier, sampling: Sampling
) -> None:
    prompt = np.arange(300, 340, dtype=np.int32)
    plain = verifier.open(sampling)
    text = prompt
    for _ in range(9):
        text = np.append(text, plain.submit(text, Chunk()).result().tokens).astype(np.int32)
    plain.close()
    right = text[len(prompt) :].tolist()
    wrong = [(token + 1) % model.n_vocab for token in right]
    trees = {
        "the draft itself": (chunk(right[:4], (1, wrong[1:3])), 4, None),
        "a twig": (chunk([right[0], wrong[1], right[2]], (0, wrong[:1]), (1, right[1:5])), 5, 1),
        "a twig that is right in part": (chunk([wrong[0]], (0, [right[0], wrong[1], right[2]])), 1, 0),
        "none": (chunk([right[0], wrong[1]], (0, wrong[:2]), (1, [(wrong[1] + 1) % model.n_vocab])), 1, None),
    }
    for name, (tree, accepted, twig) in trees.items():
        session = verifier.open(sampling)
        verdict = session.submit(prompt, tree).result()
        assert (verdict.accepted, verdict.twig) == (accepted, twig), name
        assert verdict.tokens.tolist() == right[accepted : accepted + 1], name
        assert standing(tree, verdict).ids[:accepted].tolist() == right[:accepted], name
        grown = np.concatenate((prompt, text[len(prompt) : len(prompt) + accepted + 1]))  # and goes on from there
        assert session.submit(grown, Chunk()).result().tokens.tolist() == right[accepted + 1 : accepted + 2], name
        session.close()


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.9, seed=5)], ids=["greedy", "sampled"])
def test_with_trees_the_text_is_what_it_is_without_drafts(
    model: Model, verifier: LocalVerifier, sampling: Sampling
) -> None:
    from tests.spec.real import case

    known = Memory(SOURCES, FREE, lambda _token: False, model.is_eog, twigs=2)
    twigs = 0

    def written(prompt: Ids, copies: bool) -> list[int]:
        nonlocal twigs
        own = known.take(prompt) if copies else None
        events = generate(
            prompt, alphabet=model, drafter=own, gate=AlwaysGate(), verifier=verifier, sampling=sampling,
            limits=Limits(MOST, POSITIONS, 24), stats=Stats(), watch=watch,
        )  # fmt: skip
        found = [event for event in events if isinstance(event, Token)]
        if copies:
            known.give()
        assert copies or not any(token.source is Source.RETRIEVED for token in found)
        return [token.id for token in found]

    def watch(_chunk: Chunk, _written: int, verdict: Verdict | None, _drafting: float, _waiting: float) -> None:
        nonlocal twigs
        twigs += verdict is not None and verdict.twig is not None

    for number in (2, 5, 6, 5, 2, 7, 8, 9, 2, 5):
        prompt = model.chat_prompt(case(number))
        wanted = written(prompt, False)
        assert written(prompt, True) == wanted
        if number % 3:  # half of what is remembered is another's reply
            known.add(Talk(prompt.tolist(), wanted[: len(wanted) // 2] + wanted[:3] + wanted[len(wanted) // 2 :]))
        known.add(Talk(prompt.tolist(), wanted))
    assert twigs > 0
