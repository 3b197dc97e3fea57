"""A real verifier process dies or hangs in the middle of replies.

The long run is `python -m bench.robustness.kill_verifier`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.robustness.kill_verifier import Device, run
from edgellm.engine import Model
from edgellm.services.client.verifier_client import RemoteVerifier
from edgellm.services.server.servers import VerifierServer
from edgellm.spec.types import Ids, Sampling, Source
from testkit.traced_reply import Judge, Written
from tests.services.conftest import ANYWHERE, PATIENT, exact, prompt

__all__ = ["exact", "prompt"]


@pytest.mark.nightly
def test_no_token_is_lost_or_repeated_when_the_verifier_dies_or_hangs(f32_pair: tuple[Path, Path]) -> None:
    outcomes = run(*f32_pair, replies=5, seed=1)  # four kills, one of them in a slow reply, and one hang
    assert [outcome.problems for outcome in outcomes] == [()] * 5
    assert sum(outcome.hit for outcome in outcomes) >= 3


@pytest.mark.nightly
def test_nor_when_replies_are_drawn(f32_pair: tuple[Path, Path]) -> None:
    outcomes = run(*f32_pair, replies=3, seed=2, temperature=0.8)
    assert [outcome.problems for outcome in outcomes] == [()] * 3
    assert sum(outcome.hit for outcome in outcomes) >= 1


@pytest.fixture(scope="module")
def draft(f32_pair: tuple[Path, Path]) -> Iterator[Model]:
    with Model.load(f32_pair[0]) as model:
        yield model


@pytest.fixture(scope="module")
def reply(draft: Model, exact: Model, prompt: Ids) -> Written:
    with VerifierServer(exact, ANYWHERE, sessions=1, threads=1) as server:
        remote = RemoteVerifier(server.address, draft.vocabulary, timing=PATIENT)
        written = Device(draft, remote).write(prompt)
        remote.close()
    return written


def test_the_judge_finds_nothing_wrong_with_a_sound_reply(reply: Written, draft: Model, exact: Model) -> None:
    assert Judge(draft, exact).problems(reply, reply) == []


def test_the_judge_finds_what_is_lost_repeated_or_wrongly_marked(reply: Written, draft: Model, exact: Model) -> None:
    tokens = reply.tokens
    ids = [token.id for token in tokens]
    at = next(i for i in range(1, len(ids) - 1) if ids[i] != ids[i + 1])
    other = (ids[at] + 1) % exact.n_vocab
    cases = {
        "lost": [*tokens[:at], *tokens[at + 1 :], tokens[-1]],
        "repeated": [*tokens[: at + 1], *tokens[at:-1]],
        "short": tokens[:-1],
        "another": [*tokens[:at], replace(tokens[at], id=other), *tokens[at + 1 :]],
        "another's": [*tokens[:at], replace(tokens[at], id=other, source=Source.DRAFT), *tokens[at + 1 :]],
    }
    for name, changed in cases.items():
        assert Judge(draft, exact).problems(replace(reply, tokens=changed), reply), name
    gap = replace(reply, rounds=[*reply.rounds[:3], *reply.rounds[4:]])
    assert Judge(draft, exact).problems(gap, reply)


def test_the_judge_replays_what_was_drawn(draft: Model, exact: Model, prompt: Ids) -> None:
    with VerifierServer(exact, ANYWHERE, sessions=1, threads=1) as server:
        remote = RemoteVerifier(server.address, draft.vocabulary, timing=PATIENT)
        drawn = Device(draft, remote).write(prompt, sampling=Sampling(0.8, seed=5))
        remote.close()
    judge = Judge(draft, exact)
    assert judge.problems(drawn, drawn) == []
    other = replace(drawn, sampling=Sampling(0.8, seed=6))
    assert any("not what the seed draws" in problem for problem in judge.problems(other, other))
    colder = replace(drawn, sampling=Sampling(0.8, top_k=2, seed=5))
    assert any("cannot have been drawn" in problem for problem in judge.problems(colder, colder))
