"""AMX is used where a child process survives it."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgellm import system
from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.native import features, lib
from edgellm.engine.trial import probe
from edgellm.isolation.serving import pack
from tests.watching import calls_of


@pytest.fixture
def on_amx(monkeypatch: pytest.MonkeyPatch, home: Path) -> Iterator[bool]:
    """A build with AMX that this process has not tried; whether it works on this very machine, where that has it."""
    works = os.environ["EDGELLM_AMX"] == "on"
    found = replace(features(), instructions=("AVX2", probe.INSTRUCTION))
    monkeypatch.setattr(probe, "features", lambda: found)
    monkeypatch.delenv("EDGELLM_AMX")
    probe.amx_failure.cache_clear()
    yield works
    probe.amx_failure.cache_clear()


@pytest.fixture
def deadly(on_amx: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Children end as those do that use AMX in a build that cannot."""
    child = tmp_path / "child"
    began = tmp_path / "began"
    began.write_bytes(pack({"progress": 0.0}))
    child.write_text(f"#!/bin/sh\nhead -c 1 >/dev/null\ncat {began}\nkill -SEGV $$\n")
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))


def no_child(*_: object, **__: object) -> str:
    raise AssertionError("a child process was started")


@pytest.mark.parametrize(
    ("instruction", "wish", "failure"),
    [("AVX2", "", ""), (probe.INSTRUCTION, "off", "EDGELLM_AMX is off"), (probe.INSTRUCTION, "on", "")],
)
def test_nothing_is_tried_without_amx_or_where_the_user_decides(
    on_amx: bool, monkeypatch: pytest.MonkeyPatch, instruction: str, wish: str, failure: str
) -> None:
    found = replace(features(), instructions=(instruction,))
    monkeypatch.setattr(probe, "features", lambda: found)
    monkeypatch.setattr(probe, "try_in_child", no_child)
    monkeypatch.setenv("EDGELLM_AMX", wish)

    assert probe.amx_failure() == failure


def test_what_a_child_survives_is_used(on_amx: bool) -> None:
    assert probe.amx_failure() == ("" if on_amx else "it ends the process with SIGSEGV")


@pytest.mark.usefixtures("deadly")
def test_what_ends_a_child_is_not_used_and_not_tried_again(draft_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert probe.amx_failure() == "it ends the process with SIGSEGV"

    probe.amx_failure.cache_clear()  # as in the next process
    monkeypatch.setattr(probe, "try_in_child", no_child)
    loads = calls_of(monkeypatch, lib, "llama_model_load_from_file")
    with Model.load(draft_path) as model, Context(model, ContextSpec(n_ctx=32)) as context:
        rows = context.decode(model.tokenize("a mug", special=False))

    assert [params.use_extra_bufts for _path, params in loads] == [False], "weights stay as the file lays them out"
    assert rows.shape[1] == model.n_vocab


@pytest.mark.usefixtures("deadly")
def test_without_the_bundled_models_it_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "bundled_dirs", lambda: (tmp_path, tmp_path))

    assert probe.amx_failure() == "it could not be tested"
    assert not list(tmp_path.glob("home/cache/probed/*"))
