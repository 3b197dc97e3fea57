"""The recommended sampling of a model: from its file, else its card in the catalogue, else a common default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, Self

from edgellm.engine.gguf.reader import ModelFile
from edgellm.spec.sampling import Choice
from edgellm.storage.catalog import catalog

# llama.cpp's keys behind `general.sampling.`, each with our name, and its least and largest useful value.
_KEYS: Mapping[str, tuple[str, float, float]] = MappingProxyType(
    {
        "temp": ("temperature", 0.0, 100.0), "top_k": ("top_k", 0, 2**31 - 1), "top_p": ("top_p", 1e-6, 1.0),
        "min_p": ("min_p", 0.0, 1.0), "penalty_repeat": ("repeat_penalty", 0.5, 2.0),
    }
)  # fmt: skip
_UNSAID: Mapping[str, Any] = MappingProxyType({"temperature": 0.7, "min_p": 0.05})


@dataclass(frozen=True, slots=True)
class ModelSampling:
    """The default sampling of a model's replies, and the `origin` of its figures. Figures left out there are off, but
    for `top_k`, as in llama.cpp."""

    temperature: float
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    origin: str = ""

    def figures(self) -> dict[str, float]:
        """Return the figures by their names."""
        return {name: value for name, value in asdict(self).items() if name != "origin"}

    def told_by(self, choice: Choice) -> Self:
        """Return the sampling that a verifier with `choice` can follow: a stock server tells only its likeliest tokens,
        and no logits, which the repeat penalty divides."""
        if choice.likely is None:
            return self
        return replace(self, top_k=min(self.top_k or choice.likely, choice.likely or self.top_k), repeat_penalty=1.0)


def sampling_of(file: ModelFile) -> ModelSampling:
    """Return the sampling of the model in `file`. A value of the file out of range counts as left out."""
    metadata = file.header.metadata
    names = [str(metadata.get(f"general.{key}", "")) for key in ("name", "basename")]
    card = catalog().sampling_of(file.path.stem, *names)
    said = {}
    for key, (name, least, most) in _KEYS.items():
        value = metadata.get(f"general.sampling.{key}")
        if isinstance(value, (int, float)) and least <= value <= most:
            said[name] = int(value) if name == "top_k" else round(value, 6)  # The file has 32-bit floats.
    origins = [*["the model's file"] * bool(said), *["its card"] * bool(card.keys() - said.keys())]
    return _sampling({**card, **said}, " and ".join(origins))


def sampling_elsewhere(name: str, text: ModelFile) -> ModelSampling:
    """Return the sampling of a remote model by its `name`, else that of `text`, a model with its tokenizer."""
    card = catalog().sampling_of(name)
    return _sampling(card, "its card") if card else sampling_of(text)


def _sampling(wanted: Mapping[str, Any], origin: str) -> ModelSampling:
    if not wanted:
        return ModelSampling(**_UNSAID, origin="the default: neither the file nor a card says")
    return ModelSampling(**{"temperature": _UNSAID["temperature"], **wanted}, origin=origin)
