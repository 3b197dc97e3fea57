"""The generated code is that of the contract."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.rpc.protos import generate


def test_committed_code_is_what_the_contract_generates(tmp_path: Path) -> None:
    for made in generate.generate(tmp_path):
        committed = generate.ROOT / made.relative_to(tmp_path)
        assert made.read_text() == committed.read_text(), "run: python -m edgellm.rpc.protos.generate"


def test_a_contract_that_does_not_compile_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "PROTOS", (Path("edgellm/rpc/nothing.proto"),))
    with pytest.raises(RuntimeError):
        generate.generate(tmp_path)
