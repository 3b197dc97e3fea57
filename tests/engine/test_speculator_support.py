"""What a header says about MTP layers, and files that only draft for other models."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from edgellm.engine import Model, ModelFile, mtp_obstacle
from edgellm.engine.gguf.memory import attention_layers, recurrent_state_bytes
from edgellm.engine.model import drafter_file
from edgellm.engine.speculators.speculator import StateFunctions
from edgellm.errors import ModelUnsupported
from testkit.gguf.architectures import WITH_MTP
from tests.conftest import Architectures
from tests.engine.speculators import changed


@pytest.mark.parametrize("name", WITH_MTP)
def test_it_computes_no_text_and_is_not_counted(architectures: Architectures, name: str) -> None:
    plain = ModelFile.open(architectures(name)).header
    header = ModelFile.open(architectures(name, mtp="useful")).header
    assert not mtp_obstacle(header)
    assert mtp_obstacle(plain)
    assert attention_layers(header) == attention_layers(plain)
    assert recurrent_state_bytes(header) == recurrent_state_bytes(plain)


def test_each_reason_against_it(architectures: Architectures, monkeypatch: pytest.MonkeyPatch) -> None:
    header = ModelFile.open(architectures("qwen35", mtp="useful")).header
    other = replace(header, metadata={"general.architecture": "mimo2", "mimo2.nextn_predict_layers": 1})
    assert "not tried with mimo2" in mtp_obstacle(other)
    assert "the file has 2" in mtp_obstacle(changed(header, nextn_predict_layers=2))
    assert "lacks blk.4.nextn.hnorm" in mtp_obstacle(changed(header, "blk.4.nextn.hnorm.weight"))
    monkeypatch.setattr(StateFunctions, "find", lambda: None)
    assert "does not export" in mtp_obstacle(header)


def test_this_llama_cpp_exports_the_functions() -> None:
    assert StateFunctions.find() is not None


@pytest.mark.parametrize("architecture", ["eagle3", "dflash", "gemma4-assistant"])
def test_a_drafter_for_another_model_is_refused_by_name_before_loading(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "head.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_uint32(f"{architecture}.block_count", 1)
    writer.add_tensor("fc.weight", np.zeros((4, 4), dtype=np.float32))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()
    kind = drafter_file(ModelFile.open(path).header)
    assert kind
    with pytest.raises(ModelUnsupported, match=re.escape(f"head.gguf is {kind}")):
        Model.load(path)


def test_an_mtp_layer_in_a_file_of_its_own_is_no_model(architectures: Architectures) -> None:
    header = ModelFile.open(architectures("qwen35", mtp="useful")).header
    assert drafter_file(header) == ""
    alone = tuple(tensor for tensor in header.tensors if not tensor.name.startswith(("blk.0", "blk.1", "blk.2")))
    assert drafter_file(replace(header, tensors=alone)).startswith("an MTP layer")
