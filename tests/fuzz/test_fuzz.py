"""Whatever comes in is taken, or refused by an error of ours: messages, names, lists and headers, changed at random."""

from pathlib import Path

import pytest

from tests.fuzz import files, link_messages, mesh_messages
from tests.fuzz.reading import Reader, fire

NAMES = ("session", "verdict", "probabilities", "hello", "welcome", "pairing", "introduction",
         "certificate", "spake", "mesh orders", "mesh reports", "layers", "figures", "measuring",
         "addresses", "codes", "short devices", "model names", "models", "announcements",
         "paired devices")  # fmt: skip
SLOW = ("spake",)
NEVER_TAKEN = ("certificate", "spake")


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    folder = tmp_path_factory.mktemp("fuzz")
    found = (*link_messages.readers(folder / "link"), *mesh_messages.readers(), *files.readers(folder))
    return {one.name: one for one in found}


def test_every_reader_is_here(readers: dict[str, Reader]) -> None:
    assert tuple(readers) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [120, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_no_bad_input_does_harm(readers: dict[str, Reader], name: str, count: int) -> None:
    done = fire(readers[name], min(20 * count // 120, 200) if name in SLOW else count, seed=count)
    assert done.strange == []
    assert done.refused
    assert done.taken or name in NEVER_TAKEN


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.nightly)])
def test_no_header_kills_the_process(tmp_path: Path, count: int) -> None:
    done = files.headers(count, 1, tmp_path)
    assert done.strange == []
    assert count > done.taken > 0
