"""From rows to verdicts, without a server."""

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from edgellm.spec.sampling import distribution, draw
from edgellm.spec.types import GREEDY, Chunk, Distribution, Sampling
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier, Top, verdict
from tests.engine.logits import ids

SIZE = 4  # of the vocabulary
LENGTH = 3  # tokens of a text
ROUNDS = 1200
LOGITS = np.random.default_rng(3).normal(0.0, 1.2, (SIZE + 1, SIZE)).astype(np.float32)
"""Row t follows token t, the last one an empty text."""
DRAFT = np.random.default_rng(4).normal(0.0, 1.0, (SIZE + 1, SIZE)).astype(np.float32)
SAMPLINGS = {
    "all": Sampling(temperature=0.9, top_k=SIZE, top_p=1.0),
    "truncated": Sampling(temperature=1.1, top_k=3, top_p=0.9),
    "min-p": Sampling(temperature=1.3, top_k=SIZE, top_p=1.0, min_p=0.3),
}


def top(text: list[int]) -> Top:
    return _top(text[-1] if text else SIZE)


@cache
def _top(last: int) -> Top:
    found = LOGITS[last] - math.log(float(np.exp(LOGITS[last]).sum()))
    return tuple((token, float(found[token])) for token in (-found).argsort())


def shares(text: list[int], sampling: Sampling) -> Distribution:
    """The verifier's distribution behind a text."""
    return _shares(text[-1] if text else SIZE, replace(sampling, seed=0), drafts=False)


@cache
def _shares(last: int, sampling: Sampling, *, drafts: bool) -> Distribution:
    return distribution((DRAFT if drafts else LOGITS)[last], sampling)


def request(text: list[int], draft: list[int], sampling: Sampling) -> RowRequest:
    return RowRequest(ids(*text), ids(*draft), sampling, top=sampling.top_k)


def drafted(text: list[int], n: int, sampling: Sampling, number: int) -> Chunk:
    """A draft that the draft model draws."""
    now = list(text)
    for _ in range(n):
        q = _shares(now[-1] if now else SIZE, replace(sampling, seed=0), drafts=True)
        now.append(draw(q, number, len(now)))
    return Chunk(ids=ids(*now[len(text) :]))


def drawn_by(server: np.random.Generator, shares: Distribution) -> int:
    return int(server.choice(shares.ids, p=shares.probs / shares.probs.sum(dtype=np.float64)))


def written(tier: Tier, sampling: Sampling, number: int, server: np.random.Generator) -> tuple[int, ...]:
    """The first tokens of a text that is written by verdicts."""
    seeded, text = replace(sampling, seed=number), list[int]()
    while len(text) < LENGTH:
        chunk = drafted(text, 2, seeded, number)
        draft = chunk.ids.tolist()
        prefixes = [text + draft[:n] for n in range(3)]
        if tier is Tier.SCORE:
            rows = [Row(top(prefix)[0][0], top(prefix)) for prefix in prefixes]
        elif tier is Tier.FAN_OUT:
            rows = [Row(drawn_by(server, shares(prefix, seeded))) for prefix in prefixes]
        else:
            now, rows = list(text), []
            for _ in prefixes:
                now.append(drawn_by(server, shares(now, seeded)))
                rows.append(Row(now[-1]))
        found = verdict(request(text, draft, seeded), RowReply(tier, tuple(rows)), SIZE)
        text += [*draft[: found.accepted], *found.tokens.tolist()]
    return tuple(text[:LENGTH])


def expected(sampling: Sampling) -> Iterator[tuple[tuple[int, ...], float]]:
    for text in itertools.product(range(SIZE), repeat=LENGTH):
        chance = 1.0
        for n, token in enumerate(text):
            p = shares(list(text[:n]), sampling)
            chance *= dict(zip(p.ids.tolist(), p.probs.tolist(), strict=True)).get(token, 0.0)
        yield text, chance


