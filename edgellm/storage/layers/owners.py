"""The owners of the pieces in a store of layers: no device removes or replaces pieces that another one brought.

OWNER/DIGEST.json      the recipe with this digest, and the pieces of it that OWNER brought, or is bringing
OWNER/lock             held while OWNER brings or removes

OWNER is a device ID in hex, or `here` for this device itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from edgellm.errors import StoreBusy, StoreFull, TrustUnusable
from edgellm.storage.layers.incoming_piece import told
from edgellm.storage.layers.manifest import Recipe
from edgellm.storage.private_files import read_private, write_private
from edgellm.storage.state import MALFORMED, private_folder

OWN = "here"
RECIPES_MOST = 64  # of one device
_OWNER = re.compile(r"[0-9a-f]{64}|here")


@dataclass(frozen=True, slots=True)
class Brought:
    """The pieces of one recipe that one device brought, by their SHA-256. `path` is the file of this record."""

    owner: str
    recipe: Recipe
    pieces: frozenset[str]
    path: Path


class Owners:
    """The records in `folder`. To change them, hold the lock of the store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[Brought]:
        """Return every record, except damaged ones: their pieces then have no owner."""
        found = []
        for path in sorted(self._folder.glob("*/*.json")):
            owner = path.parent.name
            with suppress(OSError, *MALFORMED):
                data = read_private(path)
                said = json.loads(data or b"")
                recipe = Recipe.from_json(said["recipe"])
                pieces = frozenset(map(str, said["pieces"])) & {piece.sha256 for piece in recipe.pieces}
                if _OWNER.fullmatch(owner) and recipe.digest == path.stem:
                    found.append(Brought(owner, recipe, pieces, path))
        return found

    def add(self, owner: str, recipe: Recipe, pieces: Collection[str], there: Collection[str]) -> None:
        """Note that `owner` brings these pieces, besides those that it brought before and that are still `there`.

        Raises:
            StoreFull: it has brought pieces of RECIPES_MOST other recipes.
        """
        path, before, others = self._folder / owner / f"{recipe.digest}.json", frozenset[str](), 0
        for one in self.all():
            if one.path == path:
                before = one.pieces & frozenset(there)
            elif one.owner == owner:
                self.keep(one, there)
                others += not one.pieces.isdisjoint(there)
        if others >= RECIPES_MOST:
            raise StoreFull(f"One device has brought layers of {others} models.", "Remove some there.")
        private_folder(path.parent)
        self._write(path, recipe, before | frozenset(pieces))

    def keep(self, brought: Brought, pieces: Collection[str]) -> None:
        """Note that of the pieces that were `brought` only these are left to their owner."""
        left = brought.pieces & frozenset(pieces)
        if not left:
            brought.path.unlink(missing_ok=True)
        elif left != brought.pieces:
            self._write(brought.path, brought.recipe, left)

    def tidy(self) -> None:
        """Remove records that cannot be read, or that an earlier version left."""
        good = {one.path for one in self.all()}
        for path in (*self._folder.glob("*.json"), *self._folder.glob("*/*.json")):
            if path not in good:
                path.unlink(missing_ok=True)

    @contextmanager
    def one_at_a_time(self, owner: str | None) -> Iterator[None]:
        """Keep other processes from bringing or removing pieces for `owner`; without one, for any owner.

        Raises:
            StoreBusy: another process does so already.
        """
        locks: list[FileLock] = []
        try:
            with told(self._folder):
                names = [owner] if owner is not None else [path.name for path in sorted(self._folder.glob("*"))]
                for name in filter(_OWNER.fullmatch, names):
                    private_folder(self._folder / name)
                    locks.append(FileLock(self._folder / name / "lock", timeout=0, mode=0o600, thread_local=False))
                    self._acquire(locks[-1])
            yield
        finally:
            for lock in locks:
                lock.release()

    def _acquire(self, lock: FileLock) -> None:
        try:
            lock.acquire()
        except Timeout:
            raise StoreBusy(f"The store in {self._folder.parent} is being changed already.", _LATER) from None

    @staticmethod
    def _write(path: Path, recipe: Recipe, pieces: frozenset[str]) -> None:
        said = {"recipe": recipe.to_json(), "pieces": sorted(pieces)}
        try:
            write_private(path, json.dumps(said).encode())
        except TrustUnusable as error:  # its words are about identities
            raise error.__cause__ if isinstance(error.__cause__, OSError) else error from None


_LATER = "Try again later."
