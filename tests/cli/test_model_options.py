"""The hardware options hold for both models or for one, everywhere, and are refused before anything is loaded."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from edgellm.cli.app import app
from edgellm.cli.options import DRAFT, VERIFIER, HardwareOptions
from edgellm.engine.hardware import ALL_LAYERS, Hardware
from edgellm.errors import InvalidOption


def given(**options: list[str]) -> HardwareOptions:
    return HardwareOptions(**{name: tuple(values) for name, values in options.items()})


def test_a_value_holds_for_both_models_or_for_one() -> None:
    options = given(
        gpu_layers=["all", "draft=0"], threads=["4"], ctx_size=["draft=512", "8192"], cache_type=["verifier=q8_0"],
        device=["CUDA0/CUDA1"], tensor_split=["3/1"], flash_attn=["on"], mlock=["draft=on"], batch_size=["256"],
    )  # fmt: skip
    assert options.of(VERIFIER) == Hardware(
        ALL_LAYERS, ("CUDA0", "CUDA1"), (3.0, 1.0), 4, 8_192, 256, "q8_0", True, False
    )
    assert options.of(DRAFT) == Hardware(0, ("CUDA0", "CUDA1"), (3.0, 1.0), 4, 8_192, 256, None, True, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("gpu_layers", "many"), ("threads", "0"), ("threads", "x"), ("tensor_split", "a/b"), ("flash_attn", "maybe"),
     ("cache_type", "q2"), ("mlock", "yes"), ("ctx_size", "verifiers=5"), ("batch_size", "-1")],
)  # fmt: skip
def test_a_value_that_does_not_exist_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        given(**{name: [value]}).of(VERIFIER)
    assert value.rpartition("=")[2].lstrip("-") in refused.value.what


@pytest.mark.parametrize("command", ["plan", "deploy"])
def test_what_plans_for_devices_has_those_that_a_plan_depends_on(command: str) -> None:
    shown = CliRunner().invoke(app, ["mesh", command, "--help-all"], env={"COLUMNS": "120"}).output
    for option in ("--gpu-layers", "--device", "--tensor-split", "--threads", "--ctx-size", "--cache-type"):
        assert option in shown
    assert "--mlock" not in shown
    assert "draft=" not in shown


def test_a_chat_uses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = CliRunner()
    done = runner.invoke(app, ["chat", "Where is my mug?", "--threads", "1", "--ctx-size", "256", "--max-tokens", "4"])
    assert done.exit_code == 0, done.output
    monkeypatch.setenv("EDGELLM_CHAT_CTX_SIZE", "16")
    done = runner.invoke(app, ["chat", "Where is my mug in the house of my grandmother, and where is the old key?"])
    assert done.exit_code != 0
    assert "holds 16" in str(done.exception)
    done = runner.invoke(app, ["chat", "Where is my mug?", "--ctx-size", "verifier=256", "--gpu-layers", "all"])
    assert "finds none" in str(done.exception)
