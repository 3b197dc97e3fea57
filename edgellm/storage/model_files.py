"""The models on this machine: the names that they may have, and the files that those stand for.

A name is a path, an alias of the bundled pair, or `user/repo[:quant]` in the Hugging Face cache. The cache's layout is
the hub's own: `models--user--repo/snapshots/<commit>/<file>` are links into `blobs/`, and `refs/main` names the newest
commit that was fetched.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from edgellm.errors import InvalidOption, ModelNotFound, ModelUnsupported

DEFAULT = "Q4_K_M"

# Where the default is missing: the nearest in size and quality first.
PREFERENCE = (
    "Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_K_XL", "IQ4_NL", "IQ4_XS", "Q4_0", "Q4_1", "Q5_K_M", "Q5_K_S", "Q5_0", "Q5_1",
    "Q6_K", "Q8_0", "MXFP4", "Q3_K_L", "Q3_K_M", "IQ3_M", "Q3_K_S", "Q2_K", "F16", "BF16", "F32",
)  # fmt: skip

_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[1-9](?:_[A-Z0-9]{1,3}){1,3}|TQ[12]_0|MXFP4(?:_MOE)?|B?F16|F32))(?![A-Za-z0-9_])",
    re.IGNORECASE | re.ASCII,
)
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$", re.IGNORECASE)
_SIDE_FILES = re.compile(r"(?:^|[-._/])(?:mmproj|imatrix)(?:[-._]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class QuantChoice:
    """One file of a repository, and why it was chosen."""

    file: str
    reason: str


def quant_of(file: str) -> str | None:
    """Return the quantisation in a file's name (or its folder's), in capitals; the last one where there are several."""
    found = _QUANT.findall(file.removesuffix(".gguf"))
    return str(found[-1]).upper() if found else None


_MAX_LISTED = 40  # quantisations that a message names


def label(file: str) -> str:
    """Return the text after the colon that means this file."""
    return quant_of(file) or file.removesuffix(".gguf").rsplit("/", 1)[-1]


def is_model(file: str) -> bool:
    """Return whether the file is a language model in GGUF, and not a vision projector or a calibration file."""
    return file.lower().endswith(".gguf") and not _SIDE_FILES.search(file)


def choose(repo: str, files: Iterable[str], wanted: str | None) -> QuantChoice:
    """Return the file that `wanted` (a quantisation or a file name; None: whatever suits) means in `repo`.

    Raises:
        ModelNotFound: the repository has no GGUF, or not this one; the message names those that it has.
        ModelUnsupported: the only match is split over several files.
    """
    models = sorted(file for file in files if is_model(file))
    whole = [file for file in models if not _SHARD.search(file)]
    if not models:
        raise ModelNotFound(f"{repo} holds no GGUF model.", "Look for the model's repository whose name ends in -GGUF.")
    if wanted is None:
        return _suitable(repo, whole, models)
    if matches := _matching(whole, wanted):
        return QuantChoice(matches[0], "asked for" if len(matches) == 1 else f"the first of {len(matches)} that match")
    if split := _matching(models, wanted):
        raise _split(repo, split)
    labels = list(dict.fromkeys(label(file) for file in whole))
    closest = difflib.get_close_matches(wanted.upper(), labels, n=1, cutoff=0.5)
    more = f" and {len(labels) - _MAX_LISTED} more" if len(labels) > _MAX_LISTED else ""
    listed = ", ".join(labels[:_MAX_LISTED]) + more or "only models split over several files"
    raise ModelNotFound(
        f"{repo} has no {wanted}; it has: {listed}.",
        f"Choose one of them, such as {repo}:{(closest or labels or [DEFAULT])[0]}.",
    )


def _matching(files: Sequence[str], wanted: str) -> list[str]:
    asked = wanted.lower().removesuffix(".gguf")
    named = [file for file in files if file.lower().removesuffix(".gguf").rsplit("/", 1)[-1] == asked]
    return named or [file for file in files if (quant_of(file) or "").lower() == asked]


def _suitable(repo: str, whole: Sequence[str], models: Sequence[str]) -> QuantChoice:
    if not whole:
        raise _split(repo, models)
    if len(whole) == 1:
        return QuantChoice(whole[0], "the only model there" if len(models) == 1 else "the only one in a single file")
    ranks = {quant: rank for rank, quant in enumerate(PREFERENCE)}
    best = min(whole, key=lambda file: ranks.get((quant_of(file) or "").removeprefix("UD-"), len(ranks)))
    quant = quant_of(best)
    if quant == DEFAULT:
        return QuantChoice(best, "the default")
    return QuantChoice(best, f"there is no {DEFAULT}; this is the closest" if quant else f"there is no {DEFAULT}")


def _split(repo: str, files: Sequence[str]) -> ModelUnsupported:
    match = _SHARD.search(files[0])
    count = int(match[1]) if match else len(files)
    return ModelUnsupported(
        f"{files[0]} in {repo} is the first of {count} files that make one model.",
        "edgellm reads single-file models: choose a smaller quantisation, or merge the files with llama-gguf-split.",
    )


ALIASES = MappingProxyType({"edgellm-draft": "draft.gguf", "edgellm-verifier": "verifier.gguf"})
"""The bundled pair: alias and file name."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_HUB_NAME = re.compile(rf"(?:hf\.co/)?({_PART})/({_PART})(?:[:@]([A-Za-z0-9][A-Za-z0-9_.-]{{0,126}}))?", re.ASCII)
_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class HubName:
    """`user/repo`, and the quantisation (or file name) after the colon, if any. Safe to build paths from."""

    user: str
    repo: str
    quant: str | None = None

    @property
    def repo_id(self) -> str:
        return f"{self.user}/{self.repo}"

    @property
    def folder(self) -> str:
        """The repository's folder name in the Hugging Face cache."""
        return f"models--{self.user}--{self.repo}"

    def __str__(self) -> str:
        return self.repo_id if self.quant is None else f"{self.repo_id}:{self.quant}"


