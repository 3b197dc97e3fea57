"""The worker's side of `rpc_engine.proto`: an RPC server for each session, the tunnels to it, and the weights that it
keeps.

llama.cpp writes a file for each large tensor, named by a 64-bit hash of its bytes, and later takes any file of that
name as it is: also one whose writing was cut off, and one that a device made to collide. So files count only from when
the model that they belong to was loaded, and each paired device has a folder of its own.
"""

import asyncio
import os
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from edgellm import system
from edgellm.engine.native import VERSION
from edgellm.errors import SAME_VERSION, EngineFailed, ProtocolError
from edgellm.mesh.weight_cache import WeightCache
from edgellm.rpc.channel import HEARTBEAT_SECONDS, first_of
from edgellm.rpc.protos import PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import rpc_engine_pb2 as pb
from edgellm.rpc.trust.handshake import AuthInterceptor
from edgellm.rpc.trust.trust import Right
from edgellm.rpc_engine.backend import HOST, RpcServer
from edgellm.rpc_engine.session import MAX_BUFFER, RPC_CONTRACT, Moved, carry
from edgellm.services.server import listener
from edgellm.sleeping import AWAKE
from edgellm.state import keep_recent, private_folder, read_cached, write_cached

MAX_SESSIONS = 4  # a process each
_WHOLE = "whole.json"  # names and sizes of files that are whole


@dataclass(slots=True, eq=False)
class _Served:
    """A session of `owner`, its server, the folder of its weights, and its memory."""

    owner: str
    server: RpcServer
    folder: Path | None
    reserved: ExitStack
    traffic: Moved = field(default_factory=Moved)  # as seen from the server

    def close(self) -> None:
        self.server.close()
        self.reserved.close()


class RpcEngineService(listener.Service):
    """The calls of `rpc_engine.proto`."""

    contract, right, here, over = RPC_CONTRACT, Right.COMPUTE, "own", "An RPC session has ended"

    def __init__(self, cache: WeightCache, notify: listener.Notify, guard: AuthInterceptor | None) -> None:
        """Serve where the `cache` has its layers computed, from its memory. With a `guard`, answer only paired devices
        with the right to compute here."""
        super().__init__(notify, guard)
        self._cache = cache
        self._tensors = TensorCache()
        self._sessions: dict[bytes, _Served] = {}
        self._places = asyncio.Semaphore(MAX_SESSIONS)

    async def offer(self, data: bytes, context: listener.Stream) -> pb.OfferReply:
        """Reply with this device's offer."""
        check_version(parse_message(pb.OfferRequest, data).protocol, "the other device")
        memory = await asyncio.to_thread(self._cache.available)
        cached = await asyncio.to_thread(self._tensors.size, self.owner(context))
        unit = self._cache.unit.name
        return pb.OfferReply(protocol=PROTOCOL, version=VERSION, memory=memory, unit=unit, cached=cached)

    async def serve(self, _orders: Any, stream: listener.Stream) -> None:
        """Serve one session, from Begin to the end of the stream."""
        order = await listener.next_message(stream, pb.RpcOrder) or pb.RpcOrder()
        if order.WhichOneof("order") != "begin":
            raise ProtocolError("The first order is not Begin.", SAME_VERSION)
        begin, name = order.begin, order.begin.session
        check_version(begin.protocol, "the other device")
        if name in self._sessions:
            raise ProtocolError("The session was begun twice.", SAME_VERSION)
        if self._places.locked():
            raise EngineFailed(f"This device has {MAX_SESSIONS} RPC sessions.", "Try again later.")
        what = "".join(filter(str.isprintable, begin.name))[:80] or "A model"
        async with self._places:
            start = partial(self._started, begin, what, self.owner(stream))
            session = self._sessions[name] = await listener.in_thread(start, undo=_Served.close)
            self._notify(f"An RPC server holds a part of {what} for {stream.peer()}.")
            try:
                await listener.write_in_time(stream, pb.RpcReport(serving=pb.Serving()))
                await first_of(self._orders(stream, session), self._beats(stream, session))
            finally:
                del self._sessions[name]
                await self.released(what, session.close)

    def _started(self, begin: pb.Begin, what: str, owner: str) -> _Served:
        """Return a session with its memory and its server, which is started."""
        unit = self._cache.unit
        with self._cache.reserve_bytes(begin.memory, what) as reserved:
            folder = self._tensors.open(owner, begin.weights)
            memory = 0 if unit.name else begin.memory  # a card's driver maps further memory, not to be told apart
            server = RpcServer(unit.hardware, unit.devices, memory=memory, cache=folder)
            return _Served(owner, server, folder, reserved.pop_all())

    async def _orders(self, stream: listener.Stream, session: _Served) -> None:
        while (order := await listener.next_message(stream, pb.RpcOrder)) is not None:
            if order.WhichOneof("order") != "whole":
                raise ProtocolError("The session was begun twice, or an order is empty.", SAME_VERSION)
            if session.folder is not None:
                await asyncio.to_thread(self._tensors.confirm, session.folder)

    async def _beats(self, stream: listener.Stream, session: _Served) -> None:
        while session.server.alive:
            await listener.write_in_time(stream, pb.RpcReport(beat=pb.Beat()))
            if session.traffic.moved and session.traffic.asked_at is None:  # The server has not answered yet.
                AWAKE.touch()
            await asyncio.sleep(HEARTBEAT_SECONDS)
        words = session.server.last_words()
        raise EngineFailed(f"The RPC server has ended: {words or 'without a word'}.", "Begin another session.")

    async def tunnel(self, _frames: Any, stream: listener.Stream) -> None:
        """Carry one connection to the server of a session of the caller."""
        frame = await listener.next_message(stream, pb.RpcFrame) or pb.RpcFrame()
        session = self._sessions.get(frame.session)
        if session is None or session.owner != self.owner(stream):
            raise ProtocolError("The caller has no such session.", "Begin one.")
        try:
            socket = await asyncio.open_connection(HOST, session.server.port, limit=MAX_BUFFER)
        except OSError as error:
            raise EngineFailed(f"The RPC server does not answer: {error.strerror}.", "Begin again.") from None
        await carry(socket, stream.read, stream.write, traffic=session.traffic)


