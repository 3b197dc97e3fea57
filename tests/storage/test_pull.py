"""Pulling from a hub that behaves, and from one that does not. No byte may come twice, and none may be wrong."""

import errno
import gzip
import json
import os
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from huggingface_hub import constants, scan_cache_dir

from edgellm.engine import Model, ModelFile
from edgellm.errors import DiskFull, ModelCorrupt, ModelNotFound, PullFailed
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.hub import download
from edgellm.storage.hub.pull import Transfer, plan
from edgellm.storage.model_files import list_models, resolve
from edgellm.storage.upkeep import remove
from testkit.gguf.split_file import split
from tests.programs import run_python
from tests.storage.hub import COMMIT, REPO, Hub, names, pull, running, tiny_gguf

Q4 = "tiny-Q4_K_M.gguf"


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
    ("lie", "said"),
    [(-5, ""), (100, "200128 bytes of tiny-Q4_K_M.gguf, but 100 were"), (10**7, "but 10000000 were"), (10**400, "")],
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
    with running(Hub(hub.repos)) as storage:
        hub.files_at = storage.url
        assert pull(REPO).path.exists()
    assert (hub.seen, storage.seen) == ({"", "hf_good"}, {""}), "the token is the hub's alone"


def test_nobody_there_or_somebody_who_says_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for port, why in ((9, "refused"), (silent.getsockname()[1], "timed out")):
            monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
            with pytest.raises(PullFailed, match=rf"http://127\.0\.0\.1:{port} cannot be reached: .*{why}"):
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

    def full(*asked: Any) -> Iterator[None]:
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
    with pytest.raises(PullFailed, match=r"is invalid|cannot be written: File name too long\."):
        pull(REPO)


