"""Fetching models from the hub into the standard Hugging Face cache.

`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean everywhere. Files come
over plain HTTP: current versions of huggingface_hub throw a partial download away, ours resumes it.
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
from edgellm.storage.cache import find, hub_cache
from edgellm.storage.hub.download import RemoteFile, Transfer, download, read_listing
from edgellm.storage.model_names import HubName, choose, parse_hub_name

__all__ = ["DownloadPlan", "PulledModel", "Transfer", "fetch", "plan", "pull"]

# Both become file names, so no other characters are allowed.
_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_LIBRARY = "edgellm"
_LONGEST_NAME, _LONGEST_PATH = 255, 1_024  # bytes

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """The file to fetch, and why this one. `path` is set where it is here already; `size` in bytes."""

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
    """A model that is here now: `plan` says which, `sent` how many bytes were fetched for it just now."""

    plan: DownloadPlan
    path: Path
    sent: int


def pull(name: str, progress: Callable[[Transfer], None] = lambda _: None) -> PulledModel:
    """Fetch `user/repo[:quant]`, unless it is here. Raises as `plan` and `fetch`."""
    return fetch(plan(name), progress)


def plan(name: str) -> DownloadPlan:
    """Ask the hub what `name` means. Where the hub cannot be asked, fall back on the cache.

    Raises:
        InvalidOption: `name` is not a name of a model on the hub.
        ModelNotFound, ModelUnsupported: nothing suitable is there; the message names what is.
        PullFailed: the hub cannot be reached, or does not let us in.
    """
    hub_name = parse_hub_name(name)
    try:
        return _ask(hub_name)
    except PullFailed:
        with suppress(EdgeError):
            here = find(hub_name)
            return DownloadPlan(
                hub_name, here.path.name, "it is here, and the hub cannot be asked", here.size, here.path
            )
        raise


def fetch(plan: DownloadPlan, progress: Callable[[Transfer], None] = lambda _: None) -> PulledModel:
    """Fetch a plan's file into the cache; continue where an earlier attempt stopped.

    Raises:
        PullFailed: the network failed; bytes that have arrived are kept.
        DiskFull: there is no space; bytes that have arrived are kept.
        ModelCorrupt, ModelUnsupported: the file that came is no sound GGUF; it is not kept.
    """
    if plan.path is not None:
        return PulledModel(plan, plan.path, 0)
    folder = hub_cache() / plan.name.folder
    locks = hub_cache() / ".locks" / plan.name.folder
    sent = 0

    def count(transfer: Transfer) -> None:
        nonlocal sent
        sent = transfer.sent
        progress(transfer)

    try:
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        with FileLock(locks / f"{plan.etag}.pull.lock", timeout=0):
            blob = folder / "blobs" / plan.etag
            if not blob.exists():
                _complete(plan, blob, count)
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
        raise PullFailed(f"The hub at {constants.ENDPOINT} gave an answer that makes no sense.", "Check HF_ENDPOINT.")
    plan = DownloadPlan(name, choice.file, choice.reason, 0, commit=commit)
    snapshot = hub_cache() / name.folder / "snapshots" / commit / choice.file
    if snapshot.is_file():
        return DownloadPlan(name, choice.file, choice.reason, snapshot.stat().st_size, snapshot, commit)
    meta = _hub(name, lambda: get_hf_file_metadata(plan.url, library_name=_LIBRARY, endpoint=constants.ENDPOINT))
    if not meta.size or meta.size < 0 or not _ETAG.fullmatch(meta.etag or ""):
        raise PullFailed(f"The hub does not say how large {choice.file} is.", "Check HF_ENDPOINT, or try again later.")
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
        raise type(error)(f"What the hub has is not usable: {what}", "Choose another file or repository.") from error
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


def _hub(name: HubName, ask: Callable[[], _T]) -> _T:
    """Call `ask`, which uses the hub's library, and turn the library's errors into ours."""
    from huggingface_hub import constants, errors
    from huggingface_hub.errors import HTTPError as AnyHttpError  # of whichever HTTP client it has

    host = constants.ENDPOINT
    try:
        return ask()
    except EdgeError:
        raise
    except errors.OfflineModeIsEnabled as error:
        raise PullFailed("HF_HUB_OFFLINE is set, so nothing can be fetched.", "Unset it to download.") from error
    except errors.GatedRepoError as error:
        raise PullFailed(
            f"{name.repo_id} wants its terms accepted first.",
            f"Accept them at {host}/{name.repo_id}, then set HF_TOKEN to a token of yours.",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"There is no {name.repo_id} at {host}, or it is private.",
            "Check the spelling; for a private one set HF_TOKEN.",
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        step = "Set HF_TOKEN to a token that may read it." if status in (401, 403) else "Try again later."
        raise PullFailed(f"{host} answered {status} for {name.repo_id}.", step) from error
    except (AnyHttpError, OSError) as error:
        raise PullFailed(
            f"{host} cannot be reached: {str(error) or type(error).__name__}.",
            "Check the network, then pull again; what has arrived is kept.",
        ) from error
    except Exception as error:  # anything that the library raises for an answer that its authors did not foresee
        why = f"{type(error).__name__}: {error}"[:200]
        raise PullFailed(
            f"What {host} answers for {name.repo_id} makes no sense: {why}.", "Check HF_ENDPOINT."
        ) from error


def _is_inside(file: str) -> bool:
    """Return whether a repository's file name stays inside its folder, and each part is a valid file name."""
    if len(file.encode()) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in file.split("/")):
        return False
    return not file.startswith("/") and "\\" not in file and not {"", ".", ".."} & set(file.split("/"))
