"""The layers of models that this device keeps for others: pieces named by their hash, within a limit, the least
recently used removed first.

pieces/SHA256.gguf                  a piece that is whole: its hash was right when it got that name
pieces/SHA256.SIZE[.OWNER].partial  what OWNER has sent of one, for which SIZE bytes are set aside
models/OWNER/DIGEST.json            a recipe, and its pieces that OWNER brought: `owners`
made/                               pieces that suit a stage, made from these or a whole model: `derived_pieces`
lock                                held by the process that makes room or removes

Models are known by the digest of their recipe, which fixes every byte of every piece. So it does not matter who brought
a piece: a request for layers by that digest gets exactly those bytes, or nothing.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from edgellm.errors import InvalidOption, LayersMissing, LayersRefused, StoreBusy
from edgellm.layer_range import LayerRange
from edgellm.places import cache_dir
from edgellm.storage.layers.derived_pieces import MadePieces
from edgellm.storage.layers.eviction import Stored, partial_name, stored, to_go
from edgellm.storage.layers.file_lease import kept_in_use, remove_unused
from edgellm.storage.layers.incoming_piece import Partial, told
from edgellm.storage.layers.manifest import LayerPiece, Recipe, cut_piece, recipe_of
from edgellm.storage.layers.owners import OWN, Owners
from edgellm.storage.state import private_folder

__all__ = [
    "OWN", "Held", "LayerPiece", "LayerStore", "Partial", "Receiving", "Recipe", "Removed", "cut_layers",
    "default_limit",
]  # fmt: skip

UNUSED_SECONDS = 30 * 86_400.0  # layers unused for longer than this make room for those of another device
_PATIENCE = 10.0  # seconds to wait for another process that makes room
SPARE = 256 * 2**20  # bytes of the disk that are left free in any case


@dataclass(frozen=True, slots=True)
class Held:
    """The stored part of a model: the whole pieces, and the bytes here of each arriving piece, by its hash.

    `used` is when a piece of it was last used or received, in seconds since 1970.
    """

    recipe: Recipe
    pieces: tuple[LayerPiece, ...]
    arriving: dict[str, int]
    used: float

    @property
    def layers(self) -> list[int]:
        """The layers of whole pieces, counted from 0."""
        return [layer for piece in self.pieces for layer in piece.layers]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces) + sum(self.arriving.values())


@dataclass(frozen=True, slots=True)
class Removed:
    """The number of pieces removed, whole or not, their bytes, and the number that stayed because they are in use."""

    pieces: int
    size: int
    in_use: int


class LayerStore:
    """The store in `root`, which need not exist yet, of at most `limit` bytes. Any number of processes may use it."""

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        """Set up the store in `root` (default: the user's own) with `limit` (default: `default_limit`).

        Raises:
            InvalidOption: a limit that is not positive.
        """
        self.root = root or cache_dir() / "layers"
        self.limit = default_limit(self.root) if limit is None else limit
        if self.limit <= 0:
            raise InvalidOption(f"The limit of a store of layers is {self.limit} bytes.", "Give some gigabytes.")
        self._pieces, self._models = self.root / "pieces", self.root / "models"
        self._owners = Owners(self._models)
        self.made = MadePieces(self.root / "made", lambda: (self.limit - self.size, self.free()))

    @property
    def size(self) -> int:
        """Bytes of all pieces, brought and made; an arriving piece counts with the bytes set aside for it."""
        return sum(file.size for file in (*self._files(), *self.made.files()))

    def find(self, piece: LayerPiece) -> Path | None:
        """Return the file of a piece; None where it is not here, or not whole."""
        path = self._whole(piece.sha256)
        try:
            return path if path.stat().st_size == piece.size else None
        except OSError:
            return None

    def arrived(self, piece: LayerPiece, owner: str = OWN) -> int:
        """Return how many bytes of a piece are here: all of them, or those that `owner` has sent."""
        if self.find(piece) is not None:
            return piece.size
        with suppress(OSError):
            return min(piece.size, self._partial(piece, owner).stat().st_size)
        return 0

    @contextmanager
    def using(self, pieces: Iterable[LayerPiece]) -> Iterator[list[Path]]:
        """Yield the files of these pieces, and keep them from being removed until the `with` ends.

        Raises:
            LayersMissing: a piece is not here, or not whole.
        """
        with ExitStack() as held:
            paths = []
            for piece in pieces:
                path = self._whole(piece.sha256)
                if self.find(piece) is None or not held.enter_context(kept_in_use(path)):
                    raise LayersMissing(f"{str(piece).capitalize()} is not on this device.", _DEPLOY)
                with suppress(OSError):
                    os.utime(path)
                paths.append(path)
            yield paths

    def models(self, owner: str | None = None) -> list[Held]:
        """Return what is stored of each recipe, the most recently used first; with an `owner`, only what it brought.

        Damaged records are skipped.
        """
        files, found = self._files(), []
        wanted: dict[str, tuple[Recipe, frozenset[str]]] = {}
        for one in self._owners.all():
            if owner in (None, one.owner):
                _, before = wanted.get(one.recipe.digest, (one.recipe, frozenset[str]()))
                wanted[one.recipe.digest] = one.recipe, before | one.pieces
        for recipe, pieces in wanted.values():
            here = [file for file in files if file.sha256 in pieces and owner in (None, file.owner or owner)]
            whole = tuple(piece for piece in recipe.pieces if piece.sha256 in pieces and self.find(piece) is not None)
            done = {piece.sha256 for piece in whole}
            arriving = {file.sha256: file.there for file in here if not file.whole and file.sha256 not in done}
            if here:
                found.append(Held(recipe, whole, arriving, max(file.used for file in here)))
        return sorted(found, key=lambda held: held.used, reverse=True)

    def recipe(self, digest: str) -> Recipe:
        """Return the recipe with this digest, if at least one of its pieces is here.

        Raises:
            LayersMissing: there is none.
        """
        for held in self.models():
            if held.recipe.digest == digest:
                return held.recipe
        raise LayersMissing(f"No layer of the recipe {digest[:16]} is on this device.", _DEPLOY)

    def recipes(self, fingerprint: str) -> list[Recipe]:
        """Return the recipes, usually one, of the model file with this fingerprint that have pieces here."""
        return [held.recipe for held in self.models() if held.recipe.fingerprint == fingerprint]

    @contextmanager
    def receiving(self, recipe: Recipe, pieces: Sequence[LayerPiece], owner: str = OWN) -> Iterator[Receiving]:
        """Make room for all of `pieces` of `recipe`, and yield an object that takes them in from `owner`.

        No other process can send for the same owner until the `with` ends.

        The least recently used files are removed first, but never those in use or asked for, nor those that another
        device brought and that were used within UNUSED_SECONDS. If that would not free enough, nothing is removed.

        Raises:
            StoreFull: the pieces would not fit the limit.
            StoreBusy: another sender is at work for the same owner.
            LayersRefused: the pieces are not of the recipe.
            DiskFull: the disk is too full for the pieces.
        """
        if strange := set(pieces) - set(recipe.pieces):
            raise LayersRefused(f"{min(strange, key=lambda piece: piece.first)} is not in the recipe.", _SAME)
        with self._alone(owner):
            with self._locked():
                self._prepare(recipe, pieces, owner)
            yield Receiving(self, frozenset(pieces), owner)

    def _prepare(self, recipe: Recipe, pieces: Sequence[LayerPiece], owner: str) -> None:
        with told(self.root):
            missing = [piece for piece in pieces if self.find(piece) is None]
            files = (*self._files(), *self.made.files())
            others = self._of_others(files, owner)
            for file in to_go(files, self.limit, self.free(), pieces, missing, recipe.name, owner, others):
                remove_unused(file.path)
            there = {file.sha256 for file in self._files()}
            self._owners.add(owner, recipe, [piece.sha256 for piece in pieces], there)
            for piece in pieces:
                if piece in missing:
                    self._whole(piece.sha256).unlink(missing_ok=True)  # of another length: cut by a crash of the system
                    self._partial(piece, owner).touch(mode=0o600)
                else:
                    self._partial(piece, owner).unlink(missing_ok=True)
                    with suppress(OSError):
                        os.utime(self._whole(piece.sha256))

    def _of_others(self, files: Iterable[Stored], owner: str) -> frozenset[Path]:
        """Return the recently used files that an owner other than `owner` brought, or is bringing."""
        theirs = {sha256 for one in self._owners.all() if one.owner != owner for sha256 in one.pieces}
        late = time.time() - UNUSED_SECONDS
        return frozenset(
            file.path
            for file in files
            if not file.made and file.used > late and (file.owner != owner if file.owner else file.sha256 in theirs)
        )

    def clean(self, fingerprint: str | None = None, owner: str | None = None) -> Removed:
        """Remove everything that is not in use.

        With a `fingerprint`, remove only that model file's pieces; with an `owner`, only what this owner alone brought.

        Raises:
            StoreBusy: layers are being sent, by `owner` if it is given.
            LayersMissing: there is no such model.
        """
        with self._alone(owner), self._locked():
            every = self._owners.all()
            mine = [
                one for one in every
                if owner in (None, one.owner) and fingerprint in (None, one.recipe.fingerprint)
            ]  # fmt: skip
            named = {sha256 for one in mine for sha256 in one.pieces}
            shared = {sha256 for one in every if one not in mine for sha256 in one.pieces}
            files = [
                file for file in self._files()
                if (file.sha256 in named - shared or (fingerprint is None and owner is None)
                    or (file.sha256 in named and file.owner and owner in (None, file.owner)))
            ]  # fmt: skip
            made = self._made_of([one.recipe for one in mine], [one.recipe for one in every if one not in mine])
            if owner is None:
                made = self.made.files() if fingerprint is None else self.made.of(fingerprint)
            if fingerprint is not None and not mine and not made:
                raise LayersMissing(f"No layer of the model {fingerprint[:16]} is on this device.", _DEPLOY)
            files += made
            gone = [file for file in files if remove_unused(file.path)]
            left = {file.sha256 for file in self._files()} - (shared if owner is not None else set())
            for one in mine:
                self._owners.keep(one, left)
            if owner is None:
                self._owners.tidy()
        return Removed(len(gone), sum(file.size for file in gone), len(files) - len(gone))

    def _made_of(self, recipes: Sequence[Recipe], others: Sequence[Recipe]) -> list[Stored]:
        """Return the files that were joined from pieces of these recipes, except recipes that are in `others` too."""
        kept = {recipe.digest for recipe in others}
        return [
            file for recipe in recipes if recipe.digest not in kept
            for file in self.made.of(recipe.fingerprint, recipe.digest)
        ]  # fmt: skip

    def free(self) -> int:
        """Return the free bytes of the store's disk, less SPARE."""
        return max(0, shutil.disk_usage(_existing(self.root)).free - SPARE)

    def _files(self) -> list[Stored]:
        return stored(self._pieces)

    def _whole(self, sha256: str) -> Path:
        return self._pieces / f"{sha256}.gguf"

    def _partial(self, piece: LayerPiece, owner: str) -> Path:
        return self._pieces / partial_name(piece, owner)

    @contextmanager
    def _alone(self, owner: str | None) -> Iterator[None]:
        with told(self.root):
            for folder in (self.root, self._pieces, self._models, self.root / "made"):
                private_folder(folder)
        with self._owners.one_at_a_time(owner):
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.root / "lock", timeout=_PATIENCE, mode=0o600, thread_local=False)
        with told(self.root):
            try:
                lock.acquire(poll_interval=0.01)
            except Timeout:
                raise StoreBusy(f"The store in {self.root} is being changed already.", "Try again later.") from None
        try:
            yield
        finally:
            lock.release()


