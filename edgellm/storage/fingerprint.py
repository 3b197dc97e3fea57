"""The identity of a model, whatever the names of its files: from the SHA-256 of their bytes, computed once per file."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from edgellm.errors import EdgeError, StateDamaged
from edgellm.places import cache_dir
from edgellm.storage.state import read_json, write_state

_BLOB = re.compile(r"[0-9a-f]{64}")  # the hub's cache names a model's file by this very hash
_FIRST_PART = re.compile(r"-00001-of-\d{5}\.gguf$")
_MAX_FILES = 256  # files
_MAX_BYTES = 2**24
QUICK_BYTES = 64 * 2**20  # a file up to this size is hashed at once


def fingerprint(path: Path) -> str:
    """Return the fingerprint of a model in hex, 64 characters; `path` is its file, or the first part of a split model.

    For a model in one file that is the SHA-256 of the file, for a split one as `fingerprint_of` says. Files are read
    once (about a second per gigabyte), and their hashes remembered as long as size and time of change stay.

    Raises:
        OSError: a file cannot be read.
        ModelNotFound, ModelCorrupt, ModelUnsupported: as for `ModelFile.open`, where the name is that of a first part.
    """
    return fingerprint_of([_sha256(file) for file in _files(path)])


def fingerprint_of(hashes: Sequence[str]) -> str:
    """Return the fingerprint of a model whose files have these SHA-256 in hex, the first part first.

    A single file's hash is the fingerprint. That of a split model is the SHA-256 of its files' hashes as text, one on a
    line, so it depends on every part, and differs from the hash of the first part and from that of the joined file.
    """
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(f"{one}\n" for one in hashes).encode()).hexdigest()


def _files(path: Path) -> tuple[Path, ...]:
    if not _FIRST_PART.search(path.name):  # llama.cpp, too, finds other parts by this name alone
        return (path,)
    from edgellm.engine import ModelFile

    return ModelFile.open(path).paths


def _sha256(path: Path) -> str:
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
        return fingerprint(path) if sum(map(_unhashed_bytes, _files(path))) <= QUICK_BYTES else None
    except (OSError, EdgeError):
        return None


def _unhashed_bytes(path: Path) -> int:
    """Return the bytes that must be read to know the file's hash."""
    real = path.resolve()
    entry, stat = _read_cache().get(str(real)), real.stat()
    remembered = isinstance(entry, list) and entry[:2] == [stat.st_size, stat.st_mtime_ns]
    return 0 if remembered or real.parent.name == "blobs" else stat.st_size


def _file() -> Path:
    return cache_dir() / "fingerprints.json"


def _read_cache() -> dict[str, object]:
    """Return size, time of change and hash of each file read before; an empty dict where the record is damaged."""
    with suppress(StateDamaged):
        return read_json(_file(), dict[str, object], _MAX_BYTES) or {}
    return {}


def _write_cache(cache: dict[str, object]) -> None:
    write_state(_file(), json.dumps(cache))