def parse_hub_name(text: str) -> HubName:
    """Parse `user/repo`, `user/repo:quant`, `user/repo@quant`, each also with `hf.co/` before it.

    The pattern is strict, so that no name can lead out of the cache: letters, digits, `-`, `_`, `.`; no `..`, no `--`.

    Raises:
        InvalidOption: `text` is not such a name.
    """
    match = _HUB_NAME.fullmatch(text)
    if match is None or ".." in text or "--" in f"{match[1]}/{match[2]}":
        raise InvalidOption(f"{text!r} is not a model name.", "Write user/repo or user/repo:quant.")
    return HubName(match[1], match[2], match[3])


def bundled(alias: str) -> Path:
    """Return the path of a bundled model: in the installed package, or in `models/` of a checkout.

    Raises:
        ModelNotFound: the file is in neither place.
    """
    places = (_PACKAGE / "bundled" / ALIASES[alias], _PACKAGE.parent / "models" / ALIASES[alias])
    for path in places:
        if path.is_file():
            return path
    raise ModelNotFound(f"The bundled model {alias} is missing at {places[-1]}.", "Install edgellm again.")


def is_file(path: Path) -> bool:
    """Return whether a file is there; False also for a path that the system would not accept as a name at all."""
    return _is(lambda: path.expanduser().is_file())


def is_folder(path: Path) -> bool:
    """Return whether a folder is there; False also for a path that the system would not accept as a name at all."""
    return _is(path.is_dir)


def _is(there: Callable[[], bool]) -> bool:
    try:
        return there()
    except (OSError, RuntimeError, ValueError):
        return False


def looks_like_path(name: str) -> bool:
    """Return whether a name is meant as a path."""
    return name.startswith(("/", "./", "../", "~")) or name.lower().endswith(".gguf") or name in ("", ".", "..")


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
