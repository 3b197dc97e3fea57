"""The upkeep of models on this machine: names for files of the user, and removal."""

import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from edgellm.errors import InvalidOption, ModelNotFound
from edgellm.state import private_folder
from edgellm.storage import model_files
from edgellm.storage.model_files import StoredModel, added_folder, find, hub_cache
from edgellm.storage.quants import is_model

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,126}")
_WORDS = ("default", "auto", "none")  # words that options take in place of a model
_PART = re.compile(r"(-\d{5}-of-\d{5})?\.gguf$", re.IGNORECASE)


def add(path: Path, name: str | None = None) -> StoredModel:
    """Give a model's file, or the first of its files, a name, by default the file's own; it stays where it is. Raise
    InvalidOption for a name that is taken or cannot be one, and what `ModelFile.open` raises."""
    from edgellm.engine import ModelFile

    if path.expanduser().exists() and not is_model(path.name):
        raise InvalidOption(f"{path.name} belongs to a model, or is none.", "Add a model's own GGUF file.")
    file, name = ModelFile.open(path.expanduser()), _PART.sub("", path.name) if name is None else name
    taken = {*model_files.ALIASES, *(model.name for model in model_files.list_models() if model.origin != "added")}
    if not _NAME.fullmatch(name) or name.lower() in _WORDS or model_files.looks_like_path(name) or name in taken:
        what = f"{name} {'is another model' if name in taken else 'cannot be the name of a model'}."
        raise InvalidOption(what, f"Give another one: edgellm add {path} NAME, of letters, digits, . _ and -")
    for link in _links(name):
        link.unlink()
    endings = (part.name[len(_PART.sub("", part.name)) :] for part in file.paths)
    links = tuple(private_folder(added_folder()) / f"{name}{ending}" for ending in endings)
    for link, part in zip(links, file.paths, strict=True):
        link.symlink_to(part.resolve())
    return StoredModel(name, links, file.header.file_size, "added")


def _links(name: str) -> tuple[Path, ...]:
    """Return the links of an added model, also those whose files are gone."""
    return tuple(link for link in added_folder().glob("*.gguf") if _PART.sub("", link.name) == name)


def removable(name: str) -> list[StoredModel]:
    """Return the models that `remove` would delete: one quantisation, or without one all of the repository's models and
    remains of downloads; or the added one whose name it would forget. Raise InvalidOption for a file, a bundled model,
    and one of another program, ModelNotFound for what is not here."""
    if name in model_files.ALIASES:
        raise InvalidOption(f"{name} is part of edgellm.", "Only pulled models can be removed.")
    if links := _links(name):
        return [StoredModel(name, links, 0, "added")]
    if model_files.own_file(name) is not None:
        raise InvalidOption(f"{name} is your own file.", "Only pulled models can be removed.")
    try:
        return _pulled(name)
    except ModelNotFound:
        if (other := model_files.lying_elsewhere(name)) is None:
            raise
        what = f"{name} was not pulled by edgellm: it is {other.path}, of {other.origin}."
        raise InvalidOption(what, "Remove it there, where other programs may use it.") from None


def _pulled(name: str) -> list[StoredModel]:
    if (model := model_files.packaged(name)) is not None:
        return [model_files.packaged_here(model)]
    asked = model_files.hub_name(name)
    if asked.quant is not None:
        return [find(asked)]
    folder = hub_cache() / asked.folder
    models = model_files.stored(asked, model_files.files_of(folder, asked.revision), incomplete=True)
    copied = any(path.is_file() and not path.is_symlink() for path in folder.glob("snapshots/*/**/*"))
    unlinked = {path for path in folder.glob("blobs/*") if path.is_file()} - linked_blobs(folder)
    unfinished = sorted(path for path in unlinked if path.suffix == ".incomplete" or not copied)
    if asked.revision is None and unfinished:
        size = sum(path.stat().st_size for path in unfinished)
        models.append(StoredModel(f"{asked} (unfinished download)", tuple(unfinished), size, "hub", asked.repo_id))
    return models or [find(asked)]


def remove(name: str) -> list[StoredModel]:
    """Delete the models that `removable` lists from the cache, and return them; only forget the name of an added one. A
    blob is deleted only when no other snapshot links to it. Your own files and the bundled pair are never touched."""
    removed = removable(name)
    if removed[0].origin in ("added", "package"):
        for path in removed[0].paths:
            path.unlink(missing_ok=True)
        return removed
    asked = model_files.hub_name(name)
    folder = hub_cache() / asked.folder
    paths = {path for model in removed for path in model.paths}
    blobs = {path for path in paths if path.parent == folder / "blobs"}
    links = paths - blobs
    if asked.revision is None:  # the same files in all snapshots
        files = {Path(*link.relative_to(folder / "snapshots").parts[1:]) for link in links}
        links = {snapshot / file for snapshot in folder.glob("snapshots/*") if snapshot.is_dir() for file in files}
    blobs |= {blob for link in links if (blob := _blob(link, folder))}
    for link in links:
        link.unlink(missing_ok=True)
    for blob in blobs - linked_blobs(folder):
        blob.unlink(missing_ok=True)
    for path in sorted(folder.glob("snapshots/**/"), key=lambda path: len(path.parts), reverse=True):
        with suppress(OSError):
            path.rmdir()
    if not any(folder.glob("snapshots/*/*")):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)
    return removed


def linked_blobs(folder: Path) -> set[Path]:
    """Return the blobs of a repository in the cache that a snapshot links to."""
    return {blob for link in folder.glob("snapshots/*/**/*") if (blob := _blob(link, folder))}


def _blob(link: Path, folder: Path) -> Path | None:
    """Return the blob of this repository that `link` points to, which may itself be a link to a shared file."""
    if not link.is_symlink():
        return None
    blob = Path(os.path.normpath(link.parent / link.readlink()))
    return blob if blob.parent == folder / "blobs" else None
