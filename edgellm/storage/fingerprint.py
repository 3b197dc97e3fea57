"""The identity of a model, independent of its files' names: from the SHA-256 of their bytes, computed once per file."""

import hashlib
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from edgellm.errors import EdgeError, Stopped
from edgellm.isolation.child import POLL_SECONDS
from edgellm.state import read_cached, write_cached
from edgellm.system import cache_dir

SHA256 = re.compile(r"[0-9a-f]{64}")  # the hub's cache and Ollama name a model's file by its SHA-256
_FIRST_PART = re.compile(r"-00001-of-\d{5}\.gguf$")
_CACHE = "fingerprints.json"
QUICK_BYTES = 64 * 2**20  # a file up to this size is hashed at once
_PORTION = 2**18  # bytes that are read at once


def fingerprint(path: Path) -> str:
    """Return the fingerprint of the model at `path`, its file or first part, in hex. Hashes of files are remembered as
    long as size and time of change stay."""
    return FileHash(path).compute()


def fingerprint_of(hashes: Sequence[str]) -> str:
    """Return the fingerprint of a model whose files have these SHA-256 in hex: a single file's own, else the SHA-256 of
    the hashes as text, one on a line, which depends on every part."""
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(f"{one}\n" for one in hashes).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex, computed anew."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class FileHash:
    """The fingerprint of one model. Its computation may be stopped, and continued in another thread."""

    def __init__(self, path: Path) -> None:
        """`path` is as for `fingerprint`."""
        self.path = path
        self._computing = threading.Lock()
        self._parts: tuple[_PartHash, ...] = ()
        self._found: str | None = None

    @property
    def known(self) -> str | None:
        """Return the fingerprint if it is known without reading a file."""
        if self._found is None:
            with suppress(OSError, EdgeError):
                if all(hashes := [part.known or "" for part in self._files()]):
                    self._found = fingerprint_of(hashes)
        return self._found

    def quick(self) -> str | None:
        """Return the fingerprint if known or quickly computed; None if the user would have to wait."""
        try:
            unknown = sum(part.path.stat().st_size for part in self._files() if not part.known)
            return self.compute() if unknown <= QUICK_BYTES else None
        except (OSError, EdgeError):
            return None

    def compute(
        self, should_stop: Callable[[], bool] | None = None, progress: Callable[[float], None] | None = None
    ) -> str:
        """Return the fingerprint. `progress` is called with the share of the files that is read."""

        def reached() -> None:
            size = sum(part.size for part in self._parts)
            if progress is not None and size:
                progress(sum(part.read for part in self._parts) / size)
            if should_stop is not None and should_stop():
                raise Stopped

        while not self._computing.acquire(timeout=POLL_SECONDS):
            reached()
        try:
            self._found = self.known or fingerprint_of([part.compute(reached) for part in self._files()])
            return self._found
        finally:
            self._computing.release()

    def _files(self) -> "tuple[_PartHash, ...]":
        self._parts = self._parts or tuple(map(_PartHash, _files(self.path)))
        return self._parts


class _PartHash:
    """The SHA-256 of one file, of which `read` bytes are read."""

    def __init__(self, path: Path) -> None:
        self.path, self.read, self.size = path.resolve(), 0, path.stat().st_size if path.exists() else 0
        self._digest = hashlib.sha256()
        self._stamp: list[int] = []

    @property
    def known(self) -> str | None:
        """Return the hash of a file that was computed before, or is its name in the hub's cache or Ollama's."""
        name = self.path.name.removeprefix("sha256-")
        if self.path.parent.name == "blobs" and SHA256.fullmatch(name):
            return name
        *stamp, digest = _read_cache().get(str(self.path)) or [""]
        return str(digest) if SHA256.fullmatch(str(digest)) and stamp == _stamp(self.path) else None

    def compute(self, reached: Callable[[], None]) -> str:
        """Return the hash. `reached` is called after each portion; if it raises, the next call continues."""
        if (known := self.known) is not None:
            return known
        with self.path.open("rb", buffering=0) as file:
            if (stamp := _stamp(self.path)) != self._stamp:  # the file is new or has changed
                self._digest, self.read, self._stamp, self.size = hashlib.sha256(), 0, stamp, stamp[0]
            file.seek(self.read)
            buffer = memoryview(bytearray(_PORTION))
            while n := file.readinto(buffer):
                self._digest.update(buffer[:n])
                self.read += n
                reached()
        digest = self._digest.hexdigest()
        write_cached(cache_dir() / _CACHE, _read_cache() | {str(self.path): [*stamp, digest]})
        return digest


def _files(path: Path) -> tuple[Path, ...]:
    if not _FIRST_PART.search(path.name):  # llama.cpp, too, finds other parts by this name alone
        return (path,)
    from edgellm.engine import ModelFile

    return ModelFile.open(path).paths


def _stamp(real: Path) -> list[int]:
    found = real.stat()
    return [found.st_size, found.st_mtime_ns]


def _read_cache() -> dict[str, list[int | str]]:
    return read_cached(cache_dir() / _CACHE, lambda found: {name: list(entry) for name, entry in found.items()}) or {}
