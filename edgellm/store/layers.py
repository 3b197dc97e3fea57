"""The layers of models that this device keeps for others: pieces by their hash, bounded, the least used going first.

pieces/SHA256.gguf             a piece that is whole: its hash was right when it got that name
pieces/SHA256.SIZE.partial     what has arrived of one, for which SIZE bytes are set aside
models/FINGERPRINT.json        the recipe of a model of which there is, or was, a piece
made/                          pieces that suit a stage, made from these or from a whole model: `edgellm.store.made`
lock                           held by whoever receives or removes
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from edgellm.errors import InvalidOption, LayersMissing, LayersRefused, StoreBusy
from edgellm.store.in_use import kept_in_use, remove_unused
from edgellm.store.made import MadePieces
from edgellm.store.partial import Partial, told
from edgellm.store.places import cache_dir
from edgellm.store.recipe import Piece, Recipe, cut_piece, recipe_of
from edgellm.store.room import Stored, stored, to_go

__all__ = ["Held", "LayerStore", "Partial", "Piece", "Receiving", "Recipe", "Removed", "cut_layers", "default_limit"]

SPARE = 256 * 2**20  # bytes of the disk that are left free in any case


@dataclass(frozen=True, slots=True)
class Held:
    """What there is of a model: pieces that are whole, and the bytes of one that is not, by its hash.

    `used` is when a piece of it was last used or received, in seconds since 1970.
    """

    recipe: Recipe
    pieces: tuple[Piece, ...]
    arriving: dict[str, int]
    used: float

    @property
    def layers(self) -> list[int]:
        """Those that are whole, counted from 0."""
        return [layer for piece in self.pieces for layer in range(piece.first, piece.last + 1)]

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces) + sum(self.arriving.values())


@dataclass(frozen=True, slots=True)
class Removed:
    """How many pieces, whole or not, went, their bytes, and how many stayed because they are in use."""

    pieces: int
    size: int
    in_use: int


class LayerStore:
    """The store in `root`, which need not exist yet, of at most `limit` bytes. Any number of processes may use it."""

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        """Without a `root` the user's own; without a `limit`, `default_limit`.

        Raises:
            InvalidOption: a limit that is not positive.
        """
        self.root = root or cache_dir() / "layers"
        self.limit = default_limit(self.root) if limit is None else limit
        if self.limit <= 0:
            raise InvalidOption(f"The limit of a store of layers is {self.limit} bytes.", "Give some gigabytes.")
        self._pieces, self._models = self.root / "pieces", self.root / "models"
        self.made = MadePieces(self.root / "made", lambda: (self.limit - self.size, self.free()))

    @property
    def size(self) -> int:
        """Bytes of all pieces, brought and made; of those that are arriving, what is set aside for them."""
        return sum(file.size for file in (*self._files(), *self.made.files()))

    def find(self, piece: Piece) -> Path | None:
        """The file of a piece; None where it is not here, or not whole."""
        path = self._whole(piece.sha256)
        try:
            return path if path.stat().st_size == piece.size else None
        except OSError:
            return None

    def arrived(self, piece: Piece) -> int:
        """How many bytes of a piece are here."""
        if self.find(piece) is not None:
            return piece.size
        with suppress(OSError):
            return min(piece.size, self._partial(piece).stat().st_size)
        return 0

    @contextmanager
    def using(self, pieces: Iterable[Piece]) -> Iterator[list[Path]]:
        """The files of these pieces, which nobody removes before the `with` ends.

        Raises:
            LayersMissing: one is not here, or not whole.
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

    def models(self) -> list[Held]:
        """What there is of each model, the last used first. A recipe that is damaged is passed over."""
        files = {file.sha256: file for file in self._files()}
        found = []
        for path in sorted(self._models.glob("*.json")):
            with suppress(OSError, ValueError, LayersRefused):
                recipe = Recipe.from_json(json.loads(path.read_text(encoding="utf-8")))
                here = [piece for piece in recipe.pieces if piece.sha256 in files]
                arriving = {piece.sha256: self.arrived(piece) for piece in here if not files[piece.sha256].whole}
                whole = tuple(piece for piece in here if self.find(piece) is not None)
                if here:
                    found.append(Held(recipe, whole, arriving, max(files[piece.sha256].used for piece in here)))
        return sorted(found, key=lambda held: held.used, reverse=True)

    def recipe(self, fingerprint: str) -> Recipe:
        """The recipe of a model of which there is a piece.

        Raises:
            LayersMissing: there is none.
        """
        for held in self.models():
            if held.recipe.fingerprint == fingerprint:
                return held.recipe
        raise LayersMissing(f"No layer of the model {fingerprint[:16]} is on this device.", _DEPLOY)

    def _knows(self, fingerprint: str) -> bool:
        return any(held.recipe.fingerprint == fingerprint for held in self.models())

    @contextmanager
    def receiving(self, recipe: Recipe, pieces: Sequence[Piece]) -> Iterator[Receiving]:
        """Makes room for all of `pieces`, which are of `recipe`, and takes them; nobody else does until it ends.

        What is not used for longest goes first, never what is in use or asked for. Nothing goes if that is not enough.

        Raises:
            StoreFull: they would not fit the limit.
            StoreBusy: somebody else is sending.
            LayersRefused: they are not of the recipe.
            DiskFull: the disk is too full for them.
        """
        if strange := set(pieces) - set(recipe.pieces):
            raise LayersRefused(f"{min(strange, key=lambda piece: piece.first)} is not in the recipe.", _SAME)
        with self._locked():
            self._prepare(recipe, pieces)
            yield Receiving(self, frozenset(pieces))

    def _prepare(self, recipe: Recipe, pieces: Sequence[Piece]) -> None:
        with told(self.root):
            missing = [piece for piece in pieces if self.find(piece) is None]
            files = (*self._files(), *self.made.files())
            for file in to_go(files, self.limit, self.free(), pieces, missing, recipe.name):
                remove_unused(file.path)
            self._models.mkdir(parents=True, exist_ok=True)
            _write(self._models / f"{recipe.fingerprint}.json", json.dumps(recipe.to_json()))
            for piece in missing:
                self._whole(piece.sha256).unlink(missing_ok=True)  # of another length: cut by a crash of the system
                self._partial(piece).touch()
            with suppress(OSError):
                for piece in pieces:
                    os.utime(self._whole(piece.sha256))

    def clean(self, fingerprint: str | None = None) -> Removed:
        """Removes everything that is not in use; with a `fingerprint`, of that model alone.

        Raises:
            StoreBusy: somebody is sending layers.
            LayersMissing: there is no such model.
        """
        with self._locked():
            files, made = self._files(), self.made.files()
            if fingerprint is not None:
                made = [file for file in made if file.path.parent.name == fingerprint]
                mine = set() if made and not self._knows(fingerprint) else {
                    piece.sha256 for piece in self.recipe(fingerprint).pieces
                }  # fmt: skip
                files = [file for file in files if file.sha256 in mine]
            files += made
            gone = [file for file in files if remove_unused(file.path)]
            left = {file.sha256 for file in self._files()}
            for path in self._models.glob("*.json"):
                with suppress(OSError, ValueError, LayersRefused):
                    recipe = Recipe.from_json(json.loads(path.read_text(encoding="utf-8")))
                    if left & {piece.sha256 for piece in recipe.pieces}:
                        continue
                path.unlink(missing_ok=True)
        return Removed(len(gone), sum(file.size for file in gone), len(files) - len(gone))

    def free(self) -> int:
        """Bytes that are free on the store's disk, less what is left free in any case."""
        return max(0, shutil.disk_usage(_existing(self.root)).free - SPARE)

    def _files(self) -> list[Stored]:
        return stored(self._pieces)

    def _whole(self, sha256: str) -> Path:
        return self._pieces / f"{sha256}.gguf"

    def _partial(self, piece: Piece) -> Path:
        return self._pieces / f"{piece.sha256}.{piece.size}.partial"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = FileLock(self.root / "lock", timeout=0, thread_local=False)
        with told(self.root):
            self._pieces.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire()
            except Timeout:
                raise StoreBusy(f"The store in {self.root} is being changed already.", "Try again later.") from None
        try:
            yield
        finally:
            lock.release()


