"""The names that a model may have, and what they mean on the hub: here alone are names taken apart.

A name is a path, an alias of a bundled model, a short name from the catalogue (`qwen3:0.6b`, `qwen3:8b-q8_0`), or
`user/repo[@revision][:quant]` on the Hugging Face hub.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType

from edgellm.errors import InvalidOption, ModelNotFound
from edgellm.storage.catalog import catalog
from edgellm.storage.quants import quant_of

ALIASES = MappingProxyType(
    {"edgellm-draft": "draft.gguf", "edgellm-verifier": "verifier.gguf", "smollm2:draft": "smollm2/draft.gguf"}
)
"""The bundled models: alias and file. The first two are a pair; the last drafts for smollm2:135m."""

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,94}[A-Za-z0-9_])?"
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,126}"
_HUB_NAME = re.compile(rf"(?:hf\.co/)?({_PART})/({_PART})(?:@({_WORD}))?(?::({_WORD}))?", re.ASCII)
_NEAR = 0.5  # how alike a proposed name is, at least


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
        """The repository's folder name in the Hugging Face cache."""
        return f"models--{self.user}--{self.repo}"

    @property
    def short(self) -> str:
        """The name to type: the short one if the catalogue has the model, otherwise the whole."""
        known = None if self.revision is not None else catalog().short_name(self.repo_id, self.quant)
        return known or str(self)

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return self.repo_id + revision + ("" if self.quant is None else f":{self.quant}")


def parse_hub_name(text: str) -> HubName:
    """Parse `user/repo[@revision][:quant]`, also with `hf.co/` before it.

    The pattern is strict, so that no name can lead out of the cache: letters, digits, `-`, `_`, `.`; no `..`, no `--`.
    A quantisation may follow the at sign, too, as no revision is called like one.

    Raises:
        InvalidOption: `text` is not such a name.
    """
    match = _HUB_NAME.fullmatch(text)
    if match is None or ".." in text or "--" in f"{match[1]}/{match[2]}":
        raise InvalidOption(f"{text!r} is not a model name.", "Write user/repo, user/repo:quant or user/repo@revision.")
    user, repo, revision, quant = match.groups()
    if quant is None and revision is not None and (quant_of(revision) or revision.lower().endswith(".gguf")):
        return HubName(user, repo, revision)
    return HubName(user, repo, quant, revision)


def hub_name(text: str) -> HubName:
    """Return what a short name of the catalogue, or a name of the hub, means on the hub.

    Raises:
        InvalidOption: `text` has a slash, and is no name of the hub.
        ModelNotFound: `text` has none, and the catalogue has no such model on the hub; the message names the nearest.
    """
    if "/" in text:
        return parse_hub_name(text)
    if found := catalog().find(text):
        model, quant = found
        if not model.repo_id:
            raise ModelNotFound(f"There is no {text} on the hub.", f"It comes as {model.name} in {model.quant}.")
        return parse_hub_name(f"{model.repo_id}:{quant}")
    raise unknown(text)


def unknown(name: str, here: Iterable[str] = ()) -> ModelNotFound:
    """Return the error for a name that means nothing, with the nearest of those of the
    catalogue, of the bundled models, and of the models that are `here`."""
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
