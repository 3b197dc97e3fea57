"""Random walks over the caches of a context end in the state of a fresh one."""

import pytest

from edgellm.engine import Model
from testkit.cache_walk import walk
from tests.conftest import Architectures


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss", "qwen35", "lfm2", "granitehybrid", "mamba2", "deepseek4"])
def test_a_walk_finds_no_wrong_state(architectures: Architectures, name: str) -> None:
    with Model.load(architectures(name), faults=()) as model:
        found = walk(model, 150)
    assert found.wrong == []
    assert found.rows > 150
    assert set(found.operations) == {"decode", "rollback", "draft", "branch", "copy", "batch", "clear"}
    assert found.operations.total() == 150
