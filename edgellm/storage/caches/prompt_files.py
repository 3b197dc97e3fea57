"""The files of kept prompts, for whoever lists or removes them; `saved_prompts` writes and reads them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from edgellm import places

SAVED, UNFINISHED = ".kv", ".new"
"""Endings of names."""


def prompts_folder() -> Path:
    """Return the folder of all kept prompts; it need not exist."""
    return places.cache_dir() / "prompts"


def prompt_files(pattern: str = "*") -> list[Path]:
    """Return the files whose names match, those that are being written included."""
    with suppress(OSError):
        return [path for path in prompts_folder().glob(pattern) if path.suffix in (SAVED, UNFINISHED)]
    return []


def remove_prompts() -> int:
    """Remove all kept prompts, and return their number."""
    return sum(map(removed, prompt_files()))


def removed(path: Path) -> bool:
    """Remove a file, and return whether it was there and could be removed."""
    with suppress(OSError):
        path.unlink()
        return True
    return False
