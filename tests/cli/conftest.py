"""The command line in this process, with a home of its own and a stdin that a test fills."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any, TypeAlias

import pytest
import typer
from typer.main import get_command

from edgellm.cli.app import app, run
from edgellm.engine.gguf import synthetic_layers as timing
from edgellm.mesh import device_profiler
from edgellm.rpc import measuring
from edgellm.rpc.trust.trust import Trust
from tests.rpc.strangers import befriend, device
from tests.storage.hub import cache, hub

__all__ = ["cache", "edge", "hub"]


@dataclass(frozen=True)
class Done:
    """What a command line gave: exit code, stdout, stderr."""

    code: int
    out: str
    err: str

    def told(self, *texts: str, code: int = 0) -> "Done":
        """This command line, which has ended with `code` and has printed these texts, line breaks apart."""
        said = " ".join(f"{self.out} {self.err}".split())
        assert self.code == code, said
        for text in texts:
            assert text in said
        return self

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def answer(self) -> Any:
        return json.loads(self.out)


Edge: TypeAlias = Callable[..., Done]
"""`edge("chat", "Hello", stdin=b"...")` runs that command line."""


def ids(done: Done) -> list[int]:
    """The tokens of a reply with --json."""
    assert done.code == 0, done.err
    return [line["id"] for line in done.lines if "id" in line]


def commands() -> Iterator[typer.Context]:
    """Yield a context for each command that a help page lists, not for groups."""
    waiting = [typer.Context(get_command(app), info_name="edgellm")]
    while waiting:
        parent = waiting.pop()
        group: Any = parent.command
        if not hasattr(group, "list_commands"):
            yield parent
            continue
        children = {name: group.get_command(parent, name) for name in group.list_commands(parent)}
        waiting += [typer.Context(command, parent=parent, info_name=name) for name, command in children.items()]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curves: Path) -> None:
    """Nothing of the user's own is read or written, and nothing leaves this machine. What decodes cost is known; only a
    few tests are about that."""
    copytree(curves, tmp_path / "home" / "cache" / "curves")
    monkeypatch.setenv("EDGELLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGELLM_INTERFACE", "127.0.0.1")
    monkeypatch.setenv("TERM", "xterm")
    for name in ("EDGELLM_DRAFT", "EDGELLM_VERIFIER", "NO_COLOR", "FORCE_COLOR", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def edge(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """`edge("chat", "Hello", stdin=b"...")` runs that command line."""

    def call(*words: str, stdin: bytes = b"") -> Done:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))  # no terminal
        capsys.readouterr()
        code = run(words)
        shown = capsys.readouterr()
        return Done(code, shown.out, shown.err)

    return call


@pytest.fixture
def quick_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices are measured, in no time: not well, but really."""
    monkeypatch.setattr(timing, "ROWS", (1, 8))
    monkeypatch.setattr(timing, "_SPELL", 0.0)
    monkeypatch.setattr(timing, "_ROUNDS", 1)
    monkeypatch.setattr(device_profiler, "_LOADING", 0.1)
    monkeypatch.setattr(measuring, "SECONDS", 0.02)
    monkeypatch.setenv("EDGELLM_INTERFACE", "127.0.0.1")


@pytest.fixture
def phone() -> Trust:
    """A paired device called phone that is never there."""
    there = Trust.load()
    made = device(Path(os.environ["EDGELLM_HOME"]) / "phone")
    befriend(made, there, "verify files", "phone")
    return made
