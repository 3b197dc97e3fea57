"""A few layers compute as the whole model does, whatever is rolled back."""

from pathlib import Path

import numpy as np

from edgellm.engine import Block, ContextSpec, Model, cut
from tests.conftest import Architectures
from tests.engine.logits import difference


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
