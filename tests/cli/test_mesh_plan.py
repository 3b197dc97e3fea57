"""`mesh plan`: as a user would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Done
from tests.mesh.test_fleet_file import DESKTOP, LAPTOP, MODEL

Edge = Callable[..., Done]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home.toml"
    path.write_text(DESKTOP + LAPTOP, encoding="utf-8")
    return path


def test_the_papers_setting_on_the_screen(edge: Edge) -> None:
    done = edge("mesh", "plan", "--preset", "csgo", "--overlap", "paper", "--tokens-in", "8192")
    assert done.code == 0
    assert done.err == ""
    lines = done.out.splitlines()
    assert lines[0].startswith("Qwen3-14B: 40 layers, 26.4 GB; least time to the first token")
    assert any(line.startswith("Device 1") and "14-40" in line and "17.8 GB" in line for line in lines)
    assert any(line.startswith("Device 4") and "no plan with it is faster" in line for line in lines)
    assert any("█" in line and line.endswith("7.03 s") for line in lines)
    assert any(line.startswith("even split") and "12.45 s" in line for line in lines)
    assert any(line.startswith("best single device") and "does not fit" in line for line in lines)
    assert lines[-1].startswith("Split it over Device 3, Device 2 and Device 1: 7.03 s.")


def test_the_plan_as_json(edge: Edge) -> None:
    answer = edge("mesh", "plan", "--preset", "csgo", "--overlap", "paper", "--tokens-in", "256", "--json").answer
    assert answer["ttft_s"] == pytest.approx(2.562, abs=1e-3)
    assert answer["optimal"] is True
    assert answer["planner_ms"] > 0
    first, *_, last = answer["stages"]
    assert (first["device"], first["first_layer"], last["last_layer"]) == ("Device 3", 1, 40)
    assert set(first) >= {"load_s", "wait_s", "network_s", "compute_s", "finish_s"}
    assert last["finish_s"] == answer["ttft_s"]
    assert answer["baselines"]["best_single"] is None
    assert answer["baselines"]["even"] == pytest.approx(3.612, abs=1e-3)
    assert answer["baselines"]["ideal_single"] == pytest.approx(6.129, abs=1e-3)
    assert answer["advice"]


def test_a_model_that_is_here_on_devices_from_a_file(edge: Edge, home: Path) -> None:
    answer = edge("mesh", "plan", "edgellm-verifier", "--devices", str(home), "--json").answer
    assert answer["stages"][-1]["last_layer"] == 12
    assert answer["advice"].startswith("Use ")
    assert "alone" in answer["advice"]
    shown = edge("mesh", "plan", "edgellm-verifier", "--devices", str(home))
    assert shown.code == 0
    assert "holds everything" in shown.out


def test_the_memory_of_the_context_decides_the_plan_and_the_run(edge: Edge, home: Path) -> None:
    small = DESKTOP.replace("memory_gb = 16", "memory_gb = 0.025")
    home.write_text(small + small.replace("desktop", "laptop"), encoding="utf-8")
    words = ("mesh", "plan", "edgellm-verifier", "--devices", str(home), "--tokens-in", "16", "--tokens-out", "4")
    short, long = edge(*words, "--ctx-size", "256", "--json").answer, edge(*words, "--json").answer
    assert (short["context_length"], long["context_length"]) == (256, 1024)  # as many as it was trained for
    assert short["baselines"]["best_single"] is not None
    assert long["baselines"]["best_single"] is None
    assert len(long["stages"]) == 2
    assert edge(*words, "--ctx-size", "1024", "--json").answer["baselines"] == long["baselines"]
    wide = edge(*words, "--ctx-size", "1024", "--cache-type", "f32")
    assert (wide.code, "The model needs" in wide.err) == (1, True)
    assert "a context of 256 tokens; change it with --ctx-size" in edge(*words, "--ctx-size", "256").err
    home.write_text(small.replace("desktop", "here"), encoding="utf-8")
    run = ("mesh", "run", "edgellm-verifier", "Hi", "--devices", str(home), "--max-tokens", "2", "--ctx-size")
    assert edge(*run, "256").code == 0
    refused, planned = edge(*run, "1024"), edge(*words)
    assert (refused.code, planned.code) == (1, 1)
    assert refused.err == planned.err


@pytest.mark.parametrize(("name", "magic"), [("plan.png", b"\x89PNG"), ("plan.svg", b"<?xml")])
def test_it_is_drawn(edge: Edge, tmp_path: Path, name: str, magic: bytes) -> None:
    pytest.importorskip("matplotlib")
    done = edge("mesh", "plan", "--preset", "csgo", "--plot", str(tmp_path / name))
    assert done.code == 0
    assert f"wrote {tmp_path / name}" in done.err
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_a_plan_that_ran_out_of_time_says_so(edge: Edge) -> None:
    asked = ("mesh", "plan", "--preset", "csgo", "--objective", "reply", "--time-limit", "0")  # a first token is quick
    done = edge(*asked)
    assert done.code == 0
    assert "within " in done.out
    assert "faster may exist" in done.out
    answer = edge(*asked, "--json").answer
    assert answer["optimal"] is False
    assert 0.0 < answer["gap"] < 1.0


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ((), 2, "There are no devices to plan for. Give a MODEL"),
        (("--preset", "home"), 2, "Choose from csgo"),
        (("--preset", "csgo", "--devices", "x.toml"), 2, "--devices and --preset exclude"),
        (("--devices", "none.toml"), 2, "none.toml cannot be read"),
        (("nobody/nothing", "--preset", "csgo"), 1, "edgellm pull nobody/nothing"),
        (("--preset", "csgo", "--plot", "plan.pdf"), 2, "ends in .png or .svg"),
        (("--preset", "csgo", "--tokens-in", "0"), 2, "--tokens-in"),
        (("--preset", "csgo", "--tokens-in", "2000000"), 1, "Choose a smaller model"),
        (("--preset", "csgo", "--overlap", "some"), 2, "--overlap"),
        (("--preset", "csgo", "--threads", "2"), 2, "--threads has no meaning with described devices"),
        (("--preset", "csgo", "--ctx-size", "512"), 2, "--ctx-size needs a model file"),
        (("edgellm-verifier", "--ctx-size", "100"), 2, "1152 tokens in all do not fit into a context of 100"),
        (("edgellm-verifier", "--ctx-size", "4096"), 2, "trained for 1024"),
        (("edgellm-verifier", "--engine", "stages", "--batch-size", "8"), 2, "--batch-size does not change a plan"),
        (("edgellm-verifier", "--mlock", "on"), 2, "--mlock does not change a plan: give it to edgellm mesh run"),
        (("edgellm-verifier", "--threads", "draft=2"), 2, "--threads draft=2 is for a draft model"),
    ],
)
def test_what_is_wrong_is_said(edge: Edge, cache: Path, words: tuple[str, ...], code: int, said: str) -> None:
    done = edge("mesh", "plan", *words)
    assert (done.code, done.out) == (code, "")
    assert said in done.err
    assert done.err.count("\n") == 1


def test_names_in_a_file_cannot_command_the_terminal(edge: Edge, home: Path) -> None:
    home.write_text(DESKTOP.replace("desktop", "a\\u001b[2Jb") + MODEL, encoding="utf-8")
    assert "\x1b" not in edge("mesh", "plan", "--devices", str(home)).err
