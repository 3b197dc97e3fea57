"""Folders that edgellm uses on this machine. `EDGELLM_HOME` moves all of those that it writes to."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

_PACKAGE = Path(__file__).parent


def config_dir() -> Path:
    """Return the folder of what the user has written: `config.toml`. It need not exist."""
    home = os.environ.get("EDGELLM_HOME")
    return Path(home).expanduser() / "config" if home else platformdirs.user_config_path("edgellm")


def data_dir() -> Path:
    """Return the folder of what took work to find out, such as profiles of pairs. It need not exist."""
    home = os.environ.get("EDGELLM_HOME")
    return Path(home).expanduser() / "data" if home else platformdirs.user_data_path("edgellm")


def cache_dir() -> Path:
    """Return the folder of what can be made again, such as fingerprints and shards. It need not exist."""
    home = os.environ.get("EDGELLM_HOME")
    return Path(home).expanduser() / "cache" if home else platformdirs.user_cache_path("edgellm")


def state_dir() -> Path:
    """Return the folder of what comes of running it, such as crash logs. It need not exist."""
    home = os.environ.get("EDGELLM_HOME")
    return Path(home).expanduser() / "state" if home else platformdirs.user_state_path("edgellm")


def bundled_dirs() -> tuple[Path, Path]:
    """Return the folders that may hold the bundled models: that of an installed package, and that of a checkout."""
    return _PACKAGE / "bundled", _PACKAGE.parent / "models"
