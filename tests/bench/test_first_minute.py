"""The first minute's table, of runs that took known times; and what a step takes, of a real process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.cli.first_minute import Taken, check, environment_of, table, timed


def test_the_table_has_the_median_of_each_step() -> None:
    steps = {"packages": [Taken(9.0, 14.0), Taken(8.0, 13.0), Taken(30.0, 15.0)]}
    lines = table({"runs": 3, "ways": {"./start": steps}}).splitlines()
    assert lines[1] == "./start"
    assert lines[2].split() == ["packages", "9.0", "8.0", "to", "30.0", "14.0"]


def test_a_step_is_timed_to_its_first_byte_and_tells_why_it_fails(tmp_path: Path) -> None:
    environment = dict(os.environ)
    taken, first, answer = timed([sys.executable, "-c", "print('yes')"], tmp_path, environment)
    assert answer == "yes\n"
    assert 0 < first <= taken.wall
    assert taken.processor > 0
    with pytest.raises(RuntimeError, match="no wheel"):
        timed([sys.executable, "-c", "raise SystemExit('no wheel')"], tmp_path, environment)


def test_nothing_of_an_earlier_installation_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EDGELLM_HOME", "XDG_CACHE_HOME", "PIP_CACHE_DIR", "PYTHONPATH"):
        monkeypatch.setenv(name, "/elsewhere")
    environment = environment_of(tmp_path, tmp_path / "bin" / "pipx")
    assert environment["HOME"] == str(tmp_path)
    assert "/elsewhere" not in environment.values()


def test_an_answer_of_the_home_pair_is_no_first_word(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="The film night"):
        check("The film night is Friday.", {"HOME": str(tmp_path)})
    (tmp_path / "SmolLM2.gguf").touch()
    check("The sky is blue.", {"HOME": str(tmp_path)})
    with pytest.raises(RuntimeError):
        check("\n", {"HOME": str(tmp_path)})