class Receiving:
    """Takes in pieces for which room has been made. Made by `LayerStore.receiving`."""

    def __init__(self, store: LayerStore, pieces: frozenset[LayerPiece], owner: str) -> None:
        self._store, self._announced, self._owner = store, pieces, owner

    @contextmanager
    def piece(self, piece: LayerPiece) -> Iterator[Partial]:
        """Yield the part of a piece that has arrived, to be continued; hashing it takes a second per gigabyte.

        Raises:
            LayersRefused: the piece was not announced.
        """
        if piece not in self._announced:
            raise LayersRefused(f"{str(piece).capitalize()} was not announced.", _SAME)
        arriving = self._store._partial(piece, self._owner)  # noqa: SLF001
        partial = Partial(arriving, self._store._whole(piece.sha256), piece)  # noqa: SLF001
        try:
            yield partial
        finally:
            partial.close()


def cut_layers(
    model: Path,
    into: LayerStore,
    progress: Callable[[float], None] | None = None,
    layers: LayerRange | None = None,
) -> Recipe:
    """Cut a model that is on this device into a store of this device; `progress` is called with shares from 0 to 1.

    `layers` selects the layers to cut (default: all). Pieces that are there already are not cut again.

    Raises:
        ModelNotFound, ModelCorrupt, ModelUnsupported: as for `edgellm.engine.cut`.
        InvalidOption: the model has no such layers.
        LayersRefused, DiskFull: there is no room.
    """
    recipe = recipe_of(model)
    pieces = recipe.pieces if layers is None else recipe.covering(layers)
    total, done = sum(piece.size for piece in pieces), 0
    with into.receiving(recipe, pieces) as receiving:
        for piece in pieces:
            if into.find(piece) is None:
                with receiving.piece(piece) as partial:
                    partial.restart()
                    for portion in cut_piece(model, recipe.layers, piece.first, piece.last):
                        partial.append(portion)
                        if progress is not None:
                            progress((done + partial.size) / total)
                    partial.finish()
            done += piece.size
            if progress is not None:
                progress(done / total)
    return recipe


def default_limit(root: Path) -> int:
    """Return half of the disk's free bytes and the store's own together, but at least 1 GiB."""
    parts = ("pieces/*", "made/*/*.gguf", "made/*/*/*.gguf")
    held = sum(path.stat().st_size for part in parts for path in root.glob(part))
    return max(2**30, (shutil.disk_usage(_existing(root)).free + held) // 2)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


_DEPLOY = "Bring them here: edgellm mesh deploy"
_SAME = "Run the same version of edgellm on both sides."
