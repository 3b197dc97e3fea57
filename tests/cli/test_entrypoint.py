"""Whatever happens, the user sees one clear line and a script sees the right exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import edgellm
from edgellm import storage
from edgellm.cli import options as completion
from edgellm.errors import EdgeError
from tests.cli.conftest import Done

Edge = Callable[..., Done]
ROOT = Path(__file__).parents[2]


def start_endless(*words: str) -> subprocess.Popen[str]:
    """`edgellm` with a reply that goes on until it is stopped."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cli.endless", *words],
        cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_the_version_is_told(edge: Edge) -> None:
    assert edge("--version").out.startswith(f"edgellm {edgellm.__version__}\nllama.cpp: ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"edgellm": "edgellm.cli:main"}


@pytest.mark.parametrize("words", [("frob",), ("ls", "--frob"), ("show",), ("serve", "--role", "cook")])
def test_wrong_usage_is_one_line_and_exit_code_2(edge: Edge, words: tuple[str, ...]) -> None:
    done = edge(*words)
    assert done.code == 2
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "--help" in done.err


def test_the_unexpected_is_one_line_and_a_log(edge: Edge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def explode() -> list[storage.StoredModel]:
        raise ZeroDivisionError("\x1b[2J" + "surprise"[::-1])

    monkeypatch.setattr(storage, "list_models", explode)
    done = edge("ls")
    assert done.code == 1
    assert done.err.count("\n") == 1
    assert "Traceback" not in done.err
    assert "\x1b" not in done.err
    assert "ZeroDivisionError" in done.err
    (log,) = (tmp_path / "home" / "state" / "logs").glob("crash-*.log")
    assert str(log) in done.err
    assert "in explode" in log.read_text()
    assert "esirprus" in done.err
    assert "esirprus" not in log.read_text()  # it could be a prompt
    assert log.stat().st_mode & 0o077 == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_stdout_is_told() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "edgellm", "ls", "--json"], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("error: The disk is full")
    assert "Traceback" not in done.stderr


def test_closed_streams_are_no_error() -> None:
    command = f"{sys.executable} -m edgellm ls >&- 2>&- <&-"
    assert subprocess.run(["sh", "-c", command], cwd=ROOT, check=False).returncode == 0


def test_an_interrupt_is_130(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> list[storage.StoredModel]:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "list_models", interrupt)
    assert edge("ls").code == 130


def test_every_error_of_ours_keeps_its_exit_code(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    def classes(base: type[EdgeError]) -> list[type[EdgeError]]:
        return [base, *(found for child in base.__subclasses__() for found in classes(child))]

    for kind in classes(EdgeError):

        def fail(kind: type[EdgeError] = kind) -> list[storage.StoredModel]:
            raise kind("It is wrong.", "Mend it.")

        monkeypatch.setattr(storage, "list_models", fail)
        done = edge("ls")
        assert (done.code, done.err) == (kind.exit_code, "error: It is wrong. Mend it.\n")
        assert kind.exit_code in (1, 2, 130)


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_reader_that_leaves_is_no_error(words: tuple[str, ...]) -> None:
    process = start_endless("chat", *words, "Hello")
    assert process.stdout is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=120)
    assert "Traceback" not in errors
    assert "error" not in errors
    assert "BrokenPipe" not in errors


def test_ctrl_c_in_a_single_question_is_130() -> None:
    process = start_endless("chat", "--json", "Hello")
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    rest, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert '"finish_reason": "cancelled"' in rest.splitlines()[-1]
    assert "Traceback" not in errors


def imported(*words: str) -> set[str]:
    """Return the packages of edgellm and of libraries that a command line imports."""
    program = (
        "import sys; from edgellm.cli.app import run; run(sys.argv[1:]);"
        "print('\\n' + ' '.join('.'.join(m.split('.')[: 2 if m.startswith('edgellm.') else 1]) for m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True,
        cwd=ROOT,
    )  # fmt: skip
    return set(done.stdout.splitlines()[-1].split())


def test_help_is_quick_because_it_imports_the_command_line_alone() -> None:
    found = imported("--help")
    assert {one for one in found if one.startswith("edgellm.")} == {
        "edgellm.cli", "edgellm.errors", "edgellm.flags", "edgellm.system",
    }  # fmt: skip
    for words in (("chat", "--help"), ("mesh", "run", "--help")):
        assert not imported(*words) & {"llama_cpp", "grpc", "numpy", "huggingface_hub", "prompt_toolkit"}


def test_a_chat_in_this_process_imports_no_network() -> None:
    found = imported("chat", "Where is my mug?", "--max-tokens", "1")
    assert "edgellm.llm" in found
    packages = {"rpc", "services", "mesh", "coldstart", "http", "diagnostics"}
    assert not found & {*(f"edgellm.{one}" for one in packages), "grpc", "cryptography", "zeroconf", "prompt_toolkit"}


def test_model_names_complete(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert [name for name, _ in completion.model_names("EDGE")] == ["edgellm-draft", "edgellm-verifier"]
    words = "edgellm show edgellm-d"
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "_EDGELLM_COMPLETE": "complete_bash", "COMP_WORDS": words,
        "COMP_CWORD": "2",
    }  # fmt: skip
    program = "from edgellm.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.split() == ["edgellm-draft"]
