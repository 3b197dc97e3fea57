"""The names that a model may have: a path, an alias, or `user/repo[:quant]` on the model hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from edgellm.errors import InvalidOption, ModelNotFound

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
