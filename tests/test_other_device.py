"""Tests of losslessness, once more with all models on a device whose memory is not the host's.

Each group runs in a process of its own, because llama.cpp cannot forget a device.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from edgellm.engine.ggml_rpc.backend import is_compiled_in

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Group:
    """Files of tests, without those whose names contain one of the words `without`: slow ones of what others show."""

    files: tuple[str, ...]
    without: tuple[str, ...] = ()
    least: int = 10


GROUPS = {
    "caches, captures and layers": Group(
        (
            "engine/test_kv_cache.py", "engine/test_graph_hooks.py", "engine/test_layer_block.py",
            "engine/test_context.py", "mesh/test_stages.py",
        )
    ),
    "drafters": Group(
        (
            "spec/test_early_exit.py", "spec/test_importance.py", "spec/test_parallel.py", "spec/test_real_pair.py",
        ),
        without=("whatever_prefixes_come", "hit_more_often"),
    ),
    "pairs": Group(("llm/test_architectures.py", "llm/test_paths.py", "llm/test_ngram_runtime.py")),
    "profiles": Group(
        ("llm/test_profiling.py",),
        without=("replies_make_a_profile", "interrupted", "early_exit_is_measured"),
        least=3,
    ),
    "verifiers and workers": Group(
        ("verifier/test_inside.py", "services/test_verifier_server.py", "services/test_worker_server.py")
    ),
}  # fmt: skip


@pytest.mark.timeout(1800)  # a group is many tests, each with a limit of its own
@pytest.mark.skipif(not is_compiled_in(), reason="llama.cpp is compiled without its RPC backend")
@pytest.mark.parametrize("name", GROUPS)
def test_nothing_assumes_the_memory_of_the_host(name: str) -> None:
    group = GROUPS[name]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "--device", "rpc", "-p", "no:cacheprovider",
         *(str(TESTS / file) for file in group.files), "-k", " and ".join(f"not {word}" for word in group.without)],
        cwd=TESTS.parent, capture_output=True, text=True, check=False, env={**os.environ, "PYTEST_ADDOPTS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= group.least
