"""Which pair suits a machine, and why."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm import system
from edgellm.engine.hardware import ComputeDevice
from edgellm.errors import InvalidOption, MemoryShort
from edgellm.storage import catalog, pair_choice
from edgellm.storage.pair_choice import PROCESSOR, ModelRoom, propose

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
    with pytest.raises(MemoryShort, match=r"No pair of the catalogue fits: smollm2:135m has 0.1 GB"):
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
