"""The models on this machine: the bundled pair, and the GGUF files in the Hugging Face cache.

The cache's layout is the hub's own: `models--user--repo/snapshots/<commit>/<file>` are links into `blobs/`, and
`refs/main` names the newest commit that was fetched.
"""

from __future__ import annotations

import difflib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgellm.errors import InvalidOption, ModelNotFound
from edgellm.storage.model_names import (
    ALIASES,
    HubName,
    bundled,
    choose,
    is_file,
    is_folder,
    is_model,
    label,
    looks_like_path,
    parse_hub_name,
)


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine. `name` is the name to type; `origin` is `bundled` or `hub`; `size` in bytes."""

    name: str
    path: Path
    size: int
    origin: str


def hub_cache() -> Path:
    """Return the folder of the Hugging Face cache, as `HF_HUB_CACHE` or `HF_HOME` place it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def list_models() -> list[StoredModel]:
    """Return the bundled pair, then the models in the cache, by name."""
    return [*_bundled_models(), *sorted(_cached_models(), key=lambda model: model.name.lower())]


def find(name: HubName) -> StoredModel:
    """Return the cached file that `name` means; without a quantisation, the one that `pull` would choose of those here.

    Raises:
        ModelNotFound: it is not in the cache.
        ModelUnsupported: it is split over several files.
    """
    files = _files(hub_cache() / name.folder)
    if not any(is_model(file) for file in files):
        raise ModelNotFound(f"{name} is not on this machine.", f"Fetch it with: edgellm pull {name}")
    try:
        file = choose(name.repo_id, files, name.quant).file
    except ModelNotFound as error:
        available = ", ".join(label(file) for file in sorted(files) if is_model(file))
        raise ModelNotFound(
            f"{name} is not on this machine; available of {name.repo_id}: {available}.",
            f"Fetch it with: edgellm pull {name}",
        ) from error
    return _stored(name.repo_id, file, files[file])


def resolve(name: str) -> Path:
    """Return the file that a model name means, whichever form it has.

    Raises:
        InvalidOption: the name has no valid form.
        ModelNotFound: there is no such file, alias, or model in the cache.
        ModelUnsupported: the cached model is split over several files.
    """
    if name in ALIASES:
        return bundled(name)
    if is_file(path := Path(name)):
        return path.expanduser()
    if looks_like_path(name):
        if is_folder(path):
            raise ModelNotFound(f"{name} is a folder, not a model file.", "Give the path of the .gguf file in it.")
        raise ModelNotFound(
            f"There is no file {name}.", "Check the path; `edgellm ls` lists the models on this machine."
        )
    if "/" not in name:
        near = difflib.get_close_matches(name, ALIASES, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ModelNotFound(f"There is no model {name!r}.", f"{hint}`edgellm ls` lists the models on this machine.")
    return find(parse_hub_name(name)).path


def removable(name: str) -> list[StoredModel]:
    """Return the models that `remove` would delete: one quantisation, or without one all of the repository's models.

    Raises:
        InvalidOption: `name` is a path or a bundled model.
        ModelNotFound: it is not in the cache.
    """
    if name in ALIASES:
        raise InvalidOption(f"{name} is part of edgellm.", "Only pulled models can be removed.")
    if is_file(Path(name)):
        raise InvalidOption(f"{name} is your own file.", "Only pulled models can be removed.")
    hub_name = parse_hub_name(name)
    if hub_name.quant is not None:
        return [find(hub_name)]
    files = {file: path for file, path in _files(hub_cache() / hub_name.folder).items() if is_model(file)}
    return [_stored(hub_name.repo_id, file, path) for file, path in files.items()] or [find(hub_name)]


def remove(name: str) -> list[StoredModel]:
    """Delete the models that `removable` lists from the cache, and return them. Raise as `removable`.

    A blob is deleted only when no other snapshot links to it. Your own files and the bundled pair are never touched.
    """
    removed = removable(name)
    folder = hub_cache() / parse_hub_name(name).folder
    snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    links = [snapshot / _file_in(folder, model.path) for snapshot in snapshots for model in removed]
    blobs = {blob for link in links if (blob := _blob(link, folder))}
    for link in links:
        link.unlink(missing_ok=True)
    still_linked = {_blob(link, folder) for link in folder.glob("snapshots/*/**/*")}
    for blob in blobs - still_linked:
        blob.unlink(missing_ok=True)
    _tidy(folder)
    return removed


def _blob(link: Path, folder: Path) -> Path | None:
    """Return the blob that `link` points to, if it is one of this repository; follow one link only, as a blob may be a
    link to a file that others share."""
    if not link.is_symlink():
        return None
    blob = Path(os.path.normpath(link.parent / link.readlink()))
    return blob if blob.parent == folder / "blobs" else None


def _tidy(folder: Path) -> None:
    """Remove folders that became empty, and the repository's own when no file of it is left."""
    for path in sorted(folder.glob("snapshots/**/"), key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):
            path.rmdir()
    if not any(folder.glob("snapshots/*/*")):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)


def _bundled_models() -> Iterator[StoredModel]:
    for alias in ALIASES:
        with suppress(ModelNotFound):
            path = bundled(alias)
            yield StoredModel(alias, path, path.stat().st_size, "bundled")


def _cached_models() -> Iterator[StoredModel]:
    for folder in hub_cache().glob("models--*--*"):
        with suppress(InvalidOption):
            name = parse_hub_name("/".join(folder.name.split("--")[1:]))
            for file, path in _files(folder).items():
                if is_model(file):
                    yield _stored(name.repo_id, file, path)


def _files(folder: Path) -> dict[str, Path]:
    """Return file name in the repository -> path: from the snapshot that `refs/main` names first, then from others."""
    try:
        newest = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        newest = ""
    snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    snapshots.sort(key=lambda path: (path.name == newest, path.stat().st_mtime), reverse=True)
    found: dict[str, Path] = {}
    for snapshot in snapshots:
        for path in sorted(snapshot.rglob("*.gguf")):
            if path.is_file():  # not a link whose blob is gone
                found.setdefault(path.relative_to(snapshot).as_posix(), path)
    return found


def _file_in(folder: Path, path: Path) -> str:
    return Path(*path.relative_to(folder / "snapshots").parts[1:]).as_posix()


def _stored(repo_id: str, file: str, path: Path) -> StoredModel:
    return StoredModel(f"{repo_id}:{label(file)}", path, path.stat().st_size, "hub")
