"""The files that names stand for, their removal, and the pair that answers where none is named."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm import system
from edgellm.cli import options as model_options
from edgellm.engine.hardware import ComputeDevice
from edgellm.errors import InvalidOption, MemoryShort, ModelNotFound
from edgellm.llm import LLM
from edgellm.storage import pair_choice
from edgellm.storage.catalog import catalog
from edgellm.storage.model_files import DEFAULT, HOME, SMOLLM2, VARIABLE, list_models, resolve, resolve_pair
from edgellm.storage.pair_choice import PROCESSOR, ModelRoom, propose
from edgellm.storage.upkeep import removable, remove
from tests.storage.hub import REPO, Hub, names, pull, tiny_gguf
from tests.storage.wheels import packages, real_pair

__all__ = ["packages", "real_pair"]


def test_a_path_is_a_model_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "model").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("sub/model").read_bytes() == b"x"
    assert resolve("~/sub/model").read_bytes() == b"x"


@pytest.mark.parametrize(
    "name",
    ["./none", "none.gguf", "sub/none.gguf", "~/none", "/none", "", "~\0", "~\ud800", "/\0", "x" * 300 + ".gguf"],
)
def test_a_missing_file_is_not_taken_for_a_hub_name(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"There is no file|is a folder"):
        resolve(name)


def test_the_bundled_pair_is_found_in_a_wheel_and_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "bundled_dirs", lambda: (tmp_path / "edgellm" / "bundled", tmp_path / "models"))
    with pytest.raises(ModelNotFound, match="Install edgellm again"):
        resolve("edgellm-draft")
    for place in (tmp_path / "models", tmp_path / "edgellm" / "bundled"):
        place.mkdir(parents=True)
        (place / "draft.gguf").touch()
        assert resolve("edgellm-draft") == place / "draft.gguf"


def test_a_short_name_is_a_name_everywhere(hub: Hub, cache: Path) -> None:
    data = tiny_gguf(3_000)
    hub.repos["Qwen/Qwen3-8B-GGUF"] = {"Qwen3-8B-Q4_K_M.gguf": data, "Qwen3-8B-Q8_0.gguf": tiny_gguf(5_000)}
    assert pull("qwen3:8b").path.read_bytes() == data
    assert resolve("qwen3:8b") == resolve("Qwen3:8B-Q4_K_M") == resolve("Qwen/Qwen3-8B-GGUF")
    with pytest.raises(ModelNotFound, match=r"qwen3:8b-q8_0 is not on this machine; available .*: Q4_K_M"):
        resolve("qwen3:8b-q8_0")
    assert pull("qwen3:8b-q8_0").plan.file == "Qwen3-8B-Q8_0.gguf"
    here = [(model.name, model.repo_id) for model in list_models() if model.origin == "hub"]
    assert here == [("qwen3:8b", "Qwen/Qwen3-8B-GGUF"), ("qwen3:8b-q8_0", "Qwen/Qwen3-8B-GGUF")]
    assert [model.name for model in removable("qwen3:8b")] == ["qwen3:8b"]
    remove("qwen3:8b")
    assert [model.name for model in list_models() if model.origin == "hub"] == ["qwen3:8b-q8_0"]


def test_an_unknown_name_answers_with_the_nearest_of_those_that_are_here_too(hub: Hub) -> None:
    hub.repos["ann/mistral-7b"] = {"mistral-7b-Q4_K_M.gguf": tiny_gguf(3_000)}
    pull("ann/mistral-7b")
    with pytest.raises(ModelNotFound, match="Did you mean ann/mistral-7b:Q4_K_M"):
        resolve("mistral-7b-Q4_K_M")


def test_a_blob_that_another_snapshot_still_links_stays(hub: Hub, cache: Path) -> None:
    path = pull(REPO).path
    folder = cache / "models--ann--tiny-GGUF"
    other = folder / "snapshots" / ("f" * 40)
    other.mkdir()
    (other / "renamed.gguf").symlink_to(path.readlink())
    remove(f"{REPO}:Q4_K_M")
    assert (other / "renamed.gguf").is_file()


def test_a_link_out_of_the_repository_is_not_followed(hub: Hub, cache: Path, tmp_path: Path) -> None:
    """The hub may keep a blob once for several repositories, as a link to it: that one belongs to all of them."""
    path = pull(REPO).path
    blob = path.parent / path.readlink()
    shared = tmp_path / "shared"
    blob.rename(shared)
    blob.symlink_to(shared)
    remove(REPO)
    assert shared.is_file()
    assert names() == []


def test_your_own_files_and_the_bundled_pair_are_never_removed(tmp_path: Path, cache: Path) -> None:
    mine = tmp_path / "mine.gguf"
    mine.touch()
    with pytest.raises(InvalidOption, match="your own file"):
        remove(str(mine))
    with pytest.raises(InvalidOption, match="part of edgellm"):
        remove("edgellm-draft")
    assert mine.exists()


def test_a_model_that_was_copied_for_want_of_links_is_no_unfinished_download(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "symlink_to", refused)
    pull(REPO)
    assert [model.name for model in remove(REPO)] == [f"{REPO}:Q4_K_M"]
    assert not list(cache.glob("models--*"))


def test_the_pair_of_the_variable_is_used(packages: Path) -> None:
    pull(SMOLLM2.verifier)
    assert resolve_pair(DEFAULT, DEFAULT) == (*HOME, "")
    assert resolve_pair("a.gguf", "b.gguf") == ("a.gguf", "b.gguf", "")


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "houme")
    with pytest.raises(InvalidOption, match="houme"):
        resolve_pair(DEFAULT, DEFAULT)


@pytest.mark.usefixtures("real_pair")
def test_the_home_pair_stands_in_until_the_real_one_is_here() -> None:
    with LLM.open(threads=1) as pair:
        assert pair.name == HOME.verifier
        (notice,) = pair.notices
    assert f"edgellm pull {SMOLLM2.verifier}" in notice
    pull(SMOLLM2.verifier)
    with LLM.open(threads=1) as pair:
        assert (pair.name, pair.notices) == (SMOLLM2.verifier, ())


@pytest.mark.usefixtures("real_pair")
def test_a_default_beside_a_named_model() -> None:
    pull(SMOLLM2.verifier)
    assert resolve_pair(DEFAULT, DEFAULT) == (*SMOLLM2, "")
    assert resolve_pair(DEFAULT, "other.gguf") == (SMOLLM2.draft, "other.gguf", "")
    assert resolve_pair(None, DEFAULT) == (None, SMOLLM2.verifier, "")
    assert resolve_pair(DEFAULT, HOME.verifier) == (*HOME, "")
    assert resolve_pair(HOME.draft, DEFAULT) == (*HOME, "")


def test_the_command_line_has_the_same_names() -> None:
    names = (model_options.DEFAULT, model_options.DEFAULT_DRAFT, model_options.DEFAULT_VERIFIER)
    assert names == (DEFAULT, *SMOLLM2)


# --- the pair that suits a machine ------------------------------------------------------------------------------------


GB = 10**9
FAST = ModelRoom(64 * GB, "three quarters of its memory, 64.0 GB", read_speed=400e9)


def with_memory(gigabytes: float, speed: float = 40e9) -> ModelRoom:
    return replace(FAST, memory=int(gigabytes * GB), read_speed=speed)


@pytest.mark.parametrize(
    ("gigabytes", "names"), [(3.4, ("qwen3.5:4b", "qwen3.5:0.8b")), (1.9, ("qwen3.5:2b", "qwen3.5:0.8b"))]
)
def test_small_machines_get_small_pairs(gigabytes: float, names: tuple[str, str]) -> None:
    proposal = propose(catalog(), with_memory(gigabytes))
    assert (proposal.verifier.name, proposal.draft and proposal.draft.name) == names


def test_a_draft_model_that_does_not_fit_or_reads_too_much_is_left_out_with_the_reason() -> None:
    alone = propose(catalog(), with_memory(5.8), "qwen3.5:9b")
    assert alone.draft is None
    assert "its draft model qwen3.5:0.8b does not fit beside it" in alone.reasons
    alone = propose(catalog(), replace(FAST, memory=100 * GB), "gpt-oss:120b")
    assert alone.draft is None
    assert "its draft model gpt-oss:20b reads 75% as much for a token, which is too much" in alone.reasons
    alone = propose(catalog(), FAST, "gpt-oss:20b")
    assert "no smaller model in the catalogue has its tokenizer" in alone.reasons


def test_cards_take_the_verifier_first_and_share_it_with_the_memory_if_they_must() -> None:
    card = replace(FAST, cards=("CUDA0",), card_memory=24 * GB)
    proposal = propose(catalog(), card, "qwen3.6:27b")
    assert (proposal.verifier_on, proposal.draft_on, proposal.tokens_per_second) == ("CUDA0", "CUDA0", None)
    small = replace(card, card_memory=8 * GB, read_speed=40e9)
    proposal = propose(catalog(), small, "qwen3.6:27b")
    assert proposal.verifier_on == "CUDA0 and the processor"
    assert proposal.draft_on == PROCESSOR
    assert proposal.tokens_per_second == pytest.approx(40e9 / (16_817_244_384 - 8 * GB), rel=0.01)


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(MemoryShort, match=r"llama3.3:70b has 42.5 GB of weights; there is room for 6.0 GB") as raised:
        propose(catalog(), with_memory(6), "llama3.3:70b")
    assert "edgellm mesh plan" in raised.value.next_step
    assert "--verifier" in raised.value.next_step
    with pytest.raises(MemoryShort, match=r"No pair of the catalogue fits: smollm2:135m has 144.8 MB"):
        propose(catalog(), with_memory(0.1))
    with pytest.raises(InvalidOption, match="The catalogue has no 'nothing:1b'"):
        propose(catalog(), FAST, "nothing:1b")


@given(
    st.integers(0, 200 * GB), st.integers(0, 200 * GB), st.floats(1e9, 1e12), st.sampled_from([None, *catalog().models])
)
def test_what_is_proposed_fits(memory: int, cards: int, speed: float, wanted: str | None) -> None:
    names = ("CUDA0", "CUDA1") if cards else ()
    room = ModelRoom(memory, "so it is", names, cards, speed)
    try:
        proposal = propose(catalog(), room, wanted)
    except MemoryShort:
        return
    taken = proposal.verifier.size + (proposal.draft.size if proposal.draft is not None else 0)
    assert taken <= memory + cards
    assert wanted in (None, proposal.verifier.name)
    assert proposal.reasons


def test_the_room_is_what_is_free_or_three_quarters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "total_memory", lambda: 16 * GB)
    monkeypatch.setattr(sys, "platform", "linux")
    free = 14 * GB, "the machine's free memory"
    monkeypatch.setattr(system, "available_memory", lambda: free)
    devices = [ComputeDevice("CPU", "", "cpu", 0, 0), ComputeDevice("CUDA0", "", "gpu", 8 * GB, 8 * GB)]
    monkeypatch.setattr(pair_choice, "compute_devices", lambda: devices)
    room = ModelRoom.look()
    assert (room.memory, room.reason) == (12 * GB, "three quarters of its memory, 12.0 GB")
    assert room.cards == ("CUDA0",)
    assert 6 * GB < room.card_memory < 7 * GB
    free = 3 * GB, "the free memory of its control group"
    assert ModelRoom.look().reason == "the free memory of its control group, 3.0 GB"
    monkeypatch.setattr(sys, "platform", "darwin")
    room = ModelRoom.look()
    assert (room.cards, room.card_memory, room.host) == ((), 0, "CUDA0")
