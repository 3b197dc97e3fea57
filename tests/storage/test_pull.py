"""Pulling from a hub that behaves, and from one that does not. No byte may come twice, and none may be wrong."""

from __future__ import annotations

import errno
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, scan_cache_dir

from edgellm.errors import DiskFull, ModelCorrupt, ModelNotFound, PullFailed
from edgellm.storage import plan, pull, resolve
from edgellm.storage.hub import download
from edgellm.storage.hub.pull import Transfer, fetch
from tests.storage.hub import COMMIT, REPO, Hub, tiny_gguf

Q4 = "tiny-Q4_K_M.gguf"


def test_a_model_is_pulled_into_the_standard_cache(hub: Hub, cache: Path) -> None:
    seen: list[Transfer] = []
    got = pull(REPO, seen.append)
    data = hub.repos[REPO][Q4]
    assert got.plan.file == Q4
    assert got.plan.reason == "the default"
    assert got.path.read_bytes() == data
    assert seen[-1] == Transfer(len(data), len(data), 0, len(data))
    assert resolve(REPO) == resolve(f"hf.co/{REPO}:q4_k_m") == got.path
    hub.sent.clear()
    assert pull(REPO).path == got.path
    assert hub.sent == [], "it is here"
    (repo,) = scan_cache_dir(cache).repos  # the hub's own tool reads what we wrote
    assert (repo.repo_id, {ref for revision in repo.revisions for ref in revision.refs}) == (REPO, {"main"})


def test_a_pull_that_failed_goes_on_in_the_next(hub: Hub, cache: Path) -> None:
    data = hub.repos[REPO][Q4]
    hub.cut_after = [60_000, *[0] * download.ATTEMPTS]
    with pytest.raises(PullFailed, match=r"stopped at 0\.1 MB of 0\.2 MB.*to resume"):
        pull(REPO)
    hub.cut_after = []
    got = pull(REPO)
    assert got.path.read_bytes() == data
    assert hub.bytes_sent() == len(data)
    assert got.sent == len(data) - 60_000
    assert not list(cache.rglob("*.incomplete"))


def test_a_server_that_ignores_ranges_still_gives_the_right_file(hub: Hub) -> None:
    hub.cut_after = [60_000]
    hub.ignore_range = True
    assert pull(REPO).path.read_bytes() == hub.repos[REPO][Q4]
    assert [start for _, start, _ in hub.sent] == [0, 0]


def test_a_partial_file_that_is_too_long_is_dropped(hub: Hub, cache: Path) -> None:
    etag = plan(REPO).files[0].etag
    blobs = cache / "models--ann--tiny-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{etag}.incomplete").write_bytes(b"x" * 300_000)
    assert pull(REPO).path.read_bytes() == hub.repos[REPO][Q4]


@pytest.mark.parametrize(
    ("lie", "said"), [(-5, ""), (100, "200128 bytes, but 100 were"), (10**7, "but 10000000 were"), (10**400, "")]
)
def test_a_size_that_does_not_hold_is_refused(hub: Hub, cache: Path, lie: int, said: str) -> None:
    hub.announce = lie
    with pytest.raises(PullFailed) as refused:
        pull(REPO)
    assert said in refused.value.what
    assert not list(cache.rglob("snapshots/*/*"))


def test_what_is_not_a_gguf_is_not_kept(hub: Hub, cache: Path) -> None:
    hub.repos[REPO][Q4] = b"<html>" * 100
    with pytest.raises(ModelCorrupt, match=rf"The hub's file cannot be used: {Q4} is not a GGUF"):
        pull(REPO)
    assert not [path for path in cache.rglob("*") if path.is_file() and ".locks" not in path.parts]


def test_a_private_repository_wants_a_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens = {"hf_good"}
    with pytest.raises(ModelNotFound, match="for a private repository, set HF_TOKEN"):
        pull(REPO)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert pull(REPO).path.exists()


def test_nobody_there(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PullFailed, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        pull(REPO)


def test_without_the_hub_what_is_here_will_do(hub: Hub) -> None:
    path = pull(REPO).path
    hub.status = 503
    got = pull(REPO)
    assert got.path == path
    assert "cannot be reached" in got.plan.reason


def test_offline_is_respected(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(PullFailed, match="HF_HUB_OFFLINE is set"):
        pull(REPO)
    assert hub.sent == []


def test_a_disk_that_fills_up_keeps_what_has_arrived(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = download._receive

    def full(*asked: Any) -> Iterator[int]:
        yield next(receive(*asked))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(download, "_receive", full)
        with pytest.raises(DiskFull, match="downloaded part is kept"):
            pull(REPO)
    assert pull(REPO).path.read_bytes() == hub.repos[REPO][Q4]
    assert hub.sent[-1][1] > 0


@pytest.mark.parametrize(
    ("listing", "encoding", "said"),
    [
        (b"[" * 200_000, "identity", "not the JSON of a model"),
        (b"7", "identity", "not the JSON of a model"),
        (b'{"sha": ' + b"9" * 9_999 + b"}", "identity", "not the JSON of a model"),
        (b"\x1f\x8b\x08", "identity", "not the JSON of a model"),
        (b'{"x": "' + b"x" * 2_000_000 + b'"}', "identity", "more than 1 MiB"),
        (gzip.compress(bytes(2_000_000)), "gzip", "more than 1 MiB"),
    ],
)
def test_a_listing_without_sense_or_end_is_refused(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, listing: bytes, encoding: str, said: str
) -> None:
    monkeypatch.setattr("edgellm.storage.hub.download.MAX_LISTING_BYTES", 2**20)
    hub.listing = listing, encoding
    with pytest.raises(PullFailed, match=f"is invalid: it is {said}"):
        pull(REPO)


@pytest.mark.parametrize("siblings", ["x", 7, [7, None, [], {}, {"rfilename": 7}], [{"rfilename": "\x1b[2J.gguf"}]])
def test_names_that_are_no_names_are_left_out(hub: Hub, siblings: object) -> None:
    hub.listing = json.dumps({"sha": COMMIT, "siblings": siblings}).encode(), "identity"
    with pytest.raises(ModelNotFound, match="holds no GGUF model"):
        pull(REPO)


@pytest.mark.parametrize(
    "name",
    ["a" * 300 + ".gguf", "a/" * 3_000 + "a.gguf", "/a.gguf", "../../../evil-Q4_K_M.gguf", "./a.gguf", "a\\b.gguf"],
)
def test_names_that_no_file_may_have_are_refused(hub: Hub, name: str) -> None:
    hub.repos[REPO] = {name: tiny_gguf()}
    with pytest.raises(PullFailed, match="is invalid"):
        pull(REPO)


def test_the_body_of_an_error_is_not_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(REPO)
    hub.status, hub.chatter = 403, 2**30  # longer than anybody would wait for
    for ask in (lambda: fetch(planned), lambda: pull(REPO)):
        with pytest.raises(PullFailed, match="403"):
            ask()


def test_the_hubs_library_asks_for_nothing_of_its_own() -> None:
    """With telemetry on it fetches a list of agents before every request, and reads whatever comes."""
    code = "import edgellm.storage, huggingface_hub.constants as told, sys; sys.exit(not told.HF_HUB_DISABLE_TELEMETRY)"
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_TELEMETRY"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
