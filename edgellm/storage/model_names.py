"""The names that a model may have: a path, an alias, or `user/repo[:quant]`, and the file that a quantisation means."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
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
