"""The models in a repository: the files that make up each of them, and the one that a name means.

A repository holds a model in several quantisations, some split over files or in folders of their own, and files that
are no models: vision projectors, calibration data, and drafters of other programs. The names are converters' and
uploaders' on the hub; `tests/storage/listings.py` has listings of real repositories.
"""

import difflib
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgellm.errors import ModelNotFound, size

DEFAULT = "Q4_K_M"

# Where the default is missing: the nearest in size and quality first.
PREFERENCE = (
    "Q4_K_M", "Q4_K_S", "Q4_K_L", "Q4_K_XL", "IQ4_NL", "IQ4_XS", "Q4_0", "Q4_1", "Q4", "Q5_K_M", "Q5_K_S", "Q5_0",
    "Q5_1", "Q6_K", "Q8_0", "MXFP4", "MXFP4_MOE", "NVFP4", "Q3_K_L", "Q3_K_M", "IQ3_M", "Q3_K_S", "Q2_K", "F16", "BF16",
    "F32",
)  # fmt: skip
MEMORY_SHARE = 0.75
"""The share of memory that weights may take; the rest is for the system and the context."""

QUANT = re.compile(
    r"(?<![A-Za-z0-9])"
    r"((?:UD-)?(?:I?Q[1-9](?:_[A-Z0-9]{1,3}){0,3}|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|FP?16|FP?32))"
    r"(?![A-Za-z0-9_])",
    re.IGNORECASE | re.ASCII,
)
_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_NO_MODEL = re.compile(
    r"(?:^|[-._/])(?:mmproj|imatrix)(?:[-._/]|$)"
    r"|(?:^|/)(?:mtp|dflash|dspark)-[^/]*$|(?:^|/)(?:mtp|dflash|dspark)/",
    re.IGNORECASE,
)
# drafters and adapters, where the repository has a model without such a word
_USUALLY_NONE = re.compile(
    r"(?:^|[-._])(?:eagle|eagle3)(?:[-._]|$)|[-._](?:mtp|dflash|dspark|assistant|draft|lora)(?:[-._]|$)", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class QuantChoice:
    """The files of one model, the first part first, why it was chosen, and whether it does not fit into memory."""

    files: tuple[str, ...]
    reason: str
    warning: str = ""


@dataclass(frozen=True, slots=True)
class ModelVariant:
    """A model in a repository, in one quantisation. `files` are those of its `count` files that are there, in order;
    `size` is their length in bytes, 0 if unknown."""

    files: tuple[str, ...]
    count: int
    size: int

    @property
    def complete(self) -> bool:
        return len(self.files) == self.count

    @property
    def stem(self) -> str:
        """Return the file's name, without folder, part and ending."""
        return _stem(self.files[0])

    @property
    def quant(self) -> str | None:
        return quant_of(self.files[0])

    @property
    def base(self) -> str:
        """Return the quantisation without the prefix that a dynamic one has."""
        return (self.quant or "").removeprefix("UD-")


def quant_of(file: str) -> str | None:
    """Return the last quantisation in a file's name or its folder's, in capitals; F16 for FP16."""
    found = QUANT.findall(_PART.sub("", file).removesuffix(".gguf"))
    return str(found[-1]).upper().replace("FP1", "F1").replace("FP3", "F3") if found else None


def is_model(file: str) -> bool:
    """Return whether the file is a language model in GGUF, or a part of one, and no companion of a model."""
    return file.lower().endswith(".gguf") and not _NO_MODEL.search(file[: -len(".gguf")])


def variants(files: Mapping[str, int]) -> list[ModelVariant]:
    """Return the models among a repository's files (name -> bytes), by name; also models that lack parts."""
    groups: dict[tuple[str, int], dict[int, str]] = {}
    for file in sorted(filter(is_model, files)):
        part = _PART.search(file)
        number, count = (int(part[1]), int(part[2])) if part else (1, 1)
        if 1 <= number <= count:
            groups.setdefault((_PART.sub("", file), count), {})[number] = file
    return [
        ModelVariant(tuple(parts[number] for number in sorted(parts)), count, sum(files[one] for one in parts.values()))
        for (_, count), parts in groups.items()
    ]


def labels(models: Sequence[ModelVariant]) -> list[str]:
    """Return the text after the colon for each model of one repository; of a drafter beside models its file's name."""
    usual = _usual(models)
    quants = Counter(model.quant for model in usual)
    return [
        model.stem if model.quant is None or quants[model.quant] > 1 or model not in usual else model.quant
        for model in models
    ]


def _usual(models: Sequence[ModelVariant]) -> list[ModelVariant]:
    return [model for model in models if not _USUALLY_NONE.search(model.stem)] or list(models)


def choose(repo: str, files: Mapping[str, int], wanted: str | None, memory: int | None = None) -> QuantChoice:
    """Return the model that `wanted` (a quantisation or a file name, if any) means among a repository's `files`, with
    their bytes, 0 if unknown; where it is not named one that fits into `memory` bytes, if there is one."""
    found = variants(files)
    models = [model for model in found if model.complete]
    if not found:
        raise ModelNotFound(f"{repo} holds no GGUF model.", "Look for the model's repository whose name ends in -GGUF.")
    if not models:
        raise _incomplete(repo, found[0])
    usual = _usual(models)
    if wanted is None:
        return _suitable(usual, memory)
    if matches := _matching(usual, wanted) or _matching(models, wanted):
        reason = "asked for" if len(matches) == 1 else f"the first of {len(matches)} that match"
        return QuantChoice(matches[0].files, reason, _too_large(matches[0], memory))
    if incomplete := _matching(found, wanted):
        raise _incomplete(repo, incomplete[0])
    named = list(dict.fromkeys(labels(usual)))
    closest = difflib.get_close_matches(wanted.upper(), named, n=1, cutoff=0.5)
    raise ModelNotFound(
        f"{repo} has no {wanted}; it has: {', '.join(named)}.",
        f"Choose one of them, such as {repo}:{(closest or named)[0]}.",
    )


def _matching(models: Sequence[ModelVariant], wanted: str) -> list[ModelVariant]:
    """Return the models with this file name, or else with this quantisation, or else of this family (Q4: Q4_K_M)."""
    stem, quant = _stem(wanted if wanted.lower().endswith(".gguf") else f"{wanted}.gguf"), quant_of(wanted)
    ways: list[Callable[[ModelVariant], bool]] = [
        lambda model: model.stem == stem,
        lambda model: model.stem.lower() == stem.lower(),
    ]
    if quant is not None and QUANT.fullmatch(wanted):
        ways += [
            lambda model: model.quant == quant,
            lambda model: model.base == quant,
            lambda model: model.base.startswith(f"{quant}_"),
        ]
    found = next((those for way in ways if (those := list(filter(way, models)))), [])
    return sorted(found, key=_rank)


def _suitable(models: Sequence[ModelVariant], memory: int | None) -> QuantChoice:
    best = min(models, key=_rank)
    if len(models) == 1:
        reason = "the only model there"
    elif best.base == DEFAULT:
        reason = "the default"
    else:
        reason = f"there is no {DEFAULT}; this is the closest" if best.quant else f"there is no {DEFAULT}"
    too_large = _too_large(best, memory)
    fitting = [model for model in models if model.size > 0 and not _too_large(model, memory)]
    if too_large and fitting:
        largest = max(fitting, key=lambda model: model.size)
        return QuantChoice(largest.files, f"the largest that fits; {best.quant or best.stem}: {too_large}")
    return QuantChoice(best.files, reason, too_large)


def _too_large(model: ModelVariant, memory: int | None) -> str:
    if memory is None or model.size <= MEMORY_SHARE * memory:
        return ""
    return f"{size(model.size)} of weights are more than three quarters of this machine's memory of {size(memory)}"


def _incomplete(repo: str, model: ModelVariant) -> ModelNotFound:
    there = {int(part[1]) for file in model.files if (part := _PART.search(file))}
    missing = next(number for number in range(1, model.count + 1) if number not in there)
    return ModelNotFound(
        f"{repo} has only {len(there)} of the {model.count} parts of {model.stem}: part {missing} is missing.",
        "Choose another quantisation or repository.",
    )


def _rank(model: ModelVariant) -> float:
    """Return the place in `PREFERENCE`; a quantisation that is missing there comes after its family."""
    quant = model.base
    if quant in PREFERENCE:
        return PREFERENCE.index(quant)
    family = re.match(r"I?(Q\d)", quant)
    alike = [place for place, name in enumerate(PREFERENCE) if family and name.lstrip("I").startswith(family[1])]
    return max(alike, default=len(PREFERENCE)) + 0.5


def _stem(file: str) -> str:
    return _PART.sub("", file).rsplit("/", 1)[-1][: -len(".gguf")]
