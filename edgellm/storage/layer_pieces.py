"""The pieces into which a model is cut, for devices to store: each a GGUF, named by its SHA-256.

A piece holds consecutive layers of a model. The first piece carries the embedding and the tokeniser, the last one the
norm and the head. Stages are cut on a grid (`grid`): pieces of about 32 MB, as every block of layers has a cost in each
pass, and aligned, so that another split of the model needs most of the same pieces. The file of a piece gets its final
name when it is complete and its hash is right, and stays while it is used.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from io import BufferedRandom
from itertools import pairwise
from pathlib import Path

from edgellm import system
from edgellm.engine import GgufHeader, ModelFile, check_cuttable, cut_bytes
from edgellm.engine.gguf.cuttable import cut_points, largest_part
from edgellm.engine.gguf.reader import MAX_LAYERS
from edgellm.engine.trial.probe import Probe, faults_of
from edgellm.errors import SAME_VERSION, DiskFull, EdgeError, InvalidOption, LayersCorrupt, LayersRefused, StoreBusy
from edgellm.layer_range import LayerRange, chain, ranges
from edgellm.state import from_json, read_cached, system_errors, write_cached
from edgellm.storage.fingerprint import SHA256, fingerprint
from edgellm.system import cache_dir

MAX_NAME = 200  # characters
MAX_PIECES = 4 * MAX_LAYERS
PIECE_BYTES = 32 * 2**20
"""Bytes up to which consecutive layers share a piece: a block's fixed cost is small beside its computing."""

_ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,39}")
_PLAIN = system.NO_LINKS | system.BINARY
_RETRY = "Deploy it again; if that does not help, run the same version of edgellm on both sides."


@dataclass(frozen=True, slots=True, order=True)
class LayerPiece:
    """The layers `first` to `last`, counted from 0, both included, in a file of `size` bytes with this SHA-256 in hex.
    Raises `LayersRefused` for values that make no sense."""

    first: int
    last: int
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last < MAX_LAYERS:
            raise _refused(f"a piece from layer {self.first} to {self.last}")
        if self.size <= 0:
            raise _refused(f"a piece of {self.size} bytes")
        if not SHA256.fullmatch(self.sha256):
            raise _refused(f"a piece with the hash {self.sha256[:80]!r}")

    @property
    def layers(self) -> LayerRange:
        """Return the layers in the piece."""
        return LayerRange(self.first, self.last + 1)

    def __str__(self) -> str:
        """Return a text for people, who count layers from 1."""
        return self.layers.named


@dataclass(frozen=True, slots=True)
class Manifest:
    """Pieces of a model, in ascending order; they may overlap, and leave layers out. `fingerprint` is that of the whole
    model, and `layers` the number of the model's layers. Raises `LayersRefused` for pieces that the model cannot
    have."""

    fingerprint: str
    name: str
    architecture: str
    layers: int
    pieces: tuple[LayerPiece, ...]

    def __post_init__(self) -> None:
        if not SHA256.fullmatch(self.fingerprint):
            raise _refused(f"the fingerprint {self.fingerprint[:80]!r}")
        if not (0 < len(self.name) <= MAX_NAME and self.name.isprintable()):
            raise _refused(f"the name {self.name[:80]!r}")
        if not _ARCHITECTURE.fullmatch(self.architecture):
            raise _refused(f"the architecture {self.architecture[:80]!r}")
        if not 0 < len(self.pieces) <= MAX_PIECES or any(one >= other for one, other in pairwise(self.pieces)):
            raise _refused(f"{len(self.pieces)} pieces, too many or not in ascending order")
        if max(piece.last for piece in self.pieces) >= self.layers:
            raise _refused(f"a piece beyond the {self.layers} layers of {self.name}")

    def covering(self, layers: LayerRange) -> tuple[LayerPiece, ...]:
        """Return the fewest pieces that make up these layers."""
        pieces = {piece.layers: piece for piece in self.pieces}
        if not (found := chain(pieces, layers)):
            raise InvalidOption(
                f"{self.name} has no pieces for the layers {layers}.", f"Its layers run from 1 to {self.layers}."
            )
        return tuple(pieces[one] for one in found)


