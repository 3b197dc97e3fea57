"""The store of layers on this device: pieces named by their hash, within a size limit, least recently used evicted
first.

pieces/SHA256.gguf                  a complete piece: its hash was right when it got that name
pieces/SHA256.SIZE[.OWNER].partial  the part of a piece that OWNER has sent, for which SIZE bytes are reserved
models/OWNER/FINGERPRINT.json       the pieces of a model that OWNER uploaded: `owners`
lock                                held by the process that evicts or removes

A request names pieces by their hashes. So a request gets exactly the bytes it names, or none, whichever device uploaded
them.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edgellm import system
from edgellm.engine import ModelFile
from edgellm.errors import SAME_VERSION, DiskFull, InvalidOption, LayersMissing, LayersRefused, StoreBusy, StoreFull
from edgellm.layer_range import LayerRange
from edgellm.places import cache_dir
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.layers.incoming_piece import (
    PieceReceiver,
    hold_in_use,
    mark_used,
    remove_unused,
    storage_errors,
    try_early,
)
from edgellm.storage.layers.manifest import (
    LayerPiece,
    Manifest,
    Progress,
    cut_piece,
    describe_pieces,
    known_pieces,
    remember_hashes,
)
from edgellm.storage.layers.owners import CUT, OWN, Owners
from edgellm.storage.state import hold_lock, private_folder

UNUSED_SECONDS = 30 * 86_400.0  # layers unused for longer than this make room for those of another device
RESERVED_BYTES = 256 * 2**20  # bytes of the disk that are left free in any case
_WRITE = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | system.NO_LINKS | system.BINARY
_NAME = re.compile(r"(?P<sha256>[0-9a-f]{64})\.(?:gguf|(?P<size>\d{1,19})\.(?:(?P<owner>[0-9a-f]{64})\.)?partial)")


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A file of a store. `size`: its bytes when complete; `size_on_disk`: its bytes now. An arriving file has an
    `owner`, the device that uploads it."""

    path: Path
    sha256: str
    size: int
    size_on_disk: int
    used: float
    owner: str = ""

    @property
    def whole(self) -> bool:
        return self.path.suffix == ".gguf"


@dataclass(frozen=True, slots=True)
class StoredModelPieces:
    """The pieces of a model that `owner` uploaded: the complete ones, and the received bytes of each arriving one, by
    its hash.

    `used` is the last time at which a piece was used or received, in seconds since 1970.
    """

    owner: str
    manifest: Manifest
    pieces: tuple[LayerPiece, ...]
    arriving: dict[str, int]
    used: float

    @property
    def layers(self) -> frozenset[int]:
        """Return the layers of whole pieces, counted from 0."""
        return frozenset(layer for piece in self.pieces for layer in piece.layers)

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces) + sum(self.arriving.values())


