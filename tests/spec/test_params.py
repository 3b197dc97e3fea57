"""Options of a reply: what cannot be meant is refused; what is left open is as the model wants."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from edgellm.engine import ModelFile
from edgellm.engine.gguf.writer import entry
from edgellm.errors import InvalidOption
from edgellm.spec.gates.rules import NeverGate
from edgellm.spec.params import DEFAULT_SOURCES, GATES, ReplyOptions
from edgellm.spec.sampling import WHOLE_ROWS, Choice, ModelSampling, sampling_elsewhere, sampling_of
from edgellm.spec.types import Penalties, Sampling
from testkit.gguf.changed import with_entries, with_sampling


@pytest.mark.parametrize(
    ("option", "bad"),
    [
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_p", 0.0),
        ("top_p", 1.5), ("top_p", float("nan")), ("top_k", -1), ("top_k", 2.5), ("max_tokens", 0), ("max_tokens", True),
        ("gamma", 0), ("seed", -1), ("gate", "sometimes"),
        ("budget", 1.2), ("budget", -0.1), ("budget", float("nan")), ("exit_threshold", 2.0),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_meant_is_named_with_its_value(option: str, bad: object) -> None:
    with pytest.raises(InvalidOption) as caught:
        ReplyOptions(**{option: bad})  # type: ignore[arg-type]
    assert str(bad) in caught.value.what
    assert option in caught.value.what or option == "gate"


@pytest.mark.parametrize("gate", sorted(set(GATES) - {"auto", "always", "never"}))
def test_a_gate_that_means_nothing_without_a_budget_is_refused(gate: str) -> None:
    with pytest.raises(InvalidOption, match=f"{gate} needs a budget"):
        ReplyOptions(gate=gate)
    ReplyOptions(gate=gate, budget=0.2)


@pytest.mark.parametrize("gate", ["always", "never", NeverGate()])
def test_a_gate_that_keeps_no_budget_is_refused_with_one(gate: str | NeverGate) -> None:
    with pytest.raises(InvalidOption, match=r"does not keep a budget of 0\.5"):
        ReplyOptions(gate=gate, budget=0.5)
    ReplyOptions(gate="always", budget=1.0)
    ReplyOptions(gate="never", budget=0.0)


WANTED = ModelSampling(temperature=0.6, top_k=20, top_p=0.9, min_p=0.02, repeat_penalty=1.1)


def test_a_seed_is_picked_where_none_is_given() -> None:
    assert ReplyOptions().sampling(WANTED).seed != ReplyOptions().sampling(WANTED).seed
    assert ReplyOptions(seed=0).sampling(WANTED).seed == 0


def test_what_is_left_open_is_as_the_model_wants() -> None:
    rule = Sampling(0.6, 20, 0.9, 5, 0.02, Penalties(repeat=1.1, start=7))
    assert ReplyOptions(seed=5).sampling(WANTED, 7) == rule
    assert ReplyOptions(seed=5, top_p=0.5).sampling(WANTED, 7) == replace(rule, top_p=0.5)


@pytest.mark.parametrize(
    ("option", "given"), [("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0), ("repeat_penalty", 1.0)]
)
def test_what_is_given_is_exact_also_where_it_switches_something_off(option: str, given: float) -> None:
    rule = ReplyOptions(**{option: given}).sampling(WANTED)  # type: ignore[arg-type]
    found = {"repeat_penalty": 1.0 if rule.penalties is None else rule.penalties.repeat} | asdict(rule)
    assert {name: found[name] for name in WANTED.figures()} == WANTED.figures() | {option: given}


def test_sources_are_named_in_any_order_and_come_in_one() -> None:
    assert ReplyOptions(retrieval="off").sources() == ()
    assert ReplyOptions().sources() == DEFAULT_SOURCES
    assert ReplyOptions(retrieval="reuse, context").sources() == ("context", "reuse")
    with pytest.raises(InvalidOption, match="'dreams'"):
        ReplyOptions(retrieval="context,dreams")


BUNDLED = Path(__file__).parents[2] / "models"
CARD = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.0, "repeat_penalty": 1.0}


def unnamed(folder: Path, name: str, **entries: str) -> Path:
    """Return a model that nobody knows, in a file of this name, with these texts."""
    said = {"general.name": "nobody's", **entries}
    return with_entries(BUNDLED / "draft.gguf", folder / name, {key: entry(key, value) for key, value in said.items()})


def wanted(path: Path) -> tuple[Mapping[str, float], str]:
    found = sampling_of(ModelFile.open(path))
    return found.figures(), found.origin


def test_the_file_says_it_first(tmp_path: Path) -> None:
    source = unnamed(tmp_path, "Qwen3-8B-Q4_K_M.gguf")
    everything = with_sampling(
        source, tmp_path / "Qwen3-8B-all.gguf", temp=0.35, top_k=33, top_p=0.85, min_p=0.01, penalty_repeat=1.05
    )
    said = {"temperature": 0.35, "top_k": 33, "top_p": 0.85, "min_p": 0.01, "repeat_penalty": 1.05}
    assert wanted(everything) == (said, "the model's file")
    partly = with_sampling(source, tmp_path / "Qwen3-8B-some.gguf", temp=0.0)
    assert wanted(partly) == ({**CARD, "temperature": 0.0}, "the model's file and its card")


def test_a_value_that_makes_no_sense_counts_as_left_out(tmp_path: Path) -> None:
    source = unnamed(tmp_path, "unknown.gguf")
    broken = with_sampling(
        source, tmp_path / "broken.gguf", temp=-1.0, top_p=0.0, min_p=-1.0, penalty_repeat=0.0, top_k=30
    )
    assert wanted(broken)[0] == ModelSampling(temperature=0.7, top_k=30).figures()


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", {}), ("renamed.gguf", {"general.basename": "Qwen3"}),
        ("renamed.gguf", {"general.name": "Qwen3 0.6B Instruct"}),
    ],
)  # fmt: skip
def test_then_the_card_by_the_names_of_file_and_model(tmp_path: Path, name: str, entries: dict[str, str]) -> None:
    assert wanted(unnamed(tmp_path, name, **entries)) == (CARD, "its card")


@pytest.mark.parametrize("name", ["draft.gguf", "verifier.gguf", "code/draft.gguf", "code/verifier.gguf"])
def test_the_bundled_pairs_are_greedy(name: str) -> None:
    assert wanted(BUNDLED / name)[0]["temperature"] == 0.0


def test_a_model_elsewhere_is_known_by_its_name_or_by_one_of_its_tokenizer(tmp_path: Path) -> None:
    text_model = ModelFile.open(with_sampling(BUNDLED / "draft.gguf", tmp_path / "own.gguf", temp=0.9))
    assert sampling_elsewhere("Qwen/Qwen3-8B", text_model).figures() == CARD
    assert sampling_elsewhere("my-model", text_model).temperature == pytest.approx(0.9)


def test_from_few_likely_tokens_is_drawn_what_they_allow() -> None:
    asked = ModelSampling(0.8, top_k=40, repeat_penalty=1.1)
    assert asked.told_by(WHOLE_ROWS) == asked
    assert asked.told_by(Choice(likely=20)) == ModelSampling(0.8, top_k=20)
    assert ModelSampling(0.8, top_k=0).told_by(Choice(likely=20)) == ModelSampling(0.8, top_k=20)
    assert asked.told_by(Choice(likely=0, draws_itself=True)) == ModelSampling(0.8, top_k=40)
