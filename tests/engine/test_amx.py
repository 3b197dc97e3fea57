"""AMX is used where a child process survives it."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgellm import system
from edgellm.engine import Context, ContextSpec, Model
from edgellm.engine.native import features, lib
from edgellm.engine.trial import probe
from edgellm.isolation.serving import pack


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


@pytest.fixture
def laid_out_anew(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each model that is loaded, whether llama.cpp may lay out its weights for instructions of its choice."""
    seen = []
    load = lib.llama_model_load_from_file

    def loaded(path: bytes, params: Any) -> Any:
        seen.append(bool(params.use_extra_bufts))
        return load(path, params)

    monkeypatch.setattr(lib, "llama_model_load_from_file", loaded)
    return seen


def no_child(*_: object, **__: object) -> str:
    raise AssertionError("a child process was started")


def test_without_amx_nothing_is_tried(on_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = replace(features(), instructions=("AVX2",))
    monkeypatch.setattr(probe, "features", lambda: found)
    monkeypatch.setattr(probe, "try_in_child", no_child)

    assert probe.amx_failure() == ""


def test_what_a_child_survives_is_used(on_amx: bool) -> None:
    assert probe.amx_failure() == ("" if on_amx else "it ends the process with SIGSEGV")


@pytest.mark.usefixtures("deadly")
def test_what_ends_a_child_is_not_used_and_not_tried_again(
    draft_path: Path, laid_out_anew: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert probe.amx_failure() == "it ends the process with SIGSEGV"

    probe.amx_failure.cache_clear()  # as in the next process
    monkeypatch.setattr(probe, "try_in_child", no_child)
    with Model.load(draft_path) as model, Context(model, ContextSpec(n_ctx=32)) as context:
        rows = context.decode(model.tokenize("a mug", special=False))

    assert laid_out_anew == [False]
    assert rows.shape[1] == model.n_vocab


def test_the_user_decides(on_amx: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "try_in_child", no_child)
    monkeypatch.setenv("EDGELLM_AMX", "off")
    assert probe.amx_failure() == "EDGELLM_AMX is off"

    probe.amx_failure.cache_clear()
    monkeypatch.setenv("EDGELLM_AMX", "on")
    assert probe.amx_failure() == ""


@pytest.mark.usefixtures("deadly")
def test_without_the_bundled_models_it_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(system, "bundled_dirs", lambda: (tmp_path, tmp_path))

    assert probe.amx_failure() == "it could not be tested"
    assert not list(tmp_path.glob("home/cache/probed/*"))
