"""Folders that edgellm uses on this machine. `EDGELLM_HOME` moves all folders that are written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import platformdirs


def config_file() -> Path:
    """Return the path of the settings file, which need not exist."""
    return _folder("config", platformdirs.user_config_path) / "config.toml"


def data_dir() -> Path:
    """Return the folder of data that is costly to recreate, such as profiles of pairs. It need not exist."""
    return _folder("data", platformdirs.user_data_path)


def cache_dir() -> Path:
    """Return the folder of data that can be recreated, such as fingerprints and shards. It need not exist."""
    return _folder("cache", platformdirs.user_cache_path)


def state_dir() -> Path:
    """Return the folder of runtime state, such as crash logs. It need not exist."""
    return _folder("state", platformdirs.user_state_path)


def bundled_dirs() -> tuple[Path, Path]:
    """Return the folders that may hold the bundled models: that of an installed package, and that of a checkout."""
    package = Path(__file__).parent
    return package / "bundled", package.parent / "models"


def _folder(name: str, usual: Callable[[str], Path]) -> Path:
    home = os.environ.get("EDGELLM_HOME")
    return Path(home).expanduser() / name if home else usual("edgellm")
