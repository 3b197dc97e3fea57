"""The verdict on a draft does not depend on the portions in which it is judged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from edgellm.spec.protocols import VerifyRequest
from edgellm.spec.types import GREEDY, Chunk, Floats, Ids, Sampling, Verdict
from edgellm.spec.verification import Judgement
from edgellm.verifier.scheduler import Job

VOCABULARY, END = 8, 7
PROMPT = np.array([1, 2], np.int32)


def row(text: Ids) -> Floats:
    """Return the logits after `text` of a model that sees all of it."""
    rng = np.random.default_rng([*text.tolist()])
    return rng.normal(0.0, 2.0, VOCABULARY).astype(np.float32)


@dataclass
class Judged:
    """A verdict, and what it took."""

    verdict: Verdict
    rows: int


def judged(draft: Chunk, portions: list[int], sampling: Sampling, extra: int, end: int = END) -> Judged:
    """Return the verdict on `draft`, of which a pass has as many tokens as the next of `portions` says."""
    job = Job(VerifyRequest(0, sampling, 0, PROMPT, draft, extra, logprobs=1), PROMPT)
    computed = 0
    for number in range(200):
        drafted = min(portions[number % len(portions)], job.drafted)
        text = np.concatenate((job.ids, job.remaining.ids[:drafted]))
        rows = np.array([row(text[: len(job.ids) + place]) for place in range(drafted + 1)])
        before, computed = len(job.ids), computed + job.unseen + drafted
        needs_pass = job.judge(rows, drafted, lambda token: token == end)
        assert job.request.computed <= before + drafted  # nothing counts as computed that was not
        if not needs_pass:
            return Judged(job.verdict(), computed)
        assert job.unseen == 1
    raise AssertionError("it never ends")


@given(
    st.integers(0, 9),
    st.integers(0, 12),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from([GREEDY, Sampling(temperature=1.0, seed=3)]),
)
def test_a_verdict_in_portions_is_the_verdict_at_once(
    right: int, length: int, portions: list[int], extra: int, copied: bool, sampling: Sampling
) -> None:
    own = judged(Chunk(), [0], sampling, 12).verdict.tokens
    draft = np.resize(np.concatenate((own[:right], [0])), length).astype(np.int32)
    chunk = Chunk(ids=draft, confidence=np.ones(length, np.float32), retrieved=copied)
    whole, parts = (judged(chunk, sizes, sampling, extra).verdict for sizes in ([length], portions))
    assert (parts.accepted, parts.tokens.tolist()) == (whole.accepted, whole.tokens.tolist())
    assert [entry.own for entry in parts.logprobs] == [entry.own for entry in whole.logprobs]
    if copied:
        assert parts.plausible is not None
        assert whole.plausible is not None
        assert parts.plausible[: parts.accepted + 1] == whole.plausible[: parts.accepted + 1]


def test_a_portion_is_not_computed_twice() -> None:
    own = judged(Chunk(), [0], GREEDY, 8, end=-1).verdict.tokens[:6]
    draft = Chunk(ids=own, confidence=np.ones(6, np.float32))
    assert {judged(draft, sizes, GREEDY, 0, end=-1).rows for sizes in ([6], [1], [2], [0], [4, 1])} == {len(PROMPT) + 6}


def test_nothing_is_written_after_an_end_that_the_last_row_of_a_portion_judged() -> None:
    own = judged(Chunk(), [0], GREEDY, 12).verdict.tokens
    assert own[-1] == END
    judgement = Judgement(VerifyRequest(0, GREEDY, 0, PROMPT, Chunk(), extra=12), PROMPT)
    assert judgement.judge(row(PROMPT)[None], 0, lambda token: token == END)
    judgement.remaining = Chunk(ids=own[1:], confidence=np.ones(len(own) - 1, np.float32))
    drafted = len(own) - 2  # all but the end
    text = np.concatenate((PROMPT, own))
    rows = np.array([row(text[: len(PROMPT) + 1 + place]) for place in range(drafted + 1)])
    assert not judgement.judge(rows, drafted, lambda token: token == END)
    assert judgement.verdict().tokens.tolist() == own.tolist()
