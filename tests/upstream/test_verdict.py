"""From rows to verdicts, without a server."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from edgellm.spec.sampling import distribution, draw
from edgellm.spec.types import GREEDY, NO_IDS, Chunk, Distribution, Ids, Sampling
from edgellm.upstream.rows import Row, RowReply, RowRequest, RowsUnusable, Tier, Top
from edgellm.upstream.verdict import distribution_of_top, verdict

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


def ids(*tokens: int) -> Ids:
    return np.array(tokens, dtype=np.int32)


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


def reply(tier: Tier, rows: list[Row]) -> RowReply:
    return RowReply(tier, tuple(rows))


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
        found = verdict(request(text, draft, seeded), reply(tier, rows), SIZE)
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


def test_a_wrong_distribution_would_be_noticed() -> None:
    sampling, server = SAMPLINGS["all"], np.random.default_rng(11)
    other = Sampling(2.0, sampling.top_k, sampling.top_p)
    seen = Counter(written(Tier.FAN_OUT, other, number, server) for number in range(ROUNDS))
    cells = [(seen[text], ROUNDS * chance) for text, chance in expected(sampling) if ROUNDS * chance >= 5.0]
    assert sum((observed - mean) ** 2 / mean for observed, mean in cells) > 3 * len(cells)


def test_greedy_rows_are_compared_with_the_draft() -> None:
    rows = [Row(1), Row(2), Row(3)]
    for draft, accepted, token in (([1, 2], 2, 3), ([1, 0], 1, 2), ([0, 2], 0, 1)):
        found = verdict(request([0], draft, GREEDY), reply(Tier.SCORE, rows), SIZE)
        assert (found.accepted, found.tokens.tolist(), found.passes) == (accepted, [token], 1)


def test_all_that_the_server_wrote_is_used() -> None:
    rows = [Row(1), Row(2), Row(3)]
    for draft, accepted, tokens in (([1, 2], 2, [3]), ([1, 0], 1, [2, 3]), ([0, 0], 0, [1, 2, 3])):
        found = verdict(request([0], draft, GREEDY), reply(Tier.CONTINUE, rows), SIZE)
        assert (found.accepted, found.tokens.tolist(), found.passes) == (accepted, tokens, 3)


def test_a_text_that_ends_early() -> None:
    """The draft goes on behind the end of the server's text: its last token is the server's own."""
    found = verdict(request([0], [1, 2, 3], GREEDY), reply(Tier.CONTINUE, [Row(1), Row(2)]), SIZE)
    assert (found.accepted, found.tokens.tolist()) == (1, [2])


def test_a_draft_that_ends_the_turn_where_the_server_does_is_accepted_as_a_whole() -> None:
    """As by every other verifier: a gate would learn otherwise that the ends of replies are rejected."""
    rows = reply(Tier.CONTINUE, [Row(1), Row(2)])
    found = verdict(request([0], [1, 2], GREEDY), rows, SIZE, is_eog=lambda token: token == 2)
    assert (found.accepted, found.tokens.tolist()) == (2, [2])
    cut_off = verdict(request([0], [1, 2], GREEDY), rows, SIZE, is_eog=lambda token: token == 3)
    assert (cut_off.accepted, cut_off.tokens.tolist()) == (1, [2])


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
        verdict(request([0], [1, 1], GREEDY), reply(Tier.SCORE, rows), SIZE)


def test_too_few_likeliest_tokens_are_not_drawn_from() -> None:
    sampling = Sampling(temperature=1.0, top_k=3)
    for rows in ([Row(1, top([0])[:2])], [Row(1)]):
        with pytest.raises(RowsUnusable):
            verdict(request([0], [], sampling), reply(Tier.SCORE, rows), SIZE)


def test_scored_drafts_are_compared_with_the_draw() -> None:
    sampling = Sampling(temperature=1.0, top_k=SIZE, seed=5)
    rows = [Row(0, top([0])), Row(0, top([1]))]
    p = shares([0], sampling)
    wanted = draw(p, 5, 1)
    for token in range(SIZE):
        found = verdict(request([0], [token], sampling), reply(Tier.SCORE, rows), SIZE)
        assert found.accepted == (token == wanted)
        assert token == wanted or found.tokens.tolist() == [wanted]


def test_the_likeliest_tokens_give_the_distribution_of_the_whole_row() -> None:
    logits = np.random.default_rng(9).normal(0.0, 3.0, 1000).astype(np.float32)
    shares = logits - math.log(float(np.exp(logits.astype(np.float64)).sum()))
    likeliest = tuple((int(token), float(shares[token])) for token in (-logits).argsort()[:40])
    for sampling in (Sampling(0.7), Sampling(1.5, 40, 0.5), Sampling(1.0, 7, 1.0), Sampling(1.0, 20, 0.9, min_p=0.1)):
        whole, found = distribution(logits, sampling), distribution_of_top(likeliest, sampling, len(logits), NO_IDS)
        assert found.ids.tolist() == whole.ids.tolist()
        assert found.probs == pytest.approx(whole.probs, abs=1e-5)
    assert isinstance(found, Distribution)
