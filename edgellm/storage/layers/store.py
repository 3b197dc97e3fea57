"""The layers of models that this device keeps for others: pieces named by their hash, within a limit, the least
recently used removed first.

pieces/SHA256.gguf                  a piece that is whole: its hash was right when it got that name
pieces/SHA256.SIZE[.OWNER].partial  what OWNER has sent of one, for which SIZE bytes are set aside
models/OWNER/DIGEST.json            a recipe, and its pieces that OWNER brought: `owners`
made/                               pieces that suit a stage, made from these or a whole model: `derived_pieces`
lock                                held by the process that makes room or removes

Models are known by the digest of their recipe, which fixes every byte of every piece. So it does not matter who brought
a piece: a request for layers by that digest gets exactly those bytes, or nothing.

made/FINGERPRINT/SOURCE/0003-0008.gguf   the layers 3 to 8 of a model, counted from 0, both included
made/lock                                held by the process that makes a piece

SOURCE is `whole` for a piece that was cut from the model's own file, and the digest of the recipe for a piece that was
joined from pieces that were brought: layers from another device are never taken for this device's own.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from edgellm.errors import DiskFull, InvalidOption, LayersMissing, LayersRefused, StoreBusy, StoreFull
from edgellm.layer_range import LayerRange
from edgellm.places import cache_dir
from edgellm.storage.layers.incoming_piece import Partial, told
from edgellm.storage.layers.manifest import LayerPiece, Recipe, cut_piece, is_hash, recipe_of
from edgellm.storage.layers.owners import OWN, Owners
from edgellm.storage.state import private_folder

try:
    import fcntl
except ImportError:  # Windows, where an open file cannot be removed anyway
    fcntl = None  # type: ignore[assignment]


@contextmanager
def kept_in_use(path: Path) -> Iterator[bool]:
    """Keep `remove_unused` from removing the file until the `with` ends; yield False where there is no such file."""
    try:
        file = path.open("rb")
    except OSError:
        yield False
        return
    with file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_SH)
        there = False
        with suppress(OSError):  # it may have been removed in between
            there = os.path.samestat(path.stat(), os.fstat(file.fileno()))
        yield there


def in_use(path: Path) -> bool:
    """Return whether the file is in use just now."""
    return not _unused(path, lambda: None)


def remove_unused(path: Path) -> bool:
    """Remove the file unless it is in use; return whether it is gone."""
    return _unused(path, lambda: path.unlink(missing_ok=True))


def _unused(path: Path, act: Callable[[], None]) -> bool:
    try:
        with path.open("rb") as file:
            if fcntl is None:
                file.close()
            else:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            act()
    except FileNotFoundError:
        return True
    except OSError:  # in use, or not ours to remove
        return False
    return True


_NAME = re.compile(r"(?P<sha256>[0-9a-f]{64})\.(?:gguf|(?P<size>\d{1,19})\.(?:(?P<owner>[0-9a-f]{64})\.)?partial)")


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of a store: `size` is what it takes, or will take when it is whole; `there` is what it takes now.

    A file that was made here (`derived_pieces`) is known by its path, and has no `sha256`. An arriving file has an
    `owner`, who brings it.
    """

    path: Path
    sha256: str
    size: int
    there: int
    used: float
    owner: str = ""

    @property
    def whole(self) -> bool:
        return self.path.suffix == ".gguf"

    @property
    def made(self) -> bool:
        """Whether the file was made here, and so can be made again."""
        return not self.sha256


def stored(folder: Path) -> list[Stored]:
    """Return every piece in a folder, whole or arriving; other files are ignored."""
    found = []
    for path in sorted(folder.glob("*")):
        name = _NAME.fullmatch(path.name)
        with suppress(OSError):
            if name is not None:
                stat = path.stat()
                size = int(name["size"]) if name["size"] else stat.st_size
                owner = "" if not name["size"] else name["owner"] or OWN
                found.append(Stored(path, name["sha256"], size, stat.st_size, stat.st_mtime, owner))
    return found


def partial_name(piece: LayerPiece, owner: str) -> str:
    """Return the name of the file in which a piece arrives from `owner`: each owner has its own."""
    return f"{piece.sha256}.{piece.size}{'' if owner == OWN else f'.{owner}'}.partial"