def layers_per_piece(header: GgufHeader) -> int:
    """Return how many layers of a model go into one piece. Raise errors as `check_cuttable` does."""
    layers = check_cuttable(header)
    size = sum(tensor.nbytes for tensor in header.tensors if tensor.name.startswith("blk.")) / layers
    return min(largest_part(header), max(1, int(PIECE_BYTES / max(1.0, size))))


def grid_lines(header: GgufHeader) -> tuple[int, ...]:
    """Return the layers with which pieces of a model begin: of the layers at which the model may be cut, as few as keep
    pieces within `layers_per_piece`, or within the nearest cut."""
    most, points, lines = layers_per_piece(header), cut_points(header), [0]
    for before, point in pairwise([*points, check_cuttable(header)]):
        if before > lines[-1] and point - lines[-1] > most:
            lines.append(before)
    return tuple(lines)


def grid(layers: LayerRange, lines: Sequence[int]) -> list[LayerRange]:
    """Return the layers of a stage in ranges that end before `lines` of the grid, or with the stage."""
    inside = [line for line in lines if line in layers and line != layers.start]
    return [LayerRange(*ends) for ends in pairwise([layers.start, *inside, layers.stop])]


def check_stages(model: ModelFile, stages: Iterable[LayerRange]) -> None:
    """Check that each of these ranges of a model's layers can be a stage."""
    layers, points = check_cuttable(model.header), cut_points(model.header)
    for one in stages:
        if one.start < layers and (one.start not in points or (one.stop < layers and one.stop not in points)):
            raise InvalidOption(
                f"The layers {one} of {model.path.name} cannot be a stage: its layers differ by their number.",
                f"Begin every stage with one of these layers: {ranges(points)}.",
            )


Progress = Callable[[float], None]


def manifest_of(model: ModelFile, stages: Sequence[LayerRange] = (), progress: Progress | None = None) -> Manifest:
    """Return the pieces of a model file for these stages (default: one of all layers), each cut on the grid."""
    check_stages(model, stages)
    layers, lines = LayerRange(0, check_cuttable(model.header)), grid_lines(model.header)
    return pieces_of(model, {one for stage in stages or [layers] for one in grid(stage, lines)}, progress)


def pieces_of(model: ModelFile, ranges: Collection[LayerRange], progress: Progress | None = None) -> Manifest:
    """Return the pieces of a model file for exactly these ranges of layers. The layers are read once, and the hashes
    remembered. `progress` is called with shares from 0 to 1. Raise InvalidOption without such layers, and the errors of
    `edgellm.engine.cut`."""
    layers = check_cuttable(model.header)
    if unknown := [one for one in ranges if not 0 <= one.start < one.stop <= layers]:
        raise InvalidOption(f"{model.path.name} has no layers {unknown[0]}.", f"Its layers run from 1 to {layers}.")
    known = {piece.layers: piece for piece in known_pieces(fingerprint(model.path))}
    missing = sorted(set(ranges) - known.keys())
    total, done = model.header.file_size / layers * sum(map(len, missing)), 0
    for one in missing:
        digest, size = hashlib.sha256(), 0
        for portion in cut_piece(model, one):
            digest.update(portion)
            size += len(portion)
            done += len(portion)
            if progress is not None:
                progress(min(1.0, done / total))
        known[one] = LayerPiece(one.start, one.last, size, digest.hexdigest())
    if missing and progress is not None:
        progress(1.0)
    found = describe_pieces(model, [known[one] for one in set(ranges)])
    if missing:
        remember_hashes(found)
    return found


def describe_pieces(model: ModelFile, pieces: Iterable[LayerPiece]) -> Manifest:
    """Return the manifest with these pieces of a model file."""
    layers = check_cuttable(model.header)
    name = "".join(char for char in model.name if char.isprintable()).strip()[:MAX_NAME] or "a model"
    return Manifest(fingerprint(model.path), name, model.header.architecture, layers, tuple(sorted(pieces)))


