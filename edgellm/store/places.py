"""Where edgellm keeps what it has found out: see `edgellm.places`, which the engine uses, too."""

from __future__ import annotations

from edgellm.places import cache_dir, config_dir, data_dir, state_dir

__all__ = ["cache_dir", "config_dir", "data_dir", "state_dir"]
