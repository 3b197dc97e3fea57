"""`python -m bench gpu` begins on a machine on which nothing is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.gpu import tables
from bench.gpu.machine import ON_CARD, Machine
from testkit import ROOT


def test_what_sets_up_needs_nothing_but_python() -> None:
    code = "import bench.gpu.__main__, sys; assert 'numpy' not in sys.modules and 'edgellm' not in sys.modules"
    subprocess.run([sys.executable, "-S", "-c", code], cwd=ROOT, check=True)


def test_tables_beside_llama_server_are_not_begun_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tables.main(["--processor", "--tables", "plain", "costs"])
    assert "plain need --llama-server" in capsys.readouterr().err


def test_a_table_on_a_card_is_left_out_when_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = Machine("a card", True, None, ROOT, ON_CARD)
    kept: dict[str, object] = {}
    monkeypatch.setattr(Machine, "here", lambda *_, **__: card)
    monkeypatch.setattr(tables, "_keep", lambda _result, _device, name, found: kept.update({name: found}))
    tables.main(["--tables", "costs", "--minutes", "0"])
    assert "left_out" in str(kept["costs"])
    assert "not measured" in capsys.readouterr().out
