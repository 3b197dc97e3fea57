"""The pieces into which a model is cut, for devices to keep: each a GGUF of its own, known by its SHA-256.

A piece is one layer, or several in a row. The first piece carries the embedding and the tokeniser, the last one the
norm and the head. A recipe names every piece of a model, so it is enough to tell which layers are where.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgellm.engine import check_cuttable, check_gguf, cut_bytes
from edgellm.engine.gguf.reader import MAX_LAYERS
from edgellm.errors import InvalidOption, LayersRefused, StateDamaged
from edgellm.layer_range import LayerRange
from edgellm.places import cache_dir
from edgellm.storage.fingerprint import QUICK, fingerprint
from edgellm.storage.state import read_json, write_state

NAME_MOST = 200  # characters
PIECE_MOST = 2**40  # bytes

_HASH = re.compile(r"[0-9a-f]{64}")
_ARCHITECTURE = re.compile(r"[a-z0-9][a-z0-9_.-]{0,39}")
_LABEL = b"edgellm recipe 1\0"
_CUT = 1  # raise this when the same cut gives other bytes: remembered recipes are then made again


@dataclass(frozen=True, slots=True)
class LayerPiece:
    """The layers `first` to `last`, counted from 0, both included, in a file of `size` bytes with this SHA-256 in hex.

    Raises `LayersRefused` for values that make no sense.
    """

    first: int
    last: int
    size: int
    sha256: str

    def __post_init__(self) -> None:
        if not 0 <= self.first <= self.last < MAX_LAYERS:
            raise _refused(f"a piece from layer {self.first} to {self.last}")
        if not 0 < self.size <= PIECE_MOST:
            raise _refused(f"a piece of {self.size} bytes")
        if not is_hash(self.sha256):
            raise _refused(f"a piece with the hash {self.sha256[:80]!r}")

    @property
    def layers(self) -> LayerRange:
        """The layers in the piece."""
        return LayerRange(self.first, self.last + 1)

    def __str__(self) -> str:
        """Return a text for people, who count layers from 1."""
        return f"layer {self.layers}" if self.first == self.last else f"layers {self.layers}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """All pieces of a model, in order. `fingerprint` is the SHA-256 of the whole model's file, `layers` their number.

    Raises `LayersRefused` where the pieces do not make up the model.
    """

    fingerprint: str
    name: str
    architecture: str
    layers: int
    pieces: tuple[LayerPiece, ...]

    def __post_init__(self) -> None:
        if not is_hash(self.fingerprint):
            raise _refused(f"a model with the fingerprint {self.fingerprint[:80]!r}")
        if not (0 < len(self.name) <= NAME_MOST and self.name.isprintable()):
            raise _refused(f"a model with the name {self.name[:80]!r}")
        if not _ARCHITECTURE.fullmatch(self.architecture):
            raise _refused(f"a model of the architecture {self.architecture[:80]!r}")
        ends = [-1, *(piece.last for piece in self.pieces)]
        if [piece.first for piece in self.pieces] != [end + 1 for end in ends[:-1]] or ends[-1] != self.layers - 1:
            raise _refused(f"pieces that do not make up the {self.layers} layers of {self.name}")

    @property
    def digest(self) -> str:
        """Return the identity of this recipe: a SHA-256 in hex over everything that decides what its layers compute.

        Two recipes with one digest are made of the same bytes. The name is for people, and left out.
        """
        architecture = self.architecture.encode()
        hashed = hashlib.sha256(_LABEL + bytes.fromhex(self.fingerprint))
        hashed.update(struct.pack(">II", len(architecture), self.layers) + architecture)
        for piece in self.pieces:
            hashed.update(struct.pack(">IIQ", piece.first, piece.last, piece.size) + bytes.fromhex(piece.sha256))
        return hashed.hexdigest()

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size for piece in self.pieces)

    def covering(self, layers: LayerRange) -> tuple[LayerPiece, ...]:
        """Return the pieces that hold these layers.

        Raises:
            InvalidOption: the model has no such layers, or a piece also has others.
        """
        found = tuple(piece for piece in self.pieces if piece.last >= layers.start and piece.first < layers.stop)
        if not found or found[0].first != layers.start or found[-1].last != layers.last:
            raise InvalidOption(
                f"{self.name} has no pieces for the layers {layers}.",
                f"Its layers run from 1 to {self.layers}.",
            )
        return found

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Recipe:
        """Return the recipe that `to_json` wrote; raise `LayersRefused` for anything else."""
        try:
            pieces = tuple(
                LayerPiece(int(one["first"]), int(one["last"]), int(one["size"]), str(one["sha256"]))
                for one in found["pieces"]
            )
            fingerprint, name, architecture = (str(found[key]) for key in ("fingerprint", "name", "architecture"))
            return cls(fingerprint, name, architecture, int(found["layers"]), pieces)
        except (LookupError, TypeError, ValueError, ArithmeticError) as error:
            raise _refused(f"a recipe that cannot be read ({error})") from None


def recipe_of(model: Path, progress: Callable[[float], None] | None = None) -> Recipe:
    """Return the recipe of a model file, one piece per layer.

    The file is read once, and the recipe remembered; `progress` is called with shares from 0 to 1.

    Raises:
        ModelNotFound, ModelCorrupt, ModelUnsupported: as for `edgellm.engine.cut`.
    """
    header = check_gguf(model)
    layers = check_cuttable(header)
    digest = fingerprint(model)
    if (kept := _kept(digest)) is not None:
        return kept
    pieces, done = [], 0
    for layer in range(layers):
        hashed, size = hashlib.sha256(), 0
        for portion in cut_piece(model, layers, layer, layer):
            hashed.update(portion)
            size += len(portion)
            done += len(portion)
            if progress is not None:
                progress(min(1.0, done / header.file_size))
        pieces.append(LayerPiece(layer, layer, size, hashed.hexdigest()))
    name = _shown(str(header.metadata.get("general.name") or model.stem))
    recipe = Recipe(digest, name, header.architecture, layers, tuple(pieces))
    with suppress(OSError):  # then it is made again next time
        write_state(_place(digest), json.dumps(recipe.to_json()))
    return recipe


def quick_recipe(model: Path) -> Recipe | None:
    """Return `recipe_of(model)` where it is remembered or takes no time; None where a large file would have to be read.

    Raises:
        ModelNotFound, ModelCorrupt, ModelUnsupported: as for `recipe_of`.
    """
    if check_gguf(model).file_size <= QUICK:
        return recipe_of(model)
    return _kept(fingerprint(model))


def _kept(digest: str) -> Recipe | None:
    with suppress(StateDamaged):
        recipe = read_json(_place(digest), Recipe.from_json)
        return recipe if recipe is not None and recipe.fingerprint == digest else None
    return None


def cut_piece(model: Path, layers: int, first: int, last: int) -> Iterator[bytes | memoryview]:
    """Return an iterator over a piece's bytes, cut from the model on demand; a portion is valid until the next one."""
    return cut_bytes(model, first, last, head=last == layers - 1)


def forget_recipe(recipe: Recipe) -> None:
    """Forget a recipe that has turned out wrong, so that it is made again next time."""
    with suppress(OSError):
        _place(recipe.fingerprint).unlink(missing_ok=True)


def is_hash(text: str) -> bool:
    return _HASH.fullmatch(text) is not None


def _place(digest: str) -> Path:
    return cache_dir() / "recipes" / f"{digest}-{_CUT}.json"


def _shown(name: str) -> str:
    return "".join(sign for sign in name if sign.isprintable()).strip()[:NAME_MOST] or "a model"


def _refused(what: str) -> LayersRefused:
    return LayersRefused(f"There cannot be {what}.", "Run the same version of edgellm on both sides.")
