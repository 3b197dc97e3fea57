"""Stock servers whose vocabulary was proved to be that of models on this machine."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from edgellm.errors import StateDamaged
from edgellm.places import cache_dir
from edgellm.storage.state import from_json, read_json, write_state

_MOST = 256  # servers; the latest are kept


@dataclass(frozen=True, slots=True)
class KnownServer:
    """A server's address, the name of its model there, and the fingerprint of the vocabulary that is also its own."""

    address: str
    model: str
    vocabulary: str


class KnownServers:
    """The file of known servers. The proofs can be made again, so a damaged file counts as empty."""

    def __init__(self) -> None:
        self._path = cache_dir() / "servers.json"

    def all(self) -> list[KnownServer]:
        """Return the servers, the latest last."""
        try:
            return read_json(self._path, lambda data: [from_json(KnownServer, one) for one in data]) or []
        except StateDamaged:
            return []

    def add(self, server: KnownServer) -> None:
        """Add a server. A file that cannot be written stays as it is: the proof is made again next time."""
        kept = [*(one for one in self.all() if one != server), server][-_MOST:]
        with suppress(OSError):
            write_state(self._path, json.dumps([asdict(one) for one in kept]))
