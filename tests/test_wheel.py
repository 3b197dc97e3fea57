"""The wheel has all that edgellm needs: installed alone, outside the checkout, it answers with its own bundled pair.

It goes into a new environment, which finds its dependencies in this one; `python -m bench run cli/first_minute`
installs those too.
"""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import edgellm
from edgellm.errors import InvalidOption
from edgellm.llm import LLM
from edgellm.spec.params import ReplyOptions
from examples.drafter import LastTime
from examples.gate import Digits
from tests.spec.real import case

ROOT = Path(__file__).parents[1]


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "EDGELLM"))}
    return subprocess.run(
        [*map(str, command)], cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    built = run(*pip, "wheel", *offline, "--no-build-isolation", "-w", folder, ROOT, cwd=folder)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("edgellm-*.whl")
    home = folder / "venv"
    venv.create(home, with_pip=False)
    programs, packages = (
        Path(sysconfig.get_path(name, "venv", {"base": str(home)})) for name in ("scripts", "purelib")
    )
    done = run(*pip, "--python", programs / "python", "install", *offline, wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    # a path alone: the checkout, which this environment has by a file of the same kind, is not followed
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return programs


def test_the_wheel_answers_with_its_own_pair(installed: Path, tmp_path: Path) -> None:
    home = {"EDGELLM_HOME": str(tmp_path / "home"), "EDGELLM_PAIR": "home"}
    where = run(installed / "python", "-c", "import edgellm; print(edgellm.__file__)", cwd=tmp_path)
    assert Path(where.stdout).is_relative_to(installed.parent)
    told = run(installed / "edgellm", "--version", cwd=tmp_path, **home)
    assert told.stdout.startswith(f"edgellm {edgellm.__version__}\nllama.cpp: "), told.stderr
    notes = tmp_path / "notes.txt"
    notes.write_text("- The film night is on Friday at 20:00.\n")
    words = ("chat", "--context", notes, "When is the film night?")
    answer = run(installed / "edgellm", *words, cwd=tmp_path, **home)
    assert answer.stdout == "The film night is Friday at 20:00.\n", answer.stderr


def test_the_wheel_has_the_profile_and_every_file_beside_the_code(installed: Path) -> None:
    (package,) = installed.parent.rglob("site-packages/edgellm")
    code = ROOT / "edgellm"
    beside = {str(path.relative_to(code)) for path in code.rglob("*.*") if path.suffix not in (".py", ".pyc")}
    assert {"rpc/trust/words.txt", "storage/catalog.toml", "http/page/index.html"} <= beside
    wanted = {*beside, "bundled/profile.json", "bundled/draft.gguf", "rpc/protos/mesh_pb2.py"}
    assert not {name for name in wanted if not (package / name).is_file()}
    assert not list(installed.parent.rglob("site-packages/models"))


# --- examples ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["drafter", "gate", "verifier"])
def test_an_example_runs_as_it_says(name: str) -> None:
    run = [sys.executable, str(ROOT / "examples" / f"{name}.py")]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, timeout=120, check=False)
    assert (done.stderr, done.returncode) == ("", 0)
    assert ("corrected" if name == "gate" else "the same text: True") in done.stdout


def test_with_a_drafter_of_ones_own_the_text_is_the_verifiers(pair: LLM, alone: LLM) -> None:
    accepted = 0
    for number in range(6):
        wanted = [token.id for token in alone.reply(case(number), max_tokens=24)]
        reply = pair.reply(case(number), max_tokens=24, drafter=LastTime())
        assert [token.id for token in reply] == wanted
        by_itself = alone.reply(case(number), max_tokens=24, drafter=LastTime())
        assert [token.id for token in by_itself] == wanted
        accepted += reply.summary.accepted
    assert accepted > 0


def test_a_drafter_of_ones_own_says_nothing_that_a_budget_could_go_by(pair: LLM) -> None:
    with pytest.raises(InvalidOption, match=r"the budget 0\.2 only handles"):
        ReplyOptions(drafter=LastTime(), budget=0.2)
    reply = pair.reply(case(0), max_tokens=8, drafter=LastTime(), gate=Digits(pair.piece))
    assert list(reply)