def known_pieces(fingerprint: str) -> tuple[LayerPiece, ...]:
    """Return the pieces of a model file of this device whose hashes are stored."""
    found = read_cached(_path(fingerprint), partial(from_json, Manifest))
    return found.pieces if found is not None and found.fingerprint == fingerprint else ()


def remember_hashes(manifest: Manifest) -> None:
    """Store the hashes of pieces of a model file of this device."""
    pieces = {piece.layers: piece for piece in (*known_pieces(manifest.fingerprint), *manifest.pieces)}
    merged = replace(manifest, pieces=tuple(sorted(pieces.values())[:MAX_PIECES]))
    write_cached(_path(manifest.fingerprint), asdict(merged))


def forget_hashes(fingerprint: str) -> None:
    """Remove the stored hashes of a model file's pieces after a hash turned out wrong."""
    with suppress(OSError):
        _path(fingerprint).unlink()


def cut_piece(model: ModelFile, layers: LayerRange) -> Iterator[bytes | memoryview]:
    """Return an iterator over a piece's bytes, cut from the model on demand; a portion is valid until the next one."""
    return cut_bytes(model, layers.start, layers.last, head=layers.stop == check_cuttable(model.header))


def _path(fingerprint: str) -> Path:
    return cache_dir() / "recipes" / f"{fingerprint}.json"


def _refused(what: str) -> LayersRefused:
    return LayersRefused(f"The manifest is invalid: it has {what}.", SAME_VERSION)


def add_portion(path: Path, whole: Path, piece: LayerPiece, offset: int, data: bytes) -> int:
    """Add `data` to the file at `path` of an arriving piece, unless it ends elsewhere than at `offset`; return its
    bytes now. With the last ones check it, and rename it to `whole`, or remove it. Raise LayersRefused, LayersCorrupt
    or DiskFull."""
    if offset + len(data) > piece.size:
        raise LayersRefused(
            f"{str(piece).capitalize()} was announced with {piece.size} bytes, but more arrived.", _RETRY
        )
    wrong = ""
    with storage_errors(path):
        with os.fdopen(os.open(path, os.O_RDWR | _PLAIN), "r+b") as file:
            if (size := file.seek(0, os.SEEK_END)) == offset:
                size += file.write(data)
                file.flush()
            if size < piece.size:
                return size
            if not (wrong := _fault(file, path, piece)):
                os.fsync(file.fileno())
        if wrong:
            path.unlink(missing_ok=True)
            raise LayersCorrupt(wrong, _RETRY)
        mark_used(path)
        path.replace(whole)
    system.sync_folder(whole.parent)  # the name, too, must outlive a power cut
    try_early(whole)
    return size


def _fault(file: BufferedRandom, path: Path, piece: LayerPiece) -> str:
    file.seek(0)
    if hashlib.file_digest(file, "sha256").hexdigest() != piece.sha256:
        return f"The bytes that arrived are not {piece}: their SHA-256 differs."
    try:
        layers = check_cuttable(ModelFile.open(path).header)
    except EdgeError as error:
        return f"The file that arrived for {piece} is not a model: {error.what}"
    return "" if layers == len(piece.layers) else f"The file that arrived for {piece} has {layers} layers."


def remove_unused(path: Path, *, only_look: bool = False) -> bool:
    """Remove the file unless it is in use, locked by `system.lock_shared`; return whether it is gone, or with
    `only_look` whether it could go."""
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
        faults_of(Probe(ModelFile.open(path)))


def mark_used(path: Path) -> None:
    """Record that a piece is used now. The system's own stamps are some milliseconds apart, and pieces used within one
    would be evicted in the order of their hashes."""
    now = time.time_ns()
    with suppress(OSError):
        os.utime(path, ns=(now, now))


def storage_errors(path: Path) -> AbstractContextManager[None]:
    """Raise the system's errors about `path` as `StoreBusy`, `DiskFull` or `LayersRefused`."""
    return system_errors(LayersRefused, path, "used", busy=StoreBusy, full=DiskFull)
