"""The identity of a model file, whatever its name: the SHA-256 of its bytes, computed once per file."""

from __future__ import annotations

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path

from edgellm.errors import StateDamaged
from edgellm.places import cache_dir
from edgellm.storage.state import read_json, write_state

_BLOB = re.compile(r"[0-9a-f]{64}")  # the hub's cache names a model's file by this very hash
_MAX_FILES = 256  # files
_MAX_BYTES = 2**24
QUICK_BYTES = 64 * 2**20  # a file up to this size is hashed at once


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file's content in hex, 64 characters.

    The file is read once (about a second per gigabyte), and the hash remembered as long as the file's size and time of
    change stay. For a model that is split over several files, give the first one.

    Raises:
        OSError: the file cannot be read.
    """
    real = path.resolve()
    if real.parent.name == "blobs" and _BLOB.fullmatch(real.name):
        return real.name
    stat = real.stat()
    key, stamp = str(real), [stat.st_size, stat.st_mtime_ns]
    cache = _read_cache()
    entry = cache.get(key)
    if isinstance(entry, list) and entry[:2] == stamp and _BLOB.fullmatch(str(entry[-1])):
        return str(entry[-1])
    with real.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    cache.pop(key, None)
    recent = dict(list(cache.items())[-_MAX_FILES + 1 :])
    with suppress(OSError):  # then it is computed again next time
        _write_cache(recent | {key: [*stamp, digest]})
    return digest


def quick_fingerprint(path: Path) -> str | None:
    """Return `fingerprint(path)` where it is remembered or quickly computed; None where the user would have to wait."""
    try:
        real = path.resolve()
        entry = _read_cache().get(str(real))
        stat = real.stat()
        remembered = isinstance(entry, list) and entry[:2] == [stat.st_size, stat.st_mtime_ns]
        quick = remembered or real.parent.name == "blobs" or stat.st_size <= QUICK_BYTES
        return fingerprint(path) if quick else None
    except OSError:
        return None


def _file() -> Path:
    return cache_dir() / "fingerprints.json"


def _read_cache() -> dict[str, object]:
    """Return size, time of change and hash of each file read before; an empty dict where the record is damaged."""
    with suppress(StateDamaged):
        return read_json(_file(), dict[str, object], _MAX_BYTES) or {}
    return {}


def _write_cache(cache: dict[str, object]) -> None:
    write_state(_file(), json.dumps(cache))
