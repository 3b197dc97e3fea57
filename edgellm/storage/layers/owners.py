"""The owners of the pieces in a store of layers: no device removes or replaces pieces that another one uploaded.

OWNER/FINGERPRINT.json  the pieces of this model that OWNER has uploaded, or is uploading
OWNER/lock              held while OWNER uploads or removes pieces

OWNER is a device ID in hex, `here` for this device itself, or `cut` for pieces that were cut from this device's own
model files for a stage, and can be cut again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock, Timeout

from edgellm.errors import StoreBusy, StoreFull
from edgellm.storage.layers.incoming_piece import storage_errors
from edgellm.storage.layers.manifest import LayerPiece, Manifest
from edgellm.storage.state import MALFORMED, private_folder, read_json, write_state

OWN, CUT = "here", "cut"
MAX_MODELS = 64  # models of one other device
_OWNER = re.compile(r"[0-9a-f]{64}|here|cut")


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """The pieces of one model that one device uploaded. `path` is the file of this record."""

    owner: str
    manifest: Manifest
    path: Path

    @property
    def pieces(self) -> frozenset[str]:
        """Return the SHA-256 of each piece."""
        return frozenset(piece.sha256 for piece in self.manifest.pieces)


class Owners:
    """The records in `folder`. To change them, hold the lock of the store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> list[OwnerRecord]:
        """Return every record, except damaged ones: their pieces then have no owner."""
        found = []
        for path in sorted(self._folder.glob("*/*.json")):
            with suppress(*MALFORMED):
                record = read_json(path, dict) or {}
                manifest = Manifest.from_json(record["recipe"])
                hashes = set(map(str, record["pieces"]))
                manifest = _with_pieces(manifest, [one for one in manifest.pieces if one.sha256 in hashes])
                if _OWNER.fullmatch(path.parent.name):
                    found.append(OwnerRecord(path.parent.name, manifest, path))
        return found

    def add(self, owner: str, manifest: Manifest, pieces: Collection[LayerPiece], stored: Collection[str]) -> None:
        """Record that `owner` uploads these pieces of a model, besides earlier ones that are still `stored`.

        Raises:
            StoreFull: the owner is another device, which has uploaded pieces of MAX_MODELS other models.
        """
        records = [one for one in self.all() if one.owner == owner]
        same = [one for one in records if one.manifest.fingerprint == manifest.fingerprint]
        others = [one for one in records if one not in same and self.retain(one, stored)]
        if owner not in (OWN, CUT) and len({one.manifest.fingerprint for one in others}) >= MAX_MODELS:
            raise StoreFull(
                f"This device has uploaded layers of {MAX_MODELS} models there already.",
                "Remove some there: edgellm mesh layers clean",
            )
        before = {
            piece
            for one in same
            for piece in one.manifest.pieces
            if piece.sha256 in stored and piece.last < manifest.layers
        }
        path = self._folder / owner / f"{manifest.fingerprint}.json"
        private_folder(path.parent)
        self._write(path, _with_pieces(manifest, before | set(pieces)))

    def retain(self, record: OwnerRecord, stored: Collection[str]) -> bool:
        """Reduce a record to the pieces that are still `stored`; return whether any is."""
        remaining = [piece for piece in record.manifest.pieces if piece.sha256 in stored]
        if not remaining:
            record.path.unlink(missing_ok=True)
        elif len(remaining) < len(record.manifest.pieces):
            self._write(record.path, _with_pieces(record.manifest, remaining))
        return bool(remaining)

    def remove_invalid(self) -> None:
        """Remove records that cannot be read."""
        valid = {one.path for one in self.all()}
        for path in self._folder.glob("*/*.json"):
            if path not in valid:
                path.unlink(missing_ok=True)

    @contextmanager
    def exclusive(self, owner: str | None) -> Iterator[None]:
        """Lock out other processes that upload or remove pieces for `owner`, or for any owner without one. For CUT,
        wait until the others are done.

        Raises:
            StoreBusy: another process does so already.
        """
        with ExitStack() as held:
            with storage_errors(self._folder):
                names = [owner] if owner is not None else [path.name for path in sorted(self._folder.glob("*"))]
                for name in filter(_OWNER.fullmatch, names):
                    path = private_folder(self._folder / name) / "lock"
                    lock = FileLock(path, timeout=-1.0 if owner == CUT else 0.0, mode=0o600, thread_local=False)
                    try:
                        held.enter_context(lock.acquire(poll_interval=0.01))
                    except Timeout:
                        raise StoreBusy(
                            f"The store in {self._folder.parent} is being changed by another process.",
                            "Try again later.",
                        ) from None
            yield

    @staticmethod
    def _write(path: Path, manifest: Manifest) -> None:
        record = {"recipe": manifest.to_json(), "pieces": [piece.sha256 for piece in manifest.pieces]}
        write_state(path, json.dumps(record), durable=True)


def _with_pieces(manifest: Manifest, pieces: Collection[LayerPiece]) -> Manifest:
    return replace(manifest, pieces=tuple(sorted(pieces)))