def to_go(
    files: Sequence[Stored], limit: int, free: int, wanted: Sequence[LayerPiece], missing: Sequence[LayerPiece],
    model: str, owner: str = OWN, others: Collection[Path] = (),
) -> list[Stored]:  # fmt: skip
    """Return the files to remove so that `wanted`, which `owner` brings, fits; `missing` are those of them that are not
    there or not whole. Files that were made here go first, then the least recently used.

    Files that are wanted, in use or among the `others` never go. `limit` is the store's, and `free` the disk's free
    space, both in bytes.

    Raises:
        StoreFull: removing all that may go would not be enough for the limit.
        DiskFull: removing all that may go would not be enough for the disk.
    """
    asked = sum(piece.size for piece in wanted)
    if asked > limit:
        raise StoreFull(
            f"{len(wanted)} pieces of {model} take {gigabytes(asked)}, and the store's limit is {gigabytes(limit)}.",
            "Raise the limit there, or plan fewer layers for this device.",
        )
    keep = {piece.sha256 for piece in wanted}
    arrived = {file.sha256: file.there for file in files if not file.whole and file.owner == owner}
    over = sum(file.size for file in files) + sum(p.size for p in missing if p.sha256 not in arrived) - limit
    short = sum(piece.size - arrived.get(piece.sha256, 0) for piece in missing) - free
    going = []
    may_go = (one for one in files if one.sha256 not in keep and one.path not in others)
    for file in sorted(may_go, key=lambda one: (not one.made, one.used)):
        if max(over, short) <= 0:
            break
        if not (file.whole and in_use(file.path)):
            going.append(file)
            over, short = over - file.size, short - file.there
    if over > 0:
        raise StoreFull(
            f"{gigabytes(over)} are missing to the limit of {gigabytes(limit)}: what else is there is in use, or"
            " was brought by others.",
            "Raise the limit there, stop what uses other layers, or remove some: edgellm mesh layers clean --on here",
        )
    if short > 0:
        raise DiskFull(
            f"The disk is too full for {len(missing)} pieces of {model}: {gigabytes(short)} are missing.",
            "Make room there; what has arrived is kept.",
        )
    return going


def gigabytes(size: int) -> str:
    """Return a size in bytes as a text for people."""
    return f"{size / 1e9:.2f} GB"


ENOUGH = 32 * 2**20  # bytes: for such a piece, the cost of a block of its own is small beside its computing
WHOLE = "whole"
_DERIVED_NAME = re.compile(r"(\d{4,9})-(\d{4,9})\.gguf")


def together(layer: int, last: int, size: float) -> int:
    """Return the last layer, at most `last`, of a piece that begins with `layer`, where a layer takes `size` bytes.

    A piece has about ENOUGH bytes, because every block costs a sixth of a millisecond per pass
    (`bench.mesh.pass_cost`). All pieces of a model end at multiples of the same number of layers, so that another plan
    finds most of them made. But towards `last` they get smaller: the layers that a stage loads last are computed when
    nothing is left to load.
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
                if is_hash(_model_of(path, self._folder)) and _DERIVED_NAME.fullmatch(path.name):
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
    found = _DERIVED_NAME.fullmatch(file.path.name)
    return range(int(found[1]), int(found[2]) + 1) if found else range(0)


__all__ = [
    "OWN",
    "LayerPiece",
    "LayerStore",
    "Partial",
    "Receiving",
    "Recipe",
    "Removed",
    "StoredParts",
    "cut_layers",
    "default_limit",
]  # fmt: skip

UNUSED_SECONDS = 30 * 86_400.0  # layers unused for longer than this make room for those of another device
_PATIENCE = 10.0  # seconds to wait for another process that makes room
SPARE = 256 * 2**20  # bytes of the disk that are left free in any case


@dataclass(frozen=True, slots=True)
class StoredParts:
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

    def models(self, owner: str | None = None) -> list[StoredParts]:
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
                found.append(StoredParts(recipe, whole, arriving, max(file.used for file in here)))
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
