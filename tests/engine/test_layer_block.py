"""Sequences that go through a block together come out as if each had gone alone."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Block, BlockRows, ContextSpec, Floats, Ids, Model, check_cuttable, check_gguf, cut
from edgellm.errors import EngineFailed, InvalidOption
from tests.conftest import Architectures
from tests.engine.logits import difference, some_ids

SEQUENCES, CLOSE = 5, 1e-4


@pytest.fixture(scope="module")
def halves(f32_pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Model]]:
    folder, n = tmp_path_factory.mktemp("halves"), check_cuttable(check_gguf(f32_pair[1]))
    paths = folder / "lower.gguf", folder / "upper.gguf"
    cut(f32_pair[1], paths[0], 0, n // 2 - 1, head=False)
    cut(f32_pair[1], paths[1], n // 2, n - 1, head=True)
    with Model.load(paths[0]) as lower, Model.load(paths[1]) as upper:
        yield lower, upper


class Chain:
    """Both halves."""

    def __init__(self, halves: tuple[Model, Model], rows: int = 64) -> None:
        self.blocks = [
            Block(model, ContextSpec(64, SEQUENCES, rows, threads=1), head=head)
            for model, head in zip(halves, (False, True), strict=True)
        ]

    def forward(self, given: list[BlockRows]) -> list[Floats]:
        lower, upper = self.blocks
        rows = [found.copy() for found in lower.forward_together(given)]
        further = [BlockRows(row, one.start, one.seq, one.outputs) for row, one in zip(rows, given, strict=True)]
        return [found.copy() for found in upper.forward_together(further)]

    def close(self) -> None:
        for block in self.blocks:
            block.close()


@pytest.fixture
def chains(halves: tuple[Model, Model]) -> Iterator[tuple[Chain, Chain]]:
    both = Chain(halves), Chain(halves)
    yield both
    for chain in both:
        chain.close()


@pytest.mark.parametrize("sequences", [[0, 1, 2], [2, 3, 4], [3, 0, 4, 1], [1, 3]])
def test_together_as_alone(chains: tuple[Chain, Chain], sequences: list[int]) -> None:
    together, alone = chains
    texts = {seq: some_ids(40, 2000, seq + 1) for seq in sequences}
    for start, end, outputs in ((0, 12, 0), (12, 13, 1), (13, 18, 5), (18, 19, 1), (15, 22, 3)):  # the last: a draft
        given = [BlockRows(texts[seq][start:end], start, seq, outputs) for seq in sequences]  # that was rejected
        found = together.forward(given)
        for rows, one in zip(found, given, strict=True):
            assert rows.shape[0] == outputs
            np.testing.assert_allclose(rows, alone.forward([one])[0], atol=CLOSE)
    assert [together.blocks[1].length(seq) for seq in sequences] == [22] * len(sequences)


def test_sequences_may_be_at_different_positions(chains: tuple[Chain, Chain]) -> None:
    together, alone = chains
    texts = {seq: some_ids(30, 2000, seq + 1) for seq in range(3)}
    for seq, text in texts.items():
        for chain in chains:
            chain.forward([BlockRows(text[: 7 + 5 * seq], 0, seq, 1)])
    given = [BlockRows(text[7 + 5 * seq :][:2], 7 + 5 * seq, seq, 2) for seq, text in texts.items()]
    for rows, one in zip(together.forward(given), given, strict=True):
        np.testing.assert_allclose(rows, alone.forward([one])[0], atol=CLOSE)


def rows_of(n: int) -> Ids:
    return some_ids(n, 2000)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([BlockRows(rows_of(2), 0, 0), BlockRows(rows_of(3), 0, 1)], "2 sequences, the first with 2 rows, cannot"),
        ([BlockRows(rows_of(33), 0, 0), BlockRows(rows_of(33), 0, 1)], "at most 64 in all"),
        ([BlockRows(rows_of(2), 0, 0), BlockRows(rows_of(2), 0, 0)], "occurs twice"),
        ([BlockRows(rows_of(2), 0, 0), BlockRows(rows_of(2), 5, 1)], "Cannot roll back"),
    ],
)
def test_what_cannot_join_leaves_all_as_it_was(chains: tuple[Chain, Chain], given: list[BlockRows], says: str) -> None:
    chain, alone = chains
    for each in chains:
        each.forward([BlockRows(rows_of(3), 0, 1, 1)])
    with pytest.raises(InvalidOption, match=says):
        chain.blocks[0].forward_together(given)
    assert chain.blocks[0].length(0) == 0
    then = [BlockRows(rows_of(6)[:2], 0, 0, 1), BlockRows(rows_of(6)[3:5], min(3, chain.blocks[0].length(1)), 1, 1)]
    for rows, one in zip(chain.forward(then), then, strict=True):
        np.testing.assert_allclose(rows, alone.forward([one])[0], atol=CLOSE)


def test_what_llama_cpp_refuses_leaves_all_as_they_were(chains: tuple[Chain, Chain]) -> None:
    lower = chains[0].blocks[0]
    lower.forward(rows_of(4), start=0, seq=1)
    bad = np.array([10**6, 1], dtype=np.int32)
    with pytest.raises(EngineFailed, match="cannot decode 4 rows"):
        lower.forward_together([BlockRows(rows_of(2), 0, 0), BlockRows(bad, 4, 1)])
    assert [lower.length(seq) for seq in (0, 1)] == [0, 4]


def test_rows_far_outside_the_window_can_be_rolled_back(architectures: Architectures, tmp_path: Path) -> None:
    """llama.cpp's window would keep 512 positions here, and rows, unlike ids, cannot be read again."""
    cut(architectures("gemma3"), tmp_path / "part.gguf", 1, 3, head=False)
    with Model.load(tmp_path / "part.gguf") as model:
        rows = np.random.default_rng(0).normal(size=(900, model.n_embd)).astype(np.float32)
        for sessions in (1, 2):
            block = Block(model, ContextSpec(1024, sessions, 64, threads=1), head=False)
            fresh = Block(model, ContextSpec(1024, sessions, 64, threads=1), head=False)
            block.forward(rows, start=0)
            fresh.forward(rows[:100], start=0)
            expected = fresh.forward(rows[:7], start=100).copy()
            assert difference(block.forward(rows[:7], start=100), expected) < 1e-5
            block.close()
            fresh.close()
