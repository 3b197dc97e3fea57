"""The generated code is that of the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import protos


def test_committed_code_is_what_the_contract_generates(tmp_path: Path) -> None:
    for made in protos.generate(tmp_path):
        committed = protos.ROOT / made.relative_to(tmp_path)
        assert made.read_text() == committed.read_text(), "run: python -m tools.protos"


def test_a_contract_that_does_not_compile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protos, "PROTOS", (Path("edgellm/rpc/nothing.proto"),))
    with pytest.raises(RuntimeError):
        protos.generate(tmp_path)
