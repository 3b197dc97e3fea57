"""Whatever comes in is taken, or refused by an error of ours. The long run is `python -m bench.robustness.fuzz`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.robustness.fuzz.__main__ import alone, targets
from bench.robustness.fuzz.files import headers
from bench.robustness.fuzz.target import Outcome, Target, fire, take
from edgellm.errors import InvalidOption

NAMES = ("session", "verdict", "probabilities", "hello", "vocabulary", "welcome", "pairing", "introduction",
         "certificate", "spake", "mesh orders", "mesh reports", "layers", "figures", "measuring", "lines",
         "addresses", "codes", "devices", "short devices", "model names", "models", "announcements",
         "paired devices", "settings", "chats", "greatest age", "profile", "first replies", "identity", "cost curve",
         "fingerprints", "recipe", "owners", "device figures", "line figures", "doubts", "plan", "fleet")  # fmt: skip
# Readers for which a damaged file is one that is not there.
PASSED_OVER = {"greatest age", "fingerprints", "recipe", "owners", "cost curve", "device figures", "line figures",
               "doubts", "first replies"}  # fmt: skip
INPUTS = 120  # of each; a few thousand in all
SLOW = {"spake", "profile", "recipe"}


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Target]]:
    with ExitStack() as stack:
        yield {one.name: one for one in targets(tmp_path_factory.mktemp("fuzz"), stack)}


def test_every_reader_is_here(readers: dict[str, Target]) -> None:
    assert tuple(readers) == NAMES
    assert sum(one.share for one in readers.values()) >= 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_no_bad_input_does_harm(readers: dict[str, Target], name: str) -> None:
    done = fire(readers[name], 20 if name in SLOW else INPUTS, seed=1)
    assert done.strange == []
    assert done.refused or name in PASSED_OVER
    assert done.taken or name in ("vocabulary", "certificate", "spake")


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(sorted({*NAMES} - SLOW)), data=st.binary(max_size=200))
def test_noise_does_no_harm(readers: dict[str, Target], name: str, data: bytes) -> None:
    done = Outcome()
    take(readers[name], data, done, weigh=False)
    assert done.strange == []


def test_what_is_neither_taken_nor_refused_is_found() -> None:
    def odd(data: bytes) -> None:
        if data == b"a":
            raise InvalidOption("No.", "Say something else.")
        if data == b"b":
            raise KeyError(data)
        if data == b"c":
            bytearray(64 * 2**20)

    found = Outcome()
    for data in (b"a", b"b", b"c", b"d"):
        take(Target("odd", [b"a"], odd, 1), data, found, weigh=True)
    assert (found.inputs, found.taken, sum(found.refused.values())) == (4, 2, 1)
    assert ["KeyError" in one["error"] or "bytes" in one["error"] for one in found.strange] == [True, True]


def test_no_header_kills_the_process(tmp_path: Path) -> None:
    done = headers(150, 1, tmp_path)
    assert done.strange == []
    assert done.inputs == 150 > done.taken > 0


def test_the_largest_message_stays_within_its_memory() -> None:
    found = alone("message", "session numbers")
    assert "OUT_OF_RANGE" in found["error"]
    assert 0 < found["bytes"] < 256 * 2**20