def test_the_body_of_an_error_is_not_read(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan(REPO)
    hub.status, hub.chatter = 403, 2**30  # longer than anybody would wait for
    for ask in (planned.fetch, lambda: pull(REPO)):
        with pytest.raises(PullFailed, match="403"):
            ask()


def test_the_hubs_library_asks_for_nothing_of_its_own() -> None:
    """With telemetry on it fetches a list of agents before every request, and reads whatever comes."""
    code = "import edgellm.storage, huggingface_hub.constants as told, sys; sys.exit(not told.HF_HUB_DISABLE_TELEMETRY)"
    assert run_python(code, without=["HF_HUB_DISABLE_TELEMETRY"]).returncode == 0


SPLIT = "ann/split-GGUF"
NAME = "UD-Q4_K_XL/draft-UD-Q4_K_XL-0000{}-of-00003.gguf"


@pytest.fixture
def parts(hub: Hub, draft_path: Path, tmp_path: Path) -> list[bytes]:
    """The bundled draft model in three parts in a folder of a repository, the first of them without tensors."""
    whole = tmp_path / "draft-UD-Q4_K_XL.gguf"
    whole.symlink_to(draft_path)
    found = [path.read_bytes() for path in ModelFile.open(split(whole, tmp_path, 3, empty_first=True)).paths]
    files = {NAME.format(number): data for number, data in enumerate(found, start=1)}
    hub.repos[SPLIT] = {"README.md": b"words", "MTP/mtp-draft-Q8_0.gguf": b"no model", **files}
    return found


def test_all_parts_make_one_model(hub: Hub, cache: Path, parts: list[bytes], draft_path: Path, tmp_path: Path) -> None:
    seen: list[Transfer] = []
    got = pull(SPLIT, seen.append)
    total = sum(map(len, parts))
    assert [file.name for file in got.plan.files] == [NAME.format(number) for number in (1, 2, 3)]
    assert got.path == cache / "models--ann--split-GGUF" / "snapshots" / COMMIT / NAME.format(1)
    assert (got.plan.size, got.sent, seen[-1]) == (total, total, Transfer(total, total, 0))
    assert [one.done for one in seen] == sorted(one.done for one in seen)
    assert hub.bytes_sent() == total
    assert pull(SPLIT).path == got.path
    assert hub.bytes_sent() == total, "it is here"
    assert names() == [f"{SPLIT}:UD-Q4_K_XL"]
    (model,) = (model for model in list_models() if model.origin == "hub")
    assert (model.size, len(model.paths)) == (total, 3)
    for name in (SPLIT, f"{SPLIT}:q4_k_xl", f"{SPLIT}:UD-Q4_K_XL"):
        assert resolve(name) == got.path
    with Model.load(resolve(SPLIT)) as loaded, Model.load(draft_path) as whole:
        assert loaded.vocabulary == whole.vocabulary
    assert fingerprint(got.path) == fingerprint(
        split(tmp_path / "draft-UD-Q4_K_XL.gguf", tmp_path, 3, empty_first=True)
    )
    (repo,) = scan_cache_dir(cache).repos  # the hub's own tool reads what we wrote
    assert repo.nb_files == 3


def test_a_pull_that_is_killed_in_the_second_part_goes_on_there(hub: Hub, cache: Path, parts: list[bytes]) -> None:
    program = f"""
import os, signal
from edgellm.storage.hub.pull import plan
def progress(transfer):
    if transfer.done > {len(parts[0]) + len(parts[1]) // 2}:
        os.kill(os.getpid(), signal.SIGKILL)
plan({SPLIT!r}).fetch(progress)
"""
    done = run_python(program, HF_ENDPOINT=hub.url, HF_HUB_CACHE=str(cache))
    assert done.returncode == -signal.SIGKILL
    assert names() == []
    with pytest.raises(ModelNotFound, match="not on this machine"):
        resolve(SPLIT)
    (partial,) = cache.rglob("*.incomplete")
    here = partial.stat().st_size
    assert len(parts[1]) // 2 < here < len(parts[1])
    hub.sent.clear()
    seen: list[Transfer] = []
    got = pull(SPLIT, seen.append)
    left = len(parts[1]) - here + len(parts[2])
    assert [(name, start) for name, start, _ in hub.sent] == [(NAME.format(2), here), (NAME.format(3), 0)]
    assert (hub.bytes_sent(), got.sent) == (left, left)
    assert seen[0].resumed == len(parts[0]) + here
    assert not list(cache.rglob("*.incomplete"))
    assert seen[-1].done == seen[-1].total == got.plan.size
    assert [path.read_bytes() for path in ModelFile.open(got.path).paths] == parts


def test_a_part_with_a_wrong_hash_is_dropped_and_the_others_kept(hub: Hub, cache: Path, parts: list[bytes]) -> None:
    second = plan(SPLIT).files[1]
    blobs = cache / "models--ann--split-GGUF" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{second.etag}.incomplete").write_bytes(b"\xff" * 1000)
    with pytest.raises(PullFailed, match=rf"{NAME.format(2)} is not the file .* its SHA-256 differs"):
        pull(SPLIT)
    assert names() == []
    hub.sent.clear()
    assert len(ModelFile.open(pull(SPLIT).path).paths) == 3
    assert [(name, start) for name, start, _ in hub.sent] == [(NAME.format(2), 0), (NAME.format(3), 0)]


def test_parts_of_an_earlier_commit_stay(hub: Hub, parts: list[bytes], verifier_path: Path, tmp_path: Path) -> None:
    hub.revisions = {"v1": ("a" * 40, dict(hub.repos[SPLIT]))}
    path = pull(f"{SPLIT}@v1").path
    hub.repos[SPLIT][NAME.format(3)] = ModelFile.open(split(verifier_path, tmp_path, 3)).paths[2].read_bytes()
    with pytest.raises(ModelCorrupt, match="cannot be used"):
        pull(SPLIT)
    assert resolve(SPLIT) == path
    assert [part.read_bytes() for part in ModelFile.open(path).paths] == parts


def test_a_file_that_only_is_a_part_is_not_kept(hub: Hub, cache: Path, parts: list[bytes]) -> None:
    hub.repos[SPLIT] = {"renamed-Q4_K_M.gguf": parts[1]}
    with pytest.raises(ModelCorrupt, match="belongs to a model of 3 files, not of 1"):
        pull(SPLIT)
    assert names() == []


def test_no_part_is_fetched_without_room_for_all(hub: Hub, parts: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    room = SimpleNamespace(total=10**9, used=0, free=sum(map(len, parts)) - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room)
    with pytest.raises(DiskFull, match=r"1\.4 MB are still needed"):
        pull(SPLIT)
    assert hub.sent == []


def test_two_pulls_of_one_part_do_not_meet(hub: Hub, cache: Path, parts: list[bytes]) -> None:
    locks = cache / ".locks" / "models--ann--split-GGUF"
    locks.mkdir(parents=True)
    lock = FileLock(locks / f"{plan(SPLIT).files[2].etag}.pull.lock")
    with lock, pytest.raises(PullFailed, match="another process"):
        pull(SPLIT)
    assert pull(SPLIT).path.exists()


def test_what_another_program_has_begun_is_completed(hub: Hub, cache: Path, parts: list[bytes]) -> None:
    """The hub's own library links each part as soon as it is there."""
    pull(SPLIT)
    snapshot = cache / "models--ann--split-GGUF" / "snapshots" / COMMIT
    (snapshot / NAME.format(2)).resolve().unlink()
    (snapshot / NAME.format(2)).unlink()
    assert names() == []
    with pytest.raises(ModelNotFound, match=rf"as a whole: .*part 2 is missing.*edgellm pull {SPLIT}"):
        resolve(SPLIT)
    hub.sent.clear()
    pull(SPLIT)
    assert [name for name, _, _ in hub.sent] == [NAME.format(2)]
    assert names() == [f"{SPLIT}:UD-Q4_K_XL"]


def test_parts_of_two_commits_are_not_mixed(hub: Hub, cache: Path, parts: list[bytes]) -> None:
    path = pull(SPLIT).path
    newer = cache / "models--ann--split-GGUF" / "snapshots" / ("f" * 40) / "UD-Q4_K_XL"
    newer.mkdir(parents=True)
    first = newer / Path(NAME.format(1)).name
    first.symlink_to(path.resolve())
    (cache / "models--ann--split-GGUF" / "refs" / "main").write_text("f" * 40)
    assert resolve(SPLIT) == path  # all its parts lie beside it


def test_all_parts_are_removed_and_what_others_link_stays(hub: Hub, cache: Path, parts: list[bytes]) -> None:
    hub.repos[SPLIT]["draft-Q8_0.gguf"] = hub.repos[REPO]["tiny-Q8_0.gguf"]
    pull(SPLIT + ":q8_0")
    pull(SPLIT + ":q4_k_xl")
    (gone,) = remove(f"{SPLIT}:q4_k_xl")
    assert (gone.name, gone.size) == (f"{SPLIT}:UD-Q4_K_XL", sum(map(len, parts)))
    assert names() == [f"{SPLIT}:Q8_0"]
    assert len(list(cache.glob("models--*/blobs/*"))) == 1
    pull(SPLIT + ":q4_k_xl")
    assert len(remove(SPLIT)) == 2
    assert not list(cache.glob("models--*"))


def test_an_interrupted_pull_can_be_removed(hub: Hub, cache: Path, parts: list[bytes]) -> None:
    hub.cut_after = [len(parts[0]), 70_000, *[0] * download.ATTEMPTS]
    with pytest.raises(PullFailed, match=r"stopped at 70\.0 kB of .*to resume"):
        pull(SPLIT)
    (gone,) = remove(SPLIT)
    assert (gone.name, gone.size) == (f"{SPLIT} (unfinished download)", len(parts[0]) + 70_000)
    assert not list(cache.glob("models--*"))
    with pytest.raises(ModelNotFound):
        remove(SPLIT)


# --- repositories that moved, are closed, or have several revisions -------------------------------------------------


@pytest.mark.parametrize(("status", "names_only"), [(307, False), (301, False), (307, True), (308, True)])
def test_a_former_name_of_a_repository_finds_it(hub: Hub, parts: list[bytes], status: int, names_only: bool) -> None:
    hub.moved, hub.names_only = status, names_only
    hub.renamed = {"bob/old-name": SPLIT}
    got = pull("bob/old-name:q4_k_xl")
    assert got.plan.renamed == SPLIT
    assert resolve("bob/old-name") == got.path
    assert names() == ["bob/old-name:UD-Q4_K_XL"]
    assert pull(SPLIT).plan.renamed == ""


def test_a_gated_repository_says_what_is_to_do(hub: Hub, parts: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated = {SPLIT: "hf_granted"}
    with pytest.raises(
        PullFailed, match=r"terms of ann/split-GGUF must be accepted first \(.*Please log in\).*HF_TOKEN"
    ):
        pull(SPLIT)
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(
        PullFailed, match=r"your token does not give access to it \(.*awaiting a review\).*Ask for access"
    ):
        pull(SPLIT)
    assert hub.sent == []
    monkeypatch.setenv("HF_TOKEN", "hf_granted")
    assert pull(SPLIT).path.exists()


def test_a_revision_is_kept_beside_the_newest(hub: Hub, cache: Path, parts: list[bytes]) -> None:
    old = {"draft-Q8_0.gguf": hub.repos[REPO]["tiny-Q8_0.gguf"]}
    hub.revisions = {"v1.0": ("a" * 40, old)}
    newest, first = pull(SPLIT).path, pull(f"{SPLIT}@v1.0").path
    assert first.read_bytes() == old["draft-Q8_0.gguf"]
    assert resolve(f"{SPLIT}@v1.0") == resolve(f"{SPLIT}@v1.0:q8_0") == first
    assert (resolve(SPLIT), resolve(f"{SPLIT}:q8_0")) == (newest, first)
    (repo,) = scan_cache_dir(cache).repos
    assert {ref for revision in repo.revisions for ref in revision.refs} == {"main", "v1.0"}
    with pytest.raises(ModelNotFound, match="has no revision v2"):
        pull(f"{SPLIT}@v2")
    assert pull(f"{SPLIT}@{COMMIT}").path == newest
    assert [model.name for model in remove(f"{SPLIT}@v1.0")] == [f"{SPLIT}@v1.0:Q8_0"]
    assert resolve(SPLIT) == newest
