"""`bench/suites.toml` has every benchmark, and what it says of each is so."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.harness import report
from bench.harness.suite import Benchmark, benchmarks, chosen, main
from edgellm.cli.app import app
from edgellm.spec.drafters import verdict_prediction
from testkit import ROOT

every = pytest.mark.parametrize("benchmark", benchmarks().values(), ids=benchmarks())
NEEDS_ANOTHER_CHECKOUT = {"bench.engine.before_after"}


def source(benchmark: Benchmark) -> Path:
    place = ROOT / benchmark.module_name.replace(".", "/")
    return place / "__main__.py" if place.is_dir() else place.with_suffix(".py")


@every
def test_it_is_a_module_with_a_name_for_its_results(benchmark: Benchmark) -> None:
    text = source(benchmark).read_text(encoding="utf-8")
    assert f'"--name", default="{benchmark.module}"' in text
    assert benchmark.module_name in text  # so that results tell the command that repeats them
    assert callable(benchmark.load().main)
    assert callable(benchmark.load().table)


@every
def test_its_page_explains_it(benchmark: Benchmark) -> None:
    page, _, anchor = benchmark.page.partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
    assert benchmark.full_name in text or benchmark.module_name in text


@every
def test_its_result_in_the_repository_can_be_shown_and_plotted(benchmark: Benchmark, tmp_path: Path) -> None:
    if not report.place(benchmark.module_name, benchmark.name).is_file():
        pytest.skip("not measured yet")
    found = report.read(benchmark.module_name, benchmark.name)
    assert found["command"].split()[2] == benchmark.module_name
    assert len(benchmark.shown().splitlines()) > 4
    if (plot := getattr(benchmark.load(), "plot", None)) is not None:
        drawn = plot(found, tmp_path / "drawn.png")
        if find_spec("matplotlib") is None:
            assert drawn is None
            assert not list(tmp_path.iterdir())
        else:
            assert drawn.read_bytes().startswith(b"\x89PNG")


def test_every_module_that_writes_a_result_is_in_the_list() -> None:
    writing = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for path in (ROOT / "bench").rglob("*.py")
        if '"--name"' in path.read_text(encoding="utf-8") and path.parent.name != "harness"
    }
    assert writing - NEEDS_ANOTHER_CHECKOUT == {one.module_name for one in benchmarks().values()}


def test_a_suite_is_all_of_its_benchmarks_each_once() -> None:
    some = chosen(["csgo/speed", "csgo"])
    assert [one.name for one in some] == ["speed", "paper", "exact", "cold_start", "cold_start_wide"]
    for name in ("csgo/nonsense", "speed"):  # the latter is in several suites
        with pytest.raises(KeyError):
            chosen([name])
    assert [one.full_name for one in chosen(["first_minute"])] == ["cli/first_minute"]


def test_the_command_line_names_every_suite() -> None:
    said = " ".join(re.sub(r"[│|]", " ", CliRunner().invoke(app, ["bench", "--help"]).output).split())
    by_suite: dict[str, list[bool]] = {}
    for one in benchmarks().values():
        by_suite.setdefault(one.suite, []).append(one.hardware is not None)
    named = re.findall(r"Suite: ([a-z, ]+)\.", said)[0]
    assert set(re.split(r", | or ", named)) == set(by_suite)
    unused = re.findall(r"hardware-PART; of ([a-z, ]+) no part uses any", said)[0]
    assert set(re.split(r", | and ", unused)) == {suite for suite, used in by_suite.items() if not any(used)}


def test_a_run_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run"])
    assert ended.value.code == 2
    assert "say what to run" in capsys.readouterr().err


def test_the_hit_rates_of_verdict_prediction_are_what_was_measured() -> None:
    rows = report.read("bench.synera.verdict_prediction", "verdict_prediction")["rows"]
    (measured,) = (row["hits"] for row in rows if row["known"] == verdict_prediction.CONTEXT_BOOST)
    assert pytest.approx(measured, abs=0.006) == verdict_prediction.TOPK_HIT_RATE
