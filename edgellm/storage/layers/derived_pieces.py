"""Pieces that are made on this device to suit a stage: cut from a model that is whole here, or joined from smaller
pieces. They lie in the store of layers and count towards its limit; as they can be made again, they are removed first.

made/FINGERPRINT/SOURCE/0003-0008.gguf   the layers 3 to 8 of a model, counted from 0, both included
made/lock                                held by the process that makes a piece

SOURCE is `whole` for a piece that was cut from the model's own file, and the digest of the recipe for a piece that was
joined from pieces that were brought: layers from another device are never taken for this device's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from edgellm.errors import StoreFull
from edgellm.storage.layers.eviction import Stored, gigabytes
from edgellm.storage.layers.file_lease import kept_in_use, remove_unused
from edgellm.storage.layers.incoming_piece import told
from edgellm.storage.layers.manifest import is_hash
from edgellm.storage.state import private_folder

ENOUGH = 32 * 2**20  # bytes: for such a piece, the cost of a block of its own is small beside its computing
WHOLE = "whole"
_NAME = re.compile(r"(\d{4,9})-(\d{4,9})\.gguf")


def together(layer: int, last: int, size: float) -> int:
    """Return the last layer, at most `last`, of a piece that begins with `layer`, where a layer takes `size` bytes.

    A piece has about ENOUGH bytes, because every block costs a sixth of a millisecond per pass (`bench.mesh_cost`). All
    pieces of a model end at multiples of the same number of layers, so that another plan finds most of them made. But
    towards `last` they get smaller: the layers that a stage loads last are computed when nothing is left to load.
    """
    many = max(1, int(ENOUGH / max(1.0, size)))
    end = min(last, layer - layer % many + many - 1)
    left = last - layer + 1
    return end if end < last or left <= max(1, many // 4) else layer + (left + 1) // 2 - 1


class MadePieces:
    """The made pieces in the folder of a store. `room` returns the bytes left for them: under the store's limit, and on
    its disk. Any number of threads and processes may use the folder."""

    def __init__(self, folder: Path, room: Callable[[], tuple[int, int]]) -> None:
        self._folder, self._room = folder, room

    @contextmanager
    def using(
        self, model: str, first: int, last: int, size: int, make: Callable[[Path], None], recipe: str = WHOLE
    ) -> Iterator[Path]:
        """Yield the file of a piece of about `size` bytes, made if it is missing, and kept until the `with` ends.

        `recipe` is the digest of the recipe whose pieces it is joined from. `make` writes the file, and may raise
        anything.

        Raises:
            StoreFull: the other pieces that are made and in use leave no room under the limit.
            DiskFull, LayersRefused: the disk is full, or cannot be written.
        """
        path = self._folder / model / recipe / f"{first:04d}-{last:04d}.gguf"
        while True:
            with ExitStack() as held:
                if held.enter_context(kept_in_use(path)):
                    with suppress(OSError):
                        os.utime(path)
                    yield path
                    return
            with told(self._folder):
                private_folder(path.parent)
                with FileLock(self._folder / "lock", mode=0o600, thread_local=False):
                    if not path.is_file():
                        self._make(path, size, make)

    def files(self) -> list[Stored]:
        """Return every made piece."""
        found = []
        for path in sorted(self._paths("gguf")):
            with suppress(OSError):
                if is_hash(_model_of(path, self._folder)) and _NAME.fullmatch(path.name):
                    stat = path.stat()
                    found.append(Stored(path, "", stat.st_size, stat.st_size, stat.st_mtime))
        return found

    def models(self) -> dict[str, list[Stored]]:
        """Return the made pieces by the model's fingerprint."""
        found: dict[str, list[Stored]] = {}
        for file in self.files():
            found.setdefault(_model_of(file.path, self._folder), []).append(file)
        return found

    def of(self, model: str, recipe: str | None = None) -> list[Stored]:
        """Return the made pieces of a model; with a `recipe`, only those joined from its pieces."""
        files = self.models().get(model, [])
        return files if recipe is None else [file for file in files if file.path.parent.name == recipe]

    def _paths(self, ending: str) -> Iterator[Path]:
        """Yield all files with this ending, also those without a SOURCE folder: an earlier version left them, and they
        are counted and removed, never used."""
        yield from self._folder.glob(f"*/*.{ending}")
        yield from self._folder.glob(f"*/*/*.{ending}")

    def _make(self, path: Path, size: int, make: Callable[[Path], None]) -> None:
        """Make a piece while the lock is held: so a half-made file was left by a process that is gone."""
        for half in self._paths("half*"):
            half.unlink(missing_ok=True)
        left, free = self._room()
        for file in sorted(self.files(), key=lambda file: file.used):
            if size <= left and size <= free:
                break
            if remove_unused(file.path):
                left, free = left + file.size, free + file.size
        if size > left:
            raise StoreFull(
                f"A piece of {gigabytes(size)} is to be made, and the store of layers has {gigabytes(max(0, left))}"
                " left under its limit.",
                "Raise the limit (of a worker: --store GB), or remove what is not in use: edgellm mesh layers clean",
            )
        half = path.with_suffix(".half")
        try:
            make(half)
            with half.open("rb") as written:  # its weights are never checked against the model's again
                os.fsync(written.fileno())
            half.chmod(0o600)
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)


def _model_of(path: Path, folder: Path) -> str:
    return path.relative_to(folder).parts[0]


def layers_of(file: Stored) -> range:
    """Return the layers of a made piece."""
    found = _NAME.fullmatch(file.path.name)
    return range(int(found[1]), int(found[2]) + 1) if found else range(0)
