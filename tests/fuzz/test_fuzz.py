"""Whatever comes in is taken, or refused by an error of ours: messages, names, lists and headers, changed at random."""

import json
from pathlib import Path

import pytest

from tests.fuzz import files, link_messages, mesh_messages
from tests.fuzz.reading import CORPUS, fire

SLOW = ("spake",)
NEVER_TAKEN = ("certificate", "spake")


@pytest.mark.parametrize("count", [120, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_no_bad_input_does_harm(tmp_path: Path, count: int) -> None:
    readers = [*link_messages.readers(tmp_path / "link"), *mesh_messages.readers(), *files.readers(tmp_path)]
    assert json.loads(CORPUS.read_text()).keys() <= {reader.name for reader in readers}
    for reader in readers:
        done = fire(reader, min(20 * count // 120, 200) if reader.name in SLOW else count, seed=count)
        assert done.strange == [], reader.name
        assert done.refused, reader.name
        assert done.taken or reader.name in NEVER_TAKEN, reader.name


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.nightly)])
def test_no_header_kills_the_process(tmp_path: Path, count: int) -> None:
    done = files.headers(count, 1, tmp_path)
    assert done.strange == []
    assert count > done.taken > 0