@dataclass(frozen=True, slots=True)
class CleanResult:
    """The number of pieces removed, complete or not, their bytes, and the number of pieces that are in use."""

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
            raise InvalidOption(f"The limit of the layer store is {self.limit} bytes.", "Give some gigabytes.")
        self._pieces, self._models = self.root / "pieces", self.root / "models"
        self._owners = Owners(self._models)

    @property
    def size(self) -> int:
        """Return the bytes of all pieces; an arriving piece counts with its reserved bytes."""
        return sum(file.size for file in self._files())

    def find(self, piece: LayerPiece) -> Path | None:
        """Return the file of a piece; None if it is missing or incomplete."""
        path = self._whole(piece.sha256)
        try:
            return path if path.stat().st_size == piece.size else None
        except OSError:
            return None

    def complete(self, pieces: Iterable[LayerPiece]) -> list[LayerPiece]:
        """Return the complete pieces among these, the most recently used first."""
        found = []
        for piece in pieces:
            with suppress(OSError):
                stat = self._whole(piece.sha256).stat()
                if stat.st_size == piece.size:
                    found.append((stat.st_mtime, piece))
        return [piece for _, piece in sorted(found, reverse=True)]

    def arrived(self, piece: LayerPiece, owner: str = OWN) -> int:
        """Return the number of a piece's bytes in the store: all, or the bytes that `owner` has sent."""
        if self.find(piece) is not None:
            return piece.size
        with suppress(OSError):
            return min(piece.size, self._partial(piece, owner).stat().st_size)
        return 0

    @contextmanager
    def using(self, pieces: Iterable[LayerPiece]) -> Iterator[list[Path]]:
        """Yield the files of these pieces, and prevent their removal until the `with` ends.

        Raises:
            LayersMissing: a piece is missing or incomplete.
        """
        with ExitStack() as stack:
            paths = []
            for piece in pieces:
                path = self._whole(piece.sha256)
                if self.find(piece) is None or not stack.enter_context(hold_in_use(path)):
                    raise LayersMissing(f"{str(piece).capitalize()} is not on this device.", _DEPLOY)
                mark_used(path)
                paths.append(path)
            yield paths

    def models(self, owner: str | None = None) -> list[StoredModelPieces]:
        """Return each owner's pieces of each model, the most recently used first; with an `owner`, only its own.
        Damaged records are skipped."""
        files, found = self._files(), []
        for one in self._owners.all():
            if owner not in (None, one.owner):
                continue
            stored = [file for file in files if file.sha256 in one.pieces and file.owner in ("", one.owner)]
            whole = tuple(sorted(self.complete(one.manifest.pieces)))
            complete = {piece.sha256 for piece in whole}
            arriving = {
                file.sha256: file.size_on_disk for file in stored if not file.whole and file.sha256 not in complete
            }
            if stored:
                used = max(file.used for file in stored)
                found.append(StoredModelPieces(one.owner, one.manifest, whole, arriving, used))
        return sorted(found, key=lambda model: model.used, reverse=True)

    def pieces(self, fingerprint: str) -> set[LayerPiece]:
        """Return the complete pieces of the model with this fingerprint, of all owners."""
        of_model = (one.manifest for one in self._owners.all() if one.manifest.fingerprint == fingerprint)
        return set(self.complete(piece for manifest in of_model for piece in manifest.pieces))

    @contextmanager
    def receiving(self, manifest: Manifest, pieces: Sequence[LayerPiece], owner: str = OWN) -> Iterator[PieceReceiver]:
        """Make room for all of `pieces` of `manifest`, and yield an object that receives them from `owner`.

        No other process can upload for the same owner until the `with` ends.

        Pieces that were cut here are evicted first, then the least recently used, but never those in use or requested,
        nor pieces of another device that were used within UNUSED_SECONDS. If that would not free enough, nothing is
        removed.

        Raises:
            StoreFull: the pieces would not fit the limit.
            StoreBusy: another upload is running for the same owner.
            LayersRefused: the pieces are not in the manifest.
            DiskFull: the disk is too full for the pieces.
        """
        if unknown := set(pieces) - set(manifest.pieces):
            raise LayersRefused(f"{min(unknown)} is not in the manifest.", SAME_VERSION)
        with self._exclusive(owner):
            with self._locked():
                self._prepare(manifest, pieces, owner)
            yield PieceReceiver({one: (self._partial(one, owner), self._whole(one.sha256)) for one in pieces})

    def _prepare(self, manifest: Manifest, pieces: Sequence[LayerPiece], owner: str) -> None:
        missing = [piece for piece in pieces if self.find(piece) is None]
        begun = {file.sha256: file.size_on_disk for file in self._files() if not file.whole and file.owner == owner}
        requested = sum(piece.size for piece in pieces)
        what = f"{f'{len(pieces)} pieces' if len(pieces) > 1 else pieces[0]} of {manifest.name}"
        if requested > self.limit:
            raise StoreFull(
                f"{what} would take {gigabytes(requested)}, more than the store's limit of {gigabytes(self.limit)}.",
                "Raise the limit on that device, or plan fewer layers for it.",
            )
        self._make_room(
            sum(piece.size for piece in missing if piece.sha256 not in begun),
            sum(piece.size - begun.get(piece.sha256, 0) for piece in missing),
            what, owner, {piece.sha256 for piece in pieces},
        )  # fmt: skip
        self._owners.add(owner, manifest, pieces, {file.sha256 for file in self._files()})
        for piece in pieces:
            if piece in missing:
                self._whole(piece.sha256).unlink(missing_ok=True)  # a crash of the system cut the whole piece
                self._partial(piece, owner).touch(mode=0o600)
            else:
                self._partial(piece, owner).unlink(missing_ok=True)
                mark_used(self._whole(piece.sha256))

    def cut(self, model: ModelFile, layers: LayerRange, size: int) -> LayerPiece:
        """Return a piece of about `size` bytes, cut from a model file of this device. Wait while another process cuts.

        Such pieces are evicted first, as they can be cut again.

        Raises:
            ModelNotFound, ModelCorrupt, ModelUnsupported: as for `edgellm.engine.cut`.
            StoreFull, DiskFull, LayersRefused: there is no room.
        """
        digest, temporary = hashlib.sha256(), self._pieces / "cut.half"
        with self._exclusive(CUT):
            for known in known_pieces(fingerprint(model.path)):
                if known.layers == layers and self.find(known) is not None:  # another process was faster
                    return known
            with self._locked():
                self._make_room(size, size, f"{layers.named} of {model.path.name}", CUT)
            try:
                with storage_errors(self.root), os.fdopen(os.open(temporary, _WRITE, 0o600), "wb") as file:
                    for portion in cut_piece(model, layers):
                        file.write(portion)
                        digest.update(portion)
                    file.flush()
                    os.fsync(file.fileno())  # a whole piece is never checked against its hash again
                    piece = LayerPiece(layers.start, layers.last, file.tell(), digest.hexdigest())
                manifest = describe_pieces(model, [piece])
                with self._locked():
                    self._owners.add(CUT, manifest, [piece], {file.sha256 for file in self._files()})
                    mark_used(temporary)
                    temporary.replace(self._whole(piece.sha256))
            finally:
                temporary.unlink(missing_ok=True)
            remember_hashes(manifest)
        try_early(self._whole(piece.sha256))
        return piece

    def _make_room(self, more: int, disk: int, what: str, owner: str, wanted: Collection[str] = ()) -> None:
        """Remove files until `more` bytes fit under the limit, and `disk` bytes on the disk, for `what` from `owner`.

        Pieces stay that are in use, `wanted` by their hash, or of other owners and used lately. The lock is held.

        Raises:
            StoreFull: removing all that may be removed would not be enough for the limit.
            DiskFull: removing all that may be removed would not be enough for the disk.
        """
        owners: dict[str, set[str]] = {}
        for one in self._owners.all():
            for sha256 in one.pieces:
                owners.setdefault(sha256, set()).add(one.owner)
        files, removable, recent = self._files(), [], time.time() - UNUSED_SECONDS
        over, short = sum(file.size for file in files) + more - self.limit, disk - self.free()
        for file in sorted(files, key=lambda file: (owners.get(file.sha256) != {CUT}, file.used)):
            if max(over, short) <= 0:
                break
            others = ({file.owner} if file.owner else owners.get(file.sha256, set())) - {owner, CUT}
            protected = file.sha256 in wanted or (others and file.used > recent)
            if not protected and (not file.whole or remove_unused(file.path, only_look=True)):
                removable.append(file)
                over, short = over - file.size, short - file.size_on_disk
        if over > 0:
            raise StoreFull(
                f"The store has no room for {what}: it would exceed its limit of {gigabytes(self.limit)} by"
                f" {gigabytes(over)}. The other layers there are in use, or belong to other devices.",
                "Raise the limit there, stop programs that use layers, or remove some: edgellm mesh layers clean",
            )
        if short > 0:
            raise DiskFull(
                f"The disk is too full for {what}: {gigabytes(short)} more are needed.",
                "Free some space there; what has arrived is kept.",
            )
        for file in removable:
            remove_unused(file.path)

    def clean(self, fingerprint: str | None = None, owner: str | None = None) -> CleanResult:
        """Remove everything that is not in use.

        With a `fingerprint`, remove only that model file's pieces; with an `owner`, only pieces of this owner alone.

        Raises:
            StoreBusy: an upload is running, by `owner` if it is given.
            LayersMissing: there is no such model.
        """
        with self._exclusive(owner), self._locked():
            records = self._owners.all()
            selected = [
                one for one in records
                if owner in (None, one.owner) and fingerprint in (None, one.manifest.fingerprint)
            ]  # fmt: skip
            if fingerprint is not None and not selected:
                raise LayersMissing(f"No layers of the model {fingerprint[:16]} are on this device.", _DEPLOY)
            hashes = {sha256 for one in selected for sha256 in one.pieces}
            shared = {sha256 for one in records if one not in selected for sha256 in one.pieces}
            files = [
                file for file in self._files()
                if (file.sha256 in hashes - shared or (fingerprint is None and owner is None)
                    or (file.sha256 in hashes and file.owner and owner in (None, file.owner)))
            ]  # fmt: skip
            removed = [file for file in files if remove_unused(file.path)]
            remaining = {file.sha256 for file in self._files()} - (shared if owner is not None else set())
            for one in selected:
                self._owners.retain(one, remaining)
            if owner is None:
                self._owners.remove_invalid()
        return CleanResult(len(removed), sum(file.size for file in removed), len(files) - len(removed))

    def free(self) -> int:
        """Return the free bytes of the store's disk, less SPARE."""
        return max(0, shutil.disk_usage(_existing(self.root)).free - RESERVED_BYTES)

    def _files(self) -> list[StoredPiece]:
        """Return every piece, whole or arriving; other files are ignored."""
        found = []
        for path in sorted(self._pieces.glob("*")):
            name = _NAME.fullmatch(path.name)
            with suppress(OSError):
                if name is not None:
                    stat = path.stat()
                    size = int(name["size"]) if name["size"] else stat.st_size
                    owner = "" if not name["size"] else name["owner"] or OWN
                    found.append(StoredPiece(path, name["sha256"], size, stat.st_size, stat.st_mtime, owner))
        return found

    def _whole(self, sha256: str) -> Path:
        return self._pieces / f"{sha256}.gguf"

    def _partial(self, piece: LayerPiece, owner: str) -> Path:
        """Return the file in which a piece arrives from `owner`: each owner has its own."""
        return self._pieces / f"{piece.sha256}.{piece.size}{'' if owner == OWN else f'.{owner}'}.partial"

    @contextmanager
    def _exclusive(self, owner: str | None) -> Iterator[None]:
        with storage_errors(self.root):
            for folder in (self.root, self._pieces, self._models):
                private_folder(folder)
        with self._owners.exclusive(owner):
            yield

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the store's lock; raise the system's errors as `DiskFull` or `LayersRefused`."""
        with storage_errors(self.root), ExitStack() as held:
            try:
                held.enter_context(hold_lock(self.root / "lock"))
            except TimeoutError:
                raise StoreBusy(
                    f"The store in {self.root} is being changed by another process.", "Try again later."
                ) from None
            yield


def cut_layers(
    model: ModelFile, manifest: Manifest, layers: LayerRange, store: LayerStore, progress: Progress | None = None
) -> None:
    """Cut the pieces of `manifest` for these layers from a model on this device, into a store of this device.

    `progress` is called with fractions from 0 to 1. Complete pieces are not cut again.

    Raises:
        ModelNotFound, ModelCorrupt, ModelUnsupported: as for `edgellm.engine.cut`.
        InvalidOption: the manifest has no such layers.
        LayersRefused, DiskFull: there is no room.
    """
    pieces = manifest.covering(layers)
    total, done = sum(piece.size for piece in pieces), 0
    with store.receiving(manifest, pieces) as receiving:
        for piece in pieces:
            if store.find(piece) is None:
                with receiving.piece(piece) as partial:
                    partial.restart()
                    for portion in cut_piece(model, piece.layers):
                        partial.append(portion)
                        if progress is not None:
                            progress((done + partial.size) / total)
                    partial.finish()
            done += piece.size
            if progress is not None:
                progress(done / total)


def default_limit(root: Path) -> int:
    """Return half of the disk's free bytes and the store's own together, but at least 1 GiB."""
    stored = sum(path.stat().st_size for path in root.glob("pieces/*"))
    return max(2**30, (shutil.disk_usage(_existing(root)).free + stored) // 2)


def gigabytes(size: int) -> str:
    """Return a size in bytes as a text for people."""
    return f"{size / 1e9:.2f} GB"


def _existing(folder: Path) -> Path:
    while not folder.exists():
        folder = folder.parent
    return folder


_DEPLOY = "Deploy them: edgellm mesh deploy"
