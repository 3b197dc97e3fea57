"""Downloads of models from the hub into the standard Hugging Face cache.

`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean everywhere. Files come
over plain HTTP: current versions of huggingface_hub discard a partial download, but this one is resumed.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout

from edgellm.errors import EdgeError, ModelCorrupt, ModelNotFound, ModelUnsupported, PullFailed
from edgellm.storage.hub.download import RemoteFile, Transfer, download, read_listing
from edgellm.storage.model_files import HubName, choose, find, hub_cache, parse_hub_name

__all__ = ["DownloadPlan", "PulledModel", "Transfer", "fetch", "plan", "pull"]

# Both become file names, so no other characters are allowed.
_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_LIBRARY = "edgellm"
_MAX_NAME, _MAX_PATH = 255, 1_024  # bytes

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """The file to fetch, and the reason for choosing it. `path` is set if it is already here; `size` in bytes."""

    name: HubName
    file: str
    reason: str
    size: int
    path: Path | None = None
    commit: str = ""
    etag: str = ""

    @property
    def url(self) -> str:
        from huggingface_hub import constants, hf_hub_url

        return hf_hub_url(self.name.repo_id, self.file, revision=self.commit, endpoint=constants.ENDPOINT)


@dataclass(frozen=True, slots=True)
class PulledModel:
    """A model that is on this machine now. `plan`: the file; `sent`: the bytes downloaded by this call."""

    plan: DownloadPlan
    path: Path
    sent: int


def pull(name: str, progress: Callable[[Transfer], None] = lambda _: None) -> PulledModel:
    """Return the model `user/repo[:quant]`, downloaded unless it is on this machine. Raise as `plan` and `fetch`."""
    return fetch(plan(name), progress)


def plan(name: str) -> DownloadPlan:
    """Return the file that `name` means on the hub, or in the cache if the hub cannot be reached.

    Raises:
        InvalidOption: `name` is not a name of a model on the hub.
        ModelNotFound, ModelUnsupported: the hub has no suitable file; the message lists the files that it has.
        PullFailed: the hub cannot be reached, or denies access.
    """
    hub_name = parse_hub_name(name)
    try:
        return _ask(hub_name)
    except PullFailed:
        with suppress(EdgeError):
            cached = find(hub_name)
            return DownloadPlan(
                hub_name,
                cached.path.name,
                "it is on this machine, and the hub cannot be reached",
                cached.size,
                cached.path,
            )
        raise


def fetch(plan: DownloadPlan, progress: Callable[[Transfer], None] = lambda _: None) -> PulledModel:
    """Return a plan's file, downloaded into the cache; resume an earlier attempt.

    Raises:
        PullFailed: the network failed; bytes that have arrived are kept.
        DiskFull: there is no space; bytes that have arrived are kept.
        ModelCorrupt, ModelUnsupported: the downloaded file is not a valid GGUF; it is not kept.
    """
    if plan.path is not None:
        return PulledModel(plan, plan.path, 0)
    folder = hub_cache() / plan.name.folder
    locks = hub_cache() / ".locks" / plan.name.folder
    sent = 0

    def on_progress(transfer: Transfer) -> None:
        nonlocal sent
        sent = transfer.sent
        progress(transfer)

    try:
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{plan.etag}.pull.lock", timeout=0):
            blob = folder / "blobs" / plan.etag
            if not blob.exists():
                _complete(plan, blob, on_progress)
            return PulledModel(plan, _link(plan, folder), sent)
    except Timeout as error:
        raise PullFailed(f"{plan.name} is being pulled by another process.", "Wait until it is done.") from error
    except OSError as error:
        raise PullFailed(f"The cache {folder} cannot be written: {error}.", "Check its permissions.") from error


def _ask(name: HubName) -> DownloadPlan:
    from huggingface_hub import constants, get_hf_file_metadata
    from huggingface_hub.utils import build_hf_headers

    url = f"{constants.ENDPOINT}/api/models/{name.repo_id}"
    headers = build_hf_headers(library_name=_LIBRARY)
    commit, files = _hub(name, lambda: read_listing(url, headers, constants.HF_HUB_ETAG_TIMEOUT))
    choice = choose(name.repo_id, files, name.quant)
    if not _COMMIT.fullmatch(commit) or not _is_inside(choice.file):
        raise PullFailed(f"The answer of the hub at {constants.ENDPOINT} is invalid.", "Check HF_ENDPOINT.")
    plan = DownloadPlan(name, choice.file, choice.reason, 0, commit=commit)
    snapshot = hub_cache() / name.folder / "snapshots" / commit / choice.file
    if snapshot.is_file():
        return DownloadPlan(name, choice.file, choice.reason, snapshot.stat().st_size, snapshot, commit)
    meta = _hub(name, lambda: get_hf_file_metadata(plan.url, library_name=_LIBRARY, endpoint=constants.ENDPOINT))
    if not meta.size or meta.size < 0 or not _ETAG.fullmatch(meta.etag or ""):
        raise PullFailed(
            f"The hub does not report the size of {choice.file}.", "Check HF_ENDPOINT, or try again later."
        )
    return DownloadPlan(name, choice.file, choice.reason, meta.size, commit=commit, etag=meta.etag or "")


def _complete(plan: DownloadPlan, blob: Path, progress: Callable[[Transfer], None]) -> None:
    from huggingface_hub.utils import build_hf_headers

    from edgellm.engine.gguf.reader import check_gguf

    partial = blob.with_name(f"{blob.name}.incomplete")
    download(RemoteFile(plan.url, plan.etag, plan.size), build_hf_headers(library_name=_LIBRARY), partial, progress)
    try:
        check_gguf(partial)
    except (ModelCorrupt, ModelUnsupported) as error:
        partial.unlink()
        what = error.what.replace(str(partial), plan.file)
        raise type(error)(f"The hub's file cannot be used: {what}", "Choose another file or repository.") from error
    partial.replace(blob)


def _link(plan: DownloadPlan, folder: Path) -> Path:
    """Make the snapshot's link to the blob as the hub's own library does, and note the newest commit.

    The library itself is not used: it would ask the hub again, and trust that answer.
    """
    path = folder / "snapshots" / plan.commit / plan.file
    blob = folder / "blobs" / plan.etag
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        path.symlink_to(os.path.relpath(blob, path.parent))
    except OSError:  # some systems, and some drives, have no links
        shutil.copyfile(blob, path)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(plan.commit, encoding="utf-8")
    return path


def _hub(name: HubName, call: Callable[[], _T]) -> _T:
    """Return the result of `call`, which uses the hub's library; turn the library's errors into ours."""
    from huggingface_hub import constants, errors
    from huggingface_hub.errors import HTTPError as AnyHttpError  # of whichever HTTP client it has

    host = constants.ENDPOINT
    try:
        return call()
    except EdgeError:
        raise
    except errors.OfflineModeIsEnabled as error:
        raise PullFailed("HF_HUB_OFFLINE is set, so nothing can be downloaded.", "Unset it to download.") from error
    except errors.GatedRepoError as error:
        raise PullFailed(
            f"The terms of {name.repo_id} must be accepted first.",
            f"Accept them at {host}/{name.repo_id}, then set HF_TOKEN to your token.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"There is no {name.repo_id} at {host}, or it is private.",
            "Check the spelling; for a private repository, set HF_TOKEN.",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        next_step = "Set HF_TOKEN to a token with read access." if status in (401, 403) else "Try again later."
        raise PullFailed(f"{host} answered {status} for {name.repo_id}.", next_step) from error
    except (AnyHttpError, OSError) as error:
        raise PullFailed(
            f"{host} cannot be reached: {str(error) or type(error).__name__}.",
            "Check the network, then pull again; the downloaded part is kept.",
        ) from error
    except Exception as error:  # anything that the library raises for an answer that its authors did not foresee
        reason = f"{type(error).__name__}: {error}"[:200]
        raise PullFailed(
            f"The answer of {host} for {name.repo_id} is invalid: {reason}.", "Check HF_ENDPOINT."
        ) from error


def _is_inside(file: str) -> bool:
    """Return whether a repository's file name stays inside its folder, and each part is a valid file name."""
    if len(file.encode()) > _MAX_PATH or any(len(part.encode()) > _MAX_NAME for part in file.split("/")):
        return False
    return not file.startswith("/") and "\\" not in file and not {"", ".", ".."} & set(file.split("/"))