class TensorCache:
    """Folders of received weights. Only one process of a device may write to a folder at a time."""

    def __init__(self, root: Path | None = None, limit: int | None = None) -> None:
        """Keep at most `limit` bytes in all, by default half of the free and the kept bytes."""
        self._root = system.cache_dir() / "tensors" if root is None else root
        self._limit = limit

    def open(self, owner: str, size: int) -> Path | None:
        """Return the folder of a device, with only files that are known to be whole, and room for `size` more bytes;
        None without room."""
        folder = self._root / owner
        try:
            private_folder(folder)
            whole = _read(folder)
            for file in _files(folder):
                if whole.get(file.name) != file.stat().st_size:
                    file.unlink()
            return folder if self._make_room(size, folder) else None
        except OSError:
            return None

    def size(self, owner: str) -> int:
        """Return the bytes that are kept for a device."""
        return sum(_read(self._root / owner).values())

    def confirm(self, folder: Path) -> None:
        """Remember that all files of a folder are whole: the model was loaded from them."""
        with suppress(OSError):
            sizes = {}
            for file in _files(folder):
                with file.open("rb") as data:
                    os.fsync(data.fileno())
                sizes[file.name] = file.stat().st_size
            write_cached(folder / _WHOLE, sizes)

    def _make_room(self, size: int, own: Path) -> bool:
        """Remove the oldest files until there is room, those of the folder `own` last; return whether there is."""
        mine = _files(own)
        others = [one for folder in self._root.iterdir() if folder.is_dir() and folder != own for one in _files(folder)]
        kept, owned = (sum(file.stat().st_size for file in files) for files in ([*mine, *others], mine))
        limit = (shutil.disk_usage(self._root).free + kept) // 2 if self._limit is None else self._limit
        if size > limit:
            return False
        keep_recent(others, limit - size - owned)
        keep_recent(mine, limit - size)
        return True


def _files(folder: Path) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and file.name != _WHOLE]


def _read(folder: Path) -> dict[str, int]:
    """Return the sizes of the files that are whole, by name."""
    return read_cached(folder / _WHOLE, lambda found: {str(name): int(size) for name, size in found.items()}) or {}
