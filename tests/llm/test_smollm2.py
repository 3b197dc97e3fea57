"""The default pair with its real weights, which `./start` downloads: drafts change nothing of what SmolLM2 writes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from edgellm.errors import ModelNotFound
from edgellm.llm import LLM
from edgellm.storage import resolve
from edgellm.storage.default_pair import SMOLLM2
from tests.spec.real import ids

try:  # before the tests have a home of their own
    PAIR = resolve(SMOLLM2.draft), resolve(SMOLLM2.verifier)
except ModelNotFound as missing:
    pytest.skip(str(missing), allow_module_level=True)

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about the sea.",
    "Repeat this list: apples, pears, plums, apples, pears, plums, apples, pears, plums.",
)
TOKENS = 48


@pytest.fixture(scope="module")
def both() -> Iterator[LLM]:
    with LLM.open(*PAIR, threads=1) as pair:
        yield pair


@pytest.fixture(scope="module")
def verifier() -> Iterator[LLM]:
    with LLM.open("none", PAIR[1], threads=1) as alone:
        yield alone


@pytest.mark.usefixtures("rows_are_cheap")
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 7}], ids=["greedy", "sampled"])
def test_a_reply_with_drafts_is_the_reply_without(both: LLM, verifier: LLM, sampling: dict[str, Any]) -> None:
    found = [both.reply(question, max_tokens=TOKENS, **sampling) for question in QUESTIONS]
    for question, reply in zip(QUESTIONS, found, strict=True):
        assert ids(reply) == ids(verifier.reply(question, max_tokens=TOKENS, retrieval="off", **sampling)), question
    assert sum(reply.summary.accepted for reply in found) > 0
    assert sum(reply.summary.retrieved for reply in found) > 0
