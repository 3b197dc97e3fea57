"""The store of layers on this device: pieces named by their hash, within a size limit, least recently used evicted
first.

pieces/SHA256.gguf                a complete piece: its hash was right when it got that name
pieces/SHA256.SIZE.OWNER.partial  the part of a piece that OWNER has sent, for which SIZE bytes are reserved
records.json                      the manifests of the pieces that each owner has uploaded, or is uploading
OWNER.lock                        held while bytes from OWNER are added, or its pieces are cut
lock                              held by the process that evicts, removes or records

OWNER is a device ID in hex, `here` for programs of this machine, or `cut` for pieces that were cut from this device's
own model files, and can be cut again. A request gets exactly the bytes whose hash it names, or none, whichever
device uploaded them. No device removes or replaces pieces that another one uploaded.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from edgellm import system
from edgellm.engine import ModelFile
from edgellm.errors import DiskFull, InvalidOption, LayersMissing, StoreFull, size
from edgellm.layer_range import LayerRange
from edgellm.state import MONTH, from_json, hold_lock, private_folder, read_cached, write_state
from edgellm.storage import layer_pieces
from edgellm.storage.fingerprint import fingerprint
from edgellm.storage.layer_pieces import LayerPiece, Manifest
from edgellm.system import cache_dir

OWN, CUT = "here", "cut"
MAX_MODELS = 64  # models of one other device
RESERVED_BYTES = 256 * 2**20  # bytes of the disk that are left free in any case
_WRITE = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | system.NO_LINKS | system.BINARY
_NAME = re.compile(r"(?P<sha256>[0-9a-f]{64})\.(?:gguf|(?P<size>\d{1,19})\.(?P<owner>[0-9a-f]{64}|here)\.partial)")
_DEPLOY = "Deploy them: edgellm mesh deploy"


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A file of a store. `size`: its bytes when complete; `size_on_disk`: its bytes now. An arriving file has an
    `owner`, the device that uploads it; a whole one has "" there."""

    path: Path
    sha256: str
    size: int
    size_on_disk: int
    used: float
    owner: str


@dataclass(frozen=True, slots=True)
class HeldModel:
    """The pieces of a model that `owner` uploaded: the complete ones, and the received bytes of arriving ones. `used`
    is the last time at which a piece was used or received, in seconds since 1970."""

    manifest: Manifest
    pieces: tuple[LayerPiece, ...]
    arriving: int
    used: float
    owner: str = ""

    @property
    def layers(self) -> frozenset[int]:
        """Return the layers of whole pieces, counted from 0."""
        return frozenset(layer for piece in self.pieces for layer in piece.layers)

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces) + self.arriving


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """A store: its limit and its size in bytes, the free bytes of its disk, and the layers by model."""

    limit: int
    size: int
    free: int
    models: tuple[HeldModel, ...]


@dataclass(frozen=True, slots=True)
class CleanResult:
    """The number of pieces removed, their bytes, and the number of pieces that are in use."""

    pieces: int
    size: int
    in_use: int


@dataclass(frozen=True, slots=True)
class _Record:
    owner: str
    manifest: Manifest


