"""Tests of losslessness, once more with all models on a device whose memory is not the host's.

Each group runs in a process of its own, because llama.cpp cannot forget a device.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class Group:
    """Files of tests, without those whose names contain one of the words `without`: slow ones of what others show, and
    those of what is the same wherever a model's memory is.

    Of a test in `cases`, by a part of its name, only those cases run here whose ids contain one of some words. The
    others differ in what is the same wherever the memory is, and run on the host.
    """

    files: tuple[str, ...]
    without: tuple[str, ...] = ()
    cases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    least: int = 10

    @property
    def chosen(self) -> str:
        """Return the expression for pytest's -k."""
        left_out = [*self.without, *(f"({test} and not ({' or '.join(ids)}))" for test, ids in self.cases.items())]
        return " and ".join(f"not {one}" for one in left_out)


GROUPS = {
    "caches, captures and layers": Group(
        (
            "engine/kv/test_kv_cache.py", "engine/test_graph_hooks.py", "engine/test_layer_block.py",
            "engine/test_context.py", "engine/test_speculators.py", "mesh/test_stages.py",
        ),
        cases={
            "logits_are_those_of_the_whole_model": ("-3]",),
            "finds_no_wrong_state": ("gpt-oss]", "lfm2]"),
            "states_are_the_inputs": ("llama]", "gpt-oss]", "gemma4]", "qwen35]"),
            "after_rejected_drafts": ("qwen35]", "glm4moe]", "deepseek32]"),
        },
        least=80,
    ),
    "drafters": Group(
        ("spec/test_early_exit.py", "spec/test_importance.py", "spec/test_parallel.py"),
        without=("whatever_prefixes_come",),
        cases={
            "it_changes_nothing": ("sampling]",),
        },
        least=20,
    ),
    "pairs": Group(
        (
            "llm/test_architectures.py", "llm/test_lossless.py", "llm/test_drafting.py",
        ),
        without=("says_whether", "slow_device", "cannot_draft", "is_refused", "continued", "forbidden"),
        cases={
            "the_verifier_writes_what_it_writes_alone": ("auto]", "reuse]"),
            "the_text_is_the_verifiers_own": ("greedy]",),
            "a_pair_writes_what_its_verifier": ("gpt-oss]", "qwen35]", "deepseek2]", "mamba2]"),
        },
        least=22,
    ),
    "verifiers and workers": Group(
        ("verifier/test_inside.py", "services/test_verifier_server.py", "services/test_worker_server.py"),
        without=("stopping", "still_leave", "share_passes"),
        least=22,
    ),
}  # fmt: skip


@pytest.mark.timeout(1800)  # a group is many tests, each with a limit of its own
@pytest.mark.rpc
@pytest.mark.nightly
@pytest.mark.parametrize("name", GROUPS)
def test_nothing_assumes_the_memory_of_the_host(name: str, tmp_path: Path) -> None:
    group = GROUPS[name]
    # Each group has a folder for its temporary files: of two that tidy one folder at once, one fails.
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "PYTEST_DEBUG_TEMPROOT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "--nightly", "--device", "rpc", "-p", "no:cacheprovider",
         *(str(TESTS / file) for file in group.files), "-k", group.chosen],
        cwd=TESTS.parent, capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= group.least
