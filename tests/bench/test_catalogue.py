"""Each declaration in `bench/suites.toml` is well-formed, and its result can be shown."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from bench.harness import hardware, results
from bench.harness.catalogue import Benchmark, benchmarks, chosen
from bench.harness.settings import parameters, parser, settings
from testkit import ROOT

every = pytest.mark.parametrize("benchmark", benchmarks().values(), ids=benchmarks())


@every
def test_its_settings_are_parameters_of_its_module(benchmark: Benchmark) -> None:
    measure = benchmark.load().measure
    assert {*benchmark.settings, *benchmark.quick} <= parameters(measure).keys()
    made = parser(measure, benchmark.quick)
    required = [action for action in made._actions if action.required]
    words = [word for action in required for word in (action.option_strings[0], "somewhere")]
    assert settings(measure, made.parse_args(words)).keys() >= benchmark.quick.keys()
    assert callable(benchmark.load().table)


@every
def test_it_takes_the_options_for_hardware_that_it_is_said_to_use(benchmark: Benchmark) -> None:
    shown = parser(benchmark.load().measure, {}).format_help()
    for name in hardware.USED[benchmark.hardware] if benchmark.hardware else ():
        assert f"--{name.replace('_', '-')} " in shown


@every
def test_its_page_shows_it_and_it_depends_on_modules_that_are_there(benchmark: Benchmark) -> None:
    page, _, anchor = benchmark.page.partition("#")
    text = (ROOT / page).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert anchor in [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]
    assert re.search(rf"{benchmark.full_name}\b", text)
    assert all((ROOT / name).exists() for name in benchmark.runs)
    assert benchmark.files()


@every
def test_its_result_can_be_shown_and_plotted(benchmark: Benchmark, tmp_path: Path) -> None:
    if not results.place(benchmark.suite, benchmark.name).is_file():
        assert benchmark.shown().endswith("not measured yet")
        return
    found = benchmark.read_result()
    assert re.fullmatch(r"[0-9a-f]{40}", found["commit"])
    assert benchmark.command(found).startswith(f"python -m bench run {benchmark.full_name}")
    assert len(benchmark.shown().splitlines()) > 4
    if (plot := getattr(benchmark.load(), "plot", None)) is not None:
        drawn = plot(found, tmp_path / "drawn.png")
        if find_spec("matplotlib") is None:
            assert drawn is None
        else:
            assert drawn.read_bytes().startswith(b"\x89PNG")


def test_every_result_is_one_of_the_catalogue() -> None:
    kept = {
        f"{path.parent.name}/{path.stem}"
        for path in results.RESULTS.glob("*/*.*")
        if not path.stem.startswith("trial-")
    }
    assert kept <= benchmarks().keys()


def test_a_suite_is_all_of_its_benchmarks_each_once() -> None:
    some = chosen(["csgo/speed", "csgo"])
    assert [one.name for one in some] == ["speed", "paper", "exact", "cold_start"]
    for name in ("csgo/nonsense", "speed"):  # the latter is in several suites
        with pytest.raises(KeyError):
            chosen([name])
    assert [one.full_name for one in chosen(["first_minute"])] == ["cli/first_minute"]


def test_what_a_benchmark_does_not_use_is_kept_from_it() -> None:
    asked = {"threads": ["2"], "cache_type": ["q8_0"]}
    everything = ["--threads", "2", "--cache-type", "q8_0"]
    assert hardware.words_for(None, asked) == ([], everything)
    assert hardware.words_for(hardware.MODEL, asked) == (everything, [])
    assert hardware.words_for(hardware.THREADS, asked) == (everything[:2], everything[2:])
