"""The small files of all architectures load, decode exactly, and write text that is not one token."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgellm.engine import Context, ContextSpec, Floats, Ids, Message, Model
from edgellm.engine.native import lib
from testkit import ROOT
from testkit.gguf.architectures import ARCHITECTURES, WINDOW
from tests.conftest import Architectures
from tests.engine.logits import CLOSE, difference, one_by_one, some_ids

GELU = 1e-3  # llama.cpp looks GELU up in a table of 16-bit numbers, where a row may fall on either side of a step
LOOKED_UP = {"bloom", "falcon", "gemma2", "gemma3", "gemma3n", "gemma4", "gpt2", "gptneox", "mpt", "starcoder2"}
N = 40


def at_once(model: Model, ids: Ids) -> Floats:
    with Context(model, ContextSpec(n_ctx=N, threads=1)) as context:
        assert context.spec.exact
        return context.decode(ids, outputs=len(ids)).copy()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_batch_gives_the_logits_of_single_decodes(architectures: Architectures, name: str) -> None:
    with Model.load(architectures(name)) as model:
        assert model.architecture == name
        ids = some_ids(N, model.n_vocab)
        assert difference(at_once(model, ids), one_by_one(model, ids)) < (GELU if name in LOOKED_UP else CLOSE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_keeps_the_past_as_its_kind_says(architectures: Architectures, name: str) -> None:
    kind = ARCHITECTURES[name].kind
    with Model.load(architectures(name)) as model:
        pointer = model.owned.pointer
        assert lib.llama_model_is_recurrent(pointer) == (kind == "recurrent")
        assert lib.llama_model_is_hybrid(pointer) == (kind == "hybrid")
        assert lib.llama_model_n_swa(pointer) == (WINDOW if kind == "window" else 0)
        if kind == "moe":
            assert int(model.metadata[f"{name}.expert_count"]) > int(model.metadata[f"{name}.expert_used_count"])
        if kind == "mla":
            assert f"{name}.attention.kv_lora_rank" in model.metadata


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_text_is_not_one_token(architectures: Architectures, name: str) -> None:
    with Model.load(architectures(name)) as model, Context(model, ContextSpec(n_ctx=128, threads=1)) as context:
        logits = context.decode(model.chat_prompt([Message("user", "hello there")]))
        text = []
        for _ in range(24):
            text.append(int(logits[-1].argmax()))
            logits = context.decode(np.array(text[-1:], dtype=np.int32))
        assert len(set(text)) >= 4


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_noisy_copy_is_right_some_of_the_time(architectures: Architectures, name: str) -> None:
    with Model.load(architectures(name)) as model, Model.load(architectures(name, noise=0.12)) as draft:
        ids = some_ids(N, model.n_vocab)
        agreed = at_once(model, ids).argmax(axis=1) == at_once(draft, ids).argmax(axis=1)
        assert 0.1 <= agreed.mean() < 1


def test_another_process_writes_the_same_bytes(architectures: Architectures, tmp_path: Path) -> None:
    names = ["jamba", "qwen2"]
    code = "from pathlib import Path; import sys; from testkit.gguf.architectures import write;"
    code += " write(sys.argv[2], Path(sys.argv[1]))"
    for name in names:
        subprocess.run([sys.executable, "-c", code, tmp_path / f"{name}.gguf", name], cwd=ROOT, check=True)
        assert (tmp_path / f"{name}.gguf").read_bytes() == architectures(name).read_bytes()
