"""Where the command line keeps its own files."""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs


def state_dir() -> Path:
    """History and logs, readable by the user alone. `EDGELLM_HOME` moves everything; made on the way.

    Raises:
        OSError: it cannot be made.
    """
    home = os.environ.get("EDGELLM_HOME")
    path = Path(home).expanduser() / "state" if home else platformdirs.user_state_path("edgellm")
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def private_file(path: Path) -> Path:
    """Makes `path`, empty, so that only the user can read it; leaves one that is there."""
    os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600))
    return path
