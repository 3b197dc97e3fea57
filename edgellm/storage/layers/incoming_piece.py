"""Files of pieces: each gets its final name when it is complete and its hash is right, and stays while it is used."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from edgellm import system
from edgellm.engine import ModelFile, check_cuttable
from edgellm.engine.trial.probe import Probe, require_loadable
from edgellm.errors import DiskFull, EdgeError, LayersCorrupt, LayersRefused, StoreBusy
from edgellm.storage.layers.manifest import LayerPiece

_PLAIN = system.NO_LINKS | system.BINARY
_RETRY = "Deploy it again; if that does not help, run the same version of edgellm on both sides."


class IncomingPiece:
    """The file of an arriving piece, to be closed; the bytes that have arrived stay for the next time."""

    def __init__(self, path: Path, whole: Path, piece: LayerPiece) -> None:
        """Open and hash the file at `path`, to be renamed to `whole`. Hashing takes a second per gigabyte."""
        self.piece = piece
        self._path, self._final = path, whole
        with storage_errors(path):
            self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | _PLAIN, 0o600), "r+b", buffering=0)
            self._digest, self.size = hashlib.file_digest(self._file, "sha256"), self._file.tell()
            if self.size > piece.size:
                self.restart()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def restart(self) -> None:
        """Discard the bytes that have arrived."""
        self._file.seek(0)
        self._file.truncate()
        self._digest, self.size = hashlib.sha256(), 0

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes. Raise LayersRefused or DiskFull."""
        if self.size + len(data) > self.piece.size:
            raise LayersRefused(
                f"{str(self.piece).capitalize()} was announced with {self.piece.size} bytes, but more arrived.", _RETRY
            )
        with storage_errors(self._path):
            try:
                remaining = memoryview(data)
                while remaining:
                    remaining = remaining[self._file.write(remaining) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(self.size)
                    self._file.seek(self.size)
                raise
        self._digest.update(data)
        self.size += len(data)

    def finish(self) -> Path:
        """Return the piece's final path, after checking its size, hash and layers, and renaming it."""
        if self.size < self.piece.size:
            raise LayersRefused(
                f"{str(self.piece).capitalize()} is incomplete: {self.size} of {self.piece.size} bytes have arrived.",
                _RETRY,
            )
        if wrong := self._fault():
            self._drop()
            raise LayersCorrupt(wrong, _RETRY)
        with storage_errors(self._path):
            if self._final.is_file() and self._final.stat().st_size == self.piece.size:  # another process was faster
                self._drop()
                return self._final
            os.fsync(self._file.fileno())
            self._file.close()
            mark_used(self._path)
            self._path.replace(self._final)
        system.sync_folder(self._final.parent)  # the name, too, must outlive a power cut
        try_early(self._final)
        return self._final

    def _fault(self) -> str:
        if self._digest.hexdigest() != self.piece.sha256:
            return f"The bytes that arrived are not {self.piece}: their SHA-256 differs."
        try:
            layers = check_cuttable(ModelFile.open(self._path).header)
        except EdgeError as error:
            return f"The file that arrived for {self.piece} is not a model: {error.what}"
        wrong = f"The file that arrived for {self.piece} has {layers} layers."
        return wrong if layers != len(self.piece.layers) else ""

    def _drop(self) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)


@contextmanager
def hold_in_use(path: Path) -> Iterator[bool]:
    """Prevent `remove_unused` from removing the file until the `with` ends; yield False if there is no such file."""
    try:
        file = path.open("rb")
    except OSError:
        yield False
        return
    with file:
        system.lock_shared(file)
        present = False
        with suppress(OSError):  # the file may have been removed in between
            present = os.path.samestat(path.stat(), os.fstat(file.fileno()))
        yield present


def remove_unused(path: Path, *, only_look: bool = False) -> bool:
    """Remove the file unless it is in use; return whether it is gone, or with `only_look` whether it could go."""
    try:
        with path.open("rb") as file:
            system.lock_exclusive(file)
            if not only_look:
                path.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except OSError:  # the file is in use, or not ours to remove
        return False
    return True


def try_early(path: Path) -> None:
    """Try a stored piece in a child process now, if its header is new here, so that its first cold start need not. The
    kept verdict has a cold start refuse a piece that cannot be loaded."""
    with suppress(EdgeError):
        file = ModelFile.open(path)
        require_loadable(Probe(file.paths, file.parts))


def mark_used(path: Path) -> None:
    """Record that a piece is used now. The system's own stamps are some milliseconds apart, and pieces used within one
    would be evicted in the order of their hashes."""
    now = time.time_ns()
    with suppress(OSError):
        os.utime(path, ns=(now, now))


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise the system's errors about `path` as `StoreBusy`, `DiskFull` or `LayersRefused`."""
    try:
        yield
    except TimeoutError as error:
        raise StoreBusy(f"{path} is being changed by another process.", "Try again later.") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"The disk of {path} is full.", "Free some space there, and deploy again: what has arrived is kept."
            ) from error
        raise LayersRefused(f"{path} cannot be used: {error.strerror or error}.", "Check the disk.") from error
