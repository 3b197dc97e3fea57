"""A few layers compute as the whole model does, whatever is rolled back."""

from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Block, ContextSpec, Model, cut
from edgellm.errors import EngineFailed, InvalidOption
from tests.conftest import Architectures
from tests.engine.logits import difference, some_ids


def test_what_llama_cpp_refuses_leaves_all_as_it_was(architectures: Architectures, tmp_path: Path) -> None:
    cut(architectures("llama"), tmp_path / "part.gguf", 0, 0, head=False)
    with Model.load(tmp_path / "part.gguf") as model:
        block = Block(model, ContextSpec(64, 2, 64, threads=1), head=False)
        block.forward(some_ids(4), start=0, seq=1)
        with pytest.raises(EngineFailed, match="cannot decode 1 rows"):
            block.forward(np.array([10**6], np.int32), start=4, seq=1)
        with pytest.raises(InvalidOption, match="Cannot roll back"):
            block.forward(some_ids(2), start=5, seq=1)
        assert [block.length(seq) for seq in (0, 1)] == [0, 4]
        block.close()


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
