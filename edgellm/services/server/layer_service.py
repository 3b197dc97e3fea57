"""The calls of `layers.proto`: store layers for other devices, list them, and measure this device."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict

from edgellm.engine.gguf.synthetic_layers import Blocks
from edgellm.errors import SAME_VERSION, MeasureFailed, ProtocolError
from edgellm.rpc.layers import CONTRACT, PORTION, read_manifest, read_pieces, write_facts
from edgellm.rpc.measuring import MOST_SENT, DeviceFigures, read_blocks, write_figures
from edgellm.rpc.protos import check_version, parse_message
from edgellm.rpc.protos import layers_pb2 as pb
from edgellm.rpc.trust.handshake import AuthInterceptor, Method
from edgellm.rpc.trust.trust import Right
from edgellm.services.server.listener import Notify, Service, Stream, in_thread
from edgellm.sleeping import AWAKE
from edgellm.storage.layer_store import OWN, LayerStore

Measurer = Callable[[Blocks, float], DeviceFigures]
"""Measures this device with the given layers, unless its last figures are at most that many seconds old."""


class LayerService(Service):
    """The calls about layers, for devices with the right to files, and measurements, for those with the right to
    compute. Disk access is in threads; one measurement of the device at a time."""

    contract, here = CONTRACT, OWN

    def __init__(
        self, store: LayerStore, notify: Notify, guard: AuthInterceptor | None = None, measurer: Measurer | None = None
    ) -> None:
        """Without a `measurer` this device cannot be measured."""
        super().__init__(notify, guard)
        self._store, self._measurer = store, measurer
        self._measuring = asyncio.Lock()

    def right_for(self, call: Method) -> Right:
        return Right.COMPUTE if call in (self.measure, self.flow) else Right.FILES

    async def held(self, data: bytes, stream: Stream) -> pb.HeldReply:
        check_version(parse_message(pb.HeldRequest, data).protocol, "the other device")
        return write_facts(await asyncio.to_thread(self._store.facts, self.owner(stream)))

    async def clean(self, data: bytes, stream: Stream) -> pb.CleanReply:
        request = parse_message(pb.CleanRequest, data)
        check_version(request.protocol, "the other device")
        removed = await asyncio.to_thread(self._store.clean, request.fingerprint.hex() or None, self.owner(stream))
        return pb.CleanReply(**asdict(removed))

    async def reserve(self, data: bytes, stream: Stream) -> pb.There:
        request = parse_message(pb.Wanted, data)
        check_version(request.protocol, "the other device")
        manifest, owner = read_manifest(request.recipe), self.owner(stream)
        return pb.There(sizes=await asyncio.to_thread(self._store.reserve, manifest, owner))

    async def put(self, data: bytes, stream: Stream) -> pb.Arrived:
        portion, owner = parse_message(pb.Portion, data), self.owner(stream)
        if not 0 < len(portion.data) <= PORTION:
            raise ProtocolError(f"A portion has {len(portion.data)} bytes; {PORTION} are allowed.", SAME_VERSION)
        (piece,) = read_pieces([portion.piece])
        AWAKE.touch()
        size = await asyncio.to_thread(self._store.append, piece, portion.offset, portion.data, owner)
        if size == piece.size:
            self._notify(f"{str(piece).capitalize()} has arrived.")
        return pb.Arrived(size=size)

    async def measure(self, data: bytes, _stream: Stream) -> pb.Figures:
        request = parse_message(pb.MeasureRequest, data)
        check_version(request.protocol, "the other device")
        if (measurer := self._measurer) is None:
            raise MeasureFailed("This device does not measure itself.", "Start a worker: edgellm serve --role worker")
        blocks = read_blocks(request)
        with AWAKE.working():
            async with self._measuring:
                return write_figures(await in_thread(lambda: measurer(blocks, request.oldest)))

    async def flow(self, data: bytes, _stream: Stream) -> pb.FlowReply:
        want = parse_message(pb.FlowRequest, data).want
        if want > MOST_SENT:
            raise ProtocolError(f"A measurement of {want} bytes is too large.", f"Ask for at most {MOST_SENT}.")
        return pb.FlowReply(data=bytes(want))
