"""Listing and removing what is on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgellm.errors import InvalidOption, ModelNotFound
from edgellm.storage import pull, remove
from tests.storage.hub import REPO, Hub, names


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


def test_removing_what_is_not_here(hub: Hub) -> None:
    with pytest.raises(ModelNotFound, match="not on this machine"):
        remove("ann/none:Q4_K_M")
    pull(REPO)
    with pytest.raises(ModelNotFound, match="available of"):
        remove(f"{REPO}:Q8_0")


def test_a_model_that_was_copied_for_want_of_links_is_no_unfinished_download(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(Path, "symlink_to", refused)
    pull(REPO)
    assert [model.name for model in remove(REPO)] == [f"{REPO}:Q4_K_M"]
    assert not list(cache.glob("models--*"))
