"""Weights that llama.cpp's RPC servers have received, so that they need not be sent again.

llama.cpp writes a file for each large tensor, named by a 64-bit hash of its bytes, and later takes any file of that
name as it is: also one whose writing was cut off, and one that a device made to collide. So files count only from when
the model that they belong to was loaded, and each paired device has a folder of its own.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from edgellm import places
from edgellm.errors import StateDamaged
from edgellm.storage.state import private_folder, read_json, write_state

_WHOLE = "whole.json"  # names and sizes of files that are whole
_SHARE = 0.5  # default share of the free disk space


class TensorCache:
    """Folders of received weights. Only one process of a device may write to a folder at a time."""

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        """Keep at most `limit` bytes in all, by default half of the free and the kept bytes."""
        self._root = places.cache_dir() / "tensors" if root is None else root
        self._limit = limit

    def open(self, owner: str, size: int) -> Path | None:
        """Return the folder of a device, with only files that are known to be whole, and room for `size` more bytes;
        None without room."""
        folder = self._root / owner
        try:
            private_folder(folder)
            whole = _read(folder)
            for file in _files(folder):
                if whole.get(file.name) != file.stat().st_size:
                    file.unlink()
            return folder if self._make_room(size, folder) else None
        except OSError:
            return None

    def size(self, owner: str) -> int:
        """Return the bytes that are kept for a device."""
        return sum(_read(self._root / owner).values())

    def confirm(self, folder: Path) -> None:
        """Remember that all files of a folder are whole: the model was loaded from them."""
        with suppress(OSError):
            sizes = {}
            for file in _files(folder):
                with file.open("rb") as data:
                    os.fsync(data.fileno())
                sizes[file.name] = file.stat().st_size
            write_state(folder / _WHOLE, json.dumps(sizes))

    def _make_room(self, size: int, own: Path) -> bool:
        """Remove the oldest files until there is room; return whether there is."""
        files = sorted(
            (file for folder in self._root.iterdir() if folder.is_dir() for file in _files(folder)),
            key=lambda file: (file.is_relative_to(own), file.stat().st_mtime),
        )
        kept = sum(file.stat().st_size for file in files)
        free = shutil.disk_usage(self._root).free
        limit = int(_SHARE * (free + kept)) if self._limit is None else self._limit
        if size > limit:
            return False
        while kept + size > limit and files:
            oldest = files.pop(0)
            kept -= oldest.stat().st_size
            oldest.unlink()
        return True


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and file.name != _WHOLE]


def _read(folder: Path) -> dict[str, int]:
    with suppress(StateDamaged):
        return read_json(folder / _WHOLE, lambda found: {str(name): int(size) for name, size in found.items()}) or {}
    return {}
