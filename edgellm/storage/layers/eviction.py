"""Room in a store of layers: the files in it, and which of them to remove so that others fit."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from edgellm.errors import DiskFull, StoreFull
from edgellm.storage.layers.file_lease import in_use
from edgellm.storage.layers.manifest import LayerPiece
from edgellm.storage.layers.owners import OWN

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
