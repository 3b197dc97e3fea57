"""The key that a client shows: made here, kept in a file for the user alone."""

from __future__ import annotations

import re
import secrets
from pathlib import Path

from edgellm.errors import InvalidOption
from edgellm.places import data_dir
from edgellm.storage.private_files import locked, read_private, write_private

_FIT = re.compile(r"[!-~]{16,500}")


def http_folder() -> Path:
    """Return the folder of the server's own key and certificate. It need not exist."""
    return data_dir() / "http"


def api_key(path: Path | None = None) -> tuple[Path, str]:
    """Return the file `path` (by default one in edgellm's data folder) and the key in it, made if it does not exist.

    Raises:
        InvalidOption: the key is too short or long, or holds anything but plain characters.
        TrustUnusable: the file is a link, or cannot be read or written.
    """
    path = path or http_folder() / "api-key"
    if path.parent == http_folder():
        with locked(path.parent):
            return path, _kept(path)
    return path, _kept(path)


def _kept(path: Path) -> str:
    if (data := read_private(path)) is None:
        key = secrets.token_urlsafe(32)
        write_private(path, f"{key}\n".encode())
        return key
    key = data.decode("latin-1").strip()
    if not _FIT.fullmatch(key):
        raise InvalidOption(
            f"{path} holds no key: {len(key)} characters, and 16 to 500 plain ones without spaces are needed.",
            "Remove the file: a new key will be made.",
        )
    return key