class Receiving:
    """Takes pieces for which there is room. Made by `LayerStore.receiving`."""

    def __init__(self, store: LayerStore, pieces: frozenset[Piece]) -> None:
        self._store, self._announced = store, pieces

    @contextmanager
    def piece(self, piece: Piece) -> Iterator[Partial]:
        """What has arrived of a piece, to be gone on with; hashing that takes a second a gigabyte.

        Raises:
            LayersRefused: it was not announced.
        """
        if piece not in self._announced:
            raise LayersRefused(f"{str(piece).capitalize()} was not announced.", _SAME)
        partial = Partial(self._store._partial(piece), self._store._whole(piece.sha256), piece)  # noqa: SLF001
        try:
            yield partial
        finally:
            partial.close()


def cut_layers(
    model: Path,
    into: LayerStore,
    progress: Callable[[float], None] | None = None,
    layers: tuple[int, int] | None = None,
) -> Recipe:
    """Cuts a model that is on this device into a store of this device; `progress` hears shares from 0 to 1.

    `layers` are the first and the last one wanted, counted from 0, both included; without it, all. What is there is
    not cut again.

    Raises:
        ModelNotFound, ModelCorrupt, ModelUnsupported: as for `edgellm.engine.cut`.
        InvalidOption: the model has no such layers.
        LayersRefused, DiskFull: there is no room.
    """
    recipe = recipe_of(model)
    pieces = recipe.pieces if layers is None else recipe.covering(*layers)
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
    """Half of what is free on the disk, beside what the store has already."""
    held = sum(path.stat().st_size for part in ("pieces/*", "made/*/*") for path in root.glob(part))
    return max(2**30, (shutil.disk_usage(_existing(root)).free + held) // 2)


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


def _write(path: Path, text: str) -> None:
    beside = path.with_name(path.name + ".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


_DEPLOY = "Bring them here: edgellm mesh deploy"
_SAME = "Run the same version of edgellm on both sides."