@pytest.mark.parametrize("tier", Tier)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_texts_are_distributed_as_the_verifiers(tier: Tier, name: str) -> None:
    sampling, server = SAMPLINGS[name], np.random.default_rng(11)
    seen = Counter(written(tier, sampling, number, server) for number in range(ROUNDS))
    chances = dict(expected(sampling))
    assert set(seen) <= {text for text, chance in chances.items() if chance > 0}
    cells = [(seen[text], ROUNDS * chance) for text, chance in chances.items() if ROUNDS * chance >= 5.0]
    chi_square = sum((observed - mean) ** 2 / mean for observed, mean in cells)
    degrees = len(cells) - 1
    limit = degrees * (1.0 - 2.0 / (9.0 * degrees) + 3.29 * math.sqrt(2.0 / (9.0 * degrees))) ** 3  # p = 0.0005
    assert chi_square < limit


@pytest.mark.parametrize(
    ("tier", "own", "draft", "accepted", "tokens"),
    [
        (Tier.SCORE, [1, 2, 3], [1, 2], 2, [3]),
        (Tier.SCORE, [1, 2, 3], [1, 0], 1, [2]),
        (Tier.SCORE, [1, 2, 3], [0, 2], 0, [1]),
        # All that a server wrote is used.
        (Tier.CONTINUE, [1, 2, 3], [1, 2], 2, [3]),
        (Tier.CONTINUE, [1, 2, 3], [1, 0], 1, [2, 3]),
        (Tier.CONTINUE, [1, 2, 3], [0, 0], 0, [1, 2, 3]),
        # The draft goes on behind the end of the server's text: its last token is the server's own.
        (Tier.CONTINUE, [1, 3], [1, 3, 2], 1, [3]),
        (Tier.CONTINUE, [1, 3], [1, 3], 1, [3]),
        # A draft that ends the turn where the server does is accepted: a gate would learn else that ends are rejected.
        (Tier.CONTINUE, [1, 2], [1, 2], 2, [2]),
    ],
)
def test_the_servers_own_tokens_are_compared_with_the_draft(
    tier: Tier, own: list[int], draft: list[int], accepted: int, tokens: list[int]
) -> None:
    found = verdict(
        request([0], draft, GREEDY), RowReply(tier, tuple(map(Row, own))), SIZE, is_eog=lambda token: token == 2
    )
    assert (found.accepted, found.tokens.tolist()) == (accepted, tokens)
    assert found.passes == (len(own) if tier is Tier.CONTINUE else 1)


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Row(1), Row(1)],
        [Row(1), Row(SIZE), Row(1)],
        [Row(1), Row(-1), Row(1)],
        [Row(1, ((1, math.nan),)), Row(1), Row(1)],
        [Row(1, ((1, -math.inf),)), Row(1), Row(1)],
        [Row(1, ((1, 4.27e10),)), Row(1), Row(1)],
        [Row(1, ((SIZE, -1.0),)), Row(1), Row(1)],
        [Row(1, ((1, -2.0), (1, -2.0))), Row(1), Row(1)],
        [Row(1, ((1, -0.1), (2, -0.1))), Row(1), Row(1)],
    ],
    ids=["none", "too-few", "outside", "negative", "nan", "infinite", "memory", "top-outside", "twice", "more-than-1"],
)
def test_rows_that_cannot_be_are_refused(rows: list[Row]) -> None:
    with pytest.raises(RowsUnusable):
        verdict(request([0], [1, 1], GREEDY), RowReply(Tier.SCORE, tuple(rows)), SIZE)


def test_too_few_likeliest_tokens_are_not_drawn_from() -> None:
    sampling = Sampling(temperature=1.0, top_k=3)
    for rows in ([Row(1, top([0])[:2])], [Row(1)]):
        with pytest.raises(RowsUnusable):
            verdict(request([0], [], sampling), RowReply(Tier.SCORE, tuple(rows)), SIZE)