class LayerStore:
    """The store in `root`, which need not exist yet, of at most `limit` bytes. Any number of processes may use it."""

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        """Set up the store in `root` (default: the user's own) with `limit` (default: half of the disk's free bytes and
        the store's own together, but at least 1 GiB). Raise InvalidOption for a limit that is not positive."""
        self.root = root or cache_dir() / "layers"
        self._pieces = self.root / "pieces"
        if limit is None:
            stored = sum(file.size_on_disk for file in self._files())
            limit = max(2**30, (self._disk_free() + stored) // 2)
        if limit <= 0:
            raise InvalidOption(f"The limit of the layer store is {limit} bytes.", "Give some gigabytes.")
        self.limit = limit

    @property
    def size(self) -> int:
        """Return the bytes of all pieces; an arriving piece counts with its reserved bytes."""
        return sum(file.size for file in self._files())

    def facts(self, owner: str | None = None) -> StoreFacts:
        """Return the store's figures and models; with an `owner`, only its own models."""
        return StoreFacts(self.limit, self.size, self._free(), tuple(self.models(owner)))

    def _free(self) -> int:
        return max(0, self._disk_free() - RESERVED_BYTES)

    def _disk_free(self) -> int:
        return shutil.disk_usage(next(folder for folder in (self.root, *self.root.parents) if folder.exists())).free

    def find(self, piece: LayerPiece) -> Path | None:
        """Return the file of a piece; None if it is missing or incomplete."""
        path = self._whole(piece.sha256)
        return path if _size(path) == piece.size else None

    def complete(self, pieces: Iterable[LayerPiece]) -> list[LayerPiece]:
        """Return the complete pieces among these, the most recently used first."""
        found = []
        for piece in pieces:
            with suppress(OSError):
                if path := self.find(piece):
                    found.append((path.stat().st_mtime, piece))
        return [piece for _, piece in sorted(found, reverse=True)]

    def arrived(self, piece: LayerPiece, owner: str = OWN) -> int:
        """Return the number of a piece's bytes in the store: all, or the bytes that `owner` has sent."""
        if self.find(piece) is not None:
            return piece.size
        return min(piece.size, _size(self._partial(piece, owner)) or 0)

    @contextmanager
    def using(self, piece: LayerPiece) -> Iterator[Path]:
        """Yield the file of a piece, and prevent its removal until the `with` ends. Raise LayersMissing."""
        path = self._whole(piece.sha256)
        with ExitStack() as held:
            with suppress(OSError):
                system.lock_shared(held.enter_context(path.open("rb")))
            if self.find(piece) is None:
                raise LayersMissing(f"{str(piece).capitalize()} is not on this device.", _DEPLOY)
            layer_pieces.mark_used(path)
            yield path

    def models(self, owner: str | None = None) -> list[HeldModel]:
        """Return each owner's pieces of each model, the most recently used first; with an `owner`, only its own."""
        found, files = [], self._files()
        for record in self._records():
            own = [one for one in files if one.sha256 in _hashes([record]) and one.owner in ("", record.owner)]
            if own and owner in (None, record.owner):
                whole = tuple(sorted(self.complete(record.manifest.pieces)))
                arriving, used = sum(one.size_on_disk for one in own if one.owner), max(one.used for one in own)
                found.append(HeldModel(record.manifest, whole, arriving, used, record.owner))
        return sorted(found, key=lambda model: model.used, reverse=True)

    def pieces(self, fingerprint: str) -> set[LayerPiece]:
        """Return the complete pieces of the model with this fingerprint, of all owners."""
        return {piece for one in self.models() if one.manifest.fingerprint == fingerprint for piece in one.pieces}

    def reserve(self, manifest: Manifest, owner: str = OWN) -> list[int]:
        """Make room for all pieces of a manifest, and return how many bytes of each have arrived from `owner`. If there
        is no room (`_make_room`), nothing is removed, and StoreFull or DiskFull raised."""
        pieces = manifest.pieces
        with self._locked(f"{owner}.lock"), self._locked():
            what = f"{f'{len(pieces)} pieces' if len(pieces) > 1 else pieces[0]} of {manifest.name}"
            if (requested := sum(piece.size for piece in pieces)) > self.limit:
                raise StoreFull(
                    f"{what} would take {size(requested)}, more than the store's limit of {size(self.limit)}.",
                    "Raise the limit on that device, or plan fewer layers for it.",
                )
            missing = [piece for piece in pieces if self.find(piece) is None]
            begun = {file.sha256: file.size_on_disk for file in self._files() if file.owner == owner}
            self._make_room(
                sum(piece.size for piece in missing if piece.sha256 not in begun),
                sum(piece.size - begun.get(piece.sha256, 0) for piece in missing),
                what, owner, {piece.sha256 for piece in pieces},
            )  # fmt: skip
            self._record(owner, manifest)
            for piece in pieces:
                whole, arriving = self._whole(piece.sha256), self._partial(piece, owner)
                if piece not in missing or begun.get(piece.sha256, 0) >= piece.size:  # a crash left one without a name
                    arriving.unlink(missing_ok=True)
                if piece in missing:
                    whole.unlink(missing_ok=True)  # a crash of the system cut the whole piece
                    arriving.touch(mode=0o600)
                else:
                    layer_pieces.mark_used(whole)
            return [self.arrived(piece, owner) for piece in pieces]

    def append(self, piece: LayerPiece, offset: int, data: bytes, owner: str = OWN) -> int:
        """Add bytes to a piece for which `owner` has reserved room, and return how many have arrived, as `add_portion`
        does. Raise LayersMissing where there is no such room, or no longer."""
        with self._locked(f"{owner}.lock"):
            if self.find(piece) is not None:
                return piece.size
            path = self._partial(piece, owner)
            if not os.path.lexists(path):
                raise LayersMissing(f"No room is set aside for {piece}.", _DEPLOY)
            return layer_pieces.add_portion(path, self._whole(piece.sha256), piece, offset, data)

    def cut(self, model: ModelFile, layers: LayerRange, size: int, wanted: Collection[str] = ()) -> LayerPiece:
        """Return a piece of about `size` bytes, cut from a model file of this device; `wanted` pieces stay. Wait while
        another process cuts. Raise StoreFull or DiskFull without room, and the errors of `edgellm.engine.cut`."""
        digest, temporary = hashlib.sha256(), self._pieces / "cut.half"
        with ExitStack() as held:
            with layer_pieces.storage_errors(self.root):
                held.enter_context(hold_lock(self._private() / f"{CUT}.lock", -1.0))
            for known in layer_pieces.known_pieces(fingerprint(model.path)):
                if known.layers == layers and self.find(known) is not None:  # another process was faster
                    return known
            with self._locked():
                self._make_room(size, size, f"{layers.named} of {model.path.name}", CUT, wanted)
            try:
                with layer_pieces.storage_errors(self.root), os.fdopen(os.open(temporary, _WRITE, 0o600), "wb") as file:
                    for portion in layer_pieces.cut_piece(model, layers):
                        file.write(portion)
                        digest.update(portion)
                    file.flush()
                    os.fsync(file.fileno())  # a whole piece is never checked against its hash again
                    piece = LayerPiece(layers.start, layers.last, file.tell(), digest.hexdigest())
                manifest = layer_pieces.describe_pieces(model, [piece])
                with self._locked():
                    self._record(CUT, manifest)
                    layer_pieces.mark_used(temporary)
                    temporary.replace(self._whole(piece.sha256))
            finally:
                temporary.unlink(missing_ok=True)
            layer_pieces.remember_hashes(manifest)
        layer_pieces.try_early(self._whole(piece.sha256))
        return piece

    def _make_room(self, more: int, disk: int, what: str, owner: str, wanted: Collection[str] = ()) -> None:
        """Remove files until `more` bytes fit under the limit, and `disk` bytes on the disk, for `what` from `owner`.
        Pieces that were cut here go first, as they can be cut again, then the least recently used. Pieces stay that are
        in use, `wanted` by their hash, or of other owners and used within a month. The lock is held."""
        owners: dict[str, set[str]] = {}
        for record in self._records():
            for sha256 in _hashes([record]):
                owners.setdefault(sha256, set()).add(record.owner)
        files, removable, recent = self._files(), [], time.time() - MONTH
        over, short = sum(file.size for file in files) + more - self.limit, disk - self._free()
        for file in sorted(files, key=lambda file: (owners.get(file.sha256) != {CUT}, file.used)):
            if max(over, short) <= 0:
                break
            others = ({file.owner} if file.owner else owners.get(file.sha256, set())) - {owner, CUT}
            protected = file.sha256 in wanted or (others and file.used > recent)
            if not protected and (file.owner or layer_pieces.remove_unused(file.path, only_look=True)):
                removable.append(file)
                over, short = over - file.size, short - file.size_on_disk
        if over > 0:
            raise StoreFull(
                f"The store has no room for {what}: it would exceed its limit of {size(self.limit)} by"
                f" {size(over)}. The other layers there are in use, or belong to other devices.",
                "Raise the limit there, stop programs that use layers, or remove some: edgellm mesh layers clean",
            )
        if short > 0:
            raise DiskFull(
                f"The disk is too full for {what}: {size(short)} more are needed.",
                "Free some space there; what has arrived is kept.",
            )
        for file in removable:
            layer_pieces.remove_unused(file.path)

    def clean(self, fingerprint: str | None = None, owner: str | None = None) -> CleanResult:
        """Remove everything that is not in use; with a `fingerprint`, only that model's pieces; with an `owner`, only
        pieces of this owner alone. Raise LayersMissing without the model."""
        with self._locked():
            records = self._records()
            selected = [
                one for one in records
                if owner in (None, one.owner) and fingerprint in (None, one.manifest.fingerprint)
            ]  # fmt: skip
            if fingerprint is not None and not selected:
                raise LayersMissing(f"No layers of the model {fingerprint[:16]} are on this device.", _DEPLOY)
            others = [one for one in records if one not in selected]
            hashes, shared = _hashes(selected), _hashes(others)
            files = [
                file for file in self._files()
                if (fingerprint is None and owner is None) or file.sha256 in hashes - shared
                or (file.sha256 in hashes and file.owner and owner in (None, file.owner))
            ]  # fmt: skip
            removed = [file for file in files if layer_pieces.remove_unused(file.path)]
            in_use = {file.sha256 for file in files} & {file.sha256 for file in self._files()}
            self._write([*others, *_reduced(selected, in_use - shared if owner else in_use)])
        return CleanResult(len(removed), sum(file.size for file in removed), len(files) - len(removed))

    def _records(self) -> list[_Record]:
        """Return the manifest of each owner's pieces of each model. Pieces without a record have no owner."""
        path = self.root / "records.json"
        return read_cached(path, lambda rows: [from_json(_Record, row) for row in rows]) or []

    def _record(self, owner: str, manifest: Manifest) -> None:
        """Record that `owner` uploads these pieces of a model, besides earlier ones that are still stored."""
        records = _reduced(self._records(), {file.sha256 for file in self._files()})
        same = [one for one in records if (one.owner, one.manifest.fingerprint) == (owner, manifest.fingerprint)]
        others = [one for one in records if one not in same]
        if owner not in (OWN, CUT) and sum(one.owner == owner for one in others) >= MAX_MODELS:
            raise StoreFull(
                f"This device has uploaded layers of {MAX_MODELS} models there already.",
                "Remove some there: edgellm mesh layers clean",
            )
        kept = {piece for one in same for piece in one.manifest.pieces if piece.last < manifest.layers}
        self._write([*others, _Record(owner, replace(manifest, pieces=tuple(sorted({*kept, *manifest.pieces}))))])

    def _write(self, records: Sequence[_Record]) -> None:
        write_state(self.root / "records.json", json.dumps([asdict(one) for one in records]), durable=True)

    def _files(self) -> list[StoredPiece]:
        found = []
        for path in sorted(self._pieces.glob("*")):
            with suppress(OSError):
                if name := _NAME.fullmatch(path.name):
                    stat = path.stat()
                    size, owner = int(name["size"] or stat.st_size), name["owner"] or ""
                    found.append(StoredPiece(path, name["sha256"], size, stat.st_size, stat.st_mtime, owner))
        return found

    def _whole(self, sha256: str) -> Path:
        return self._pieces / f"{sha256}.gguf"

    def _partial(self, piece: LayerPiece, owner: str) -> Path:
        """Return the file in which a piece arrives from `owner`: each owner has its own."""
        return self._pieces / f"{piece.sha256}.{piece.size}.{owner}.partial"

    def _private(self) -> Path:
        private_folder(self._pieces)
        return private_folder(self.root)

    @contextmanager
    def _locked(self, name: str = "lock") -> Iterator[None]:
        with layer_pieces.storage_errors(self.root), hold_lock(self._private() / name):
            yield


def _reduced(records: Iterable[_Record], hashes: Collection[str]) -> list[_Record]:
    left = ((one, tuple(piece for piece in one.manifest.pieces if piece.sha256 in hashes)) for one in records)
    return [replace(one, manifest=replace(one.manifest, pieces=pieces)) for one, pieces in left if pieces]


def _hashes(records: Iterable[_Record]) -> set[str]:
    return {piece.sha256 for one in records for piece in one.manifest.pieces}


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None
