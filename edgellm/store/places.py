"""Where edgellm keeps what it has found out. `EDGELLM_HOME` moves everything."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def config_dir() -> Path:
    """For what the user has written: `config.toml`. It need not exist."""
    home = os.environ.get("EDGELLM_HOME")
    return Path(home).expanduser() / "config" if home else platformdirs.user_config_path("edgellm")


def data_dir() -> Path:
    """For what took work to find out: profiles of pairs. It need not exist yet."""
    home = os.environ.get("EDGELLM_HOME")
    return Path(home).expanduser() / "data" if home else platformdirs.user_data_path("edgellm")


def cache_dir() -> Path:
    """For what can be made again: fingerprints of files, models cut into shards. It need not exist yet."""
    home = os.environ.get("EDGELLM_HOME")
    return Path(home).expanduser() / "cache" if home else platformdirs.user_cache_path("edgellm")
