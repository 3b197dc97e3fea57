"""A device drafts for a proposer in vLLM's worker."""

from __future__ import annotations

from contextlib import closing
from types import SimpleNamespace

import numpy as np
import pytest

from bench.upstream.reverse import Device
from edgellm.engine import Context, ContextSpec, Model
from edgellm.storage import resolve
from testkit.upstream.proposer import ADDRESS, DeviceProposer

VLLM = SimpleNamespace(
    speculative_config=SimpleNamespace(num_speculative_tokens=4), model_config=SimpleNamespace(max_model_len=64)
)


def test_each_request_gets_the_draft_models_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [0, 45, 281, 527, 2]
    with Model.load(resolve("edgellm-draft")) as model:
        with Context(model, ContextSpec(n_ctx=64, threads=1)) as context:
            wanted = [int(np.argmax(context.decode(np.array(text, dtype=np.int32))[-1]))]
            while len(wanted) < 4:
                wanted.append(int(np.argmax(context.decode(np.array(wanted[-1:], dtype=np.int32))[-1])))
        with Device(model) as device:
            monkeypatch.setenv(ADDRESS, device.url)
            rows = np.zeros((3, 64), dtype=np.int32)
            rows[0, :5] = rows[2, :5] = text
            # the second one has drawn nothing yet, the third one is at the end of its positions
            with closing(DeviceProposer(VLLM)) as proposer:
                drafts = proposer.propose([[2], [], [2]], np.array([5, 3, 64]), rows, slot_mappings=None)
            assert drafts == [wanted, [], []]
            assert device.counts["requests"] == 1
            assert device.counts["drafted"] == 4


def test_without_its_device_vllm_goes_on_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with Model.load(resolve("edgellm-draft")) as model, Device(model) as device:
        monkeypatch.setenv(ADDRESS, device.url)
    rows = np.ones((2, 64), dtype=np.int32)
    assert DeviceProposer(VLLM).propose([[1], [1]], np.array([3, 4]), rows) == [[], []]
