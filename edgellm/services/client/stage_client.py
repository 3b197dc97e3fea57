"""A stage on another device, as the coordinator sees it; and the endpoints of workers by names and addresses."""

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace

import grpc
import grpc.aio

from edgellm.coldstart.costs import Device, LayersOnDevice
from edgellm.errors import DeviceLost, EdgeError, LayersRefused, NotPermitted
from edgellm.layer_range import HERE, LayerRange
from edgellm.mesh.messages import MicroBatch, StageLost, StageSpec
from edgellm.mesh.pipeline import Pipeline, Post
from edgellm.rpc.channel import run_in_network_loop
from edgellm.rpc.discovery.interfaces import chosen_hosts
from edgellm.rpc.discovery.peer_probe import probe_peers
from edgellm.rpc.layers import Worker, read_pieces, write_pieces
from edgellm.rpc.link import WORKER_TIMING, Endpoint, ServiceLink, Timing
from edgellm.rpc.protos import PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.rpc.trust.trust import Right, Trust
from edgellm.services.mesh_codec import HOLDS, WORK, check_engine, read_event, write_micro_batch, write_work
from edgellm.storage.layer_pieces import LayerPiece

_WAITING = pb.Order(waiting=pb.Waiting()).SerializeToString()

OwnPieces = Callable[[Collection[LayerRange]], Sequence[LayerPiece]]
"""Returns the known pieces of this device's own model file, and the pieces of the given layers."""


class RemoteDevice:
    """The `MeshDevice` of a worker, which may hold a part of the model."""

    def __init__(
        self, endpoint: Endpoint, timing: Timing = WORKER_TIMING, *, known: Device | None = None,
        own: OwnPieces = lambda _wanted: (),
    ) -> None:  # fmt: skip
        """Set up the device. `known`: the device as it was measured. Pieces that were deployed to the worker count if
        they are among the `own` pieces."""
        self.endpoint, self._timing = endpoint, timing
        self.name = endpoint.name
        self._known, self._own = known or Device.unmeasured(endpoint.name), own

    def describe(self, model: str) -> Device:
        """Return the worker as it is now. Raise DeviceLost if it does not answer."""
        known = self._own(())
        reply = run_in_network_loop(self._holds(model, known)).result()
        brought: Sequence[LayerPiece] = ()
        with suppress(LayersRefused):
            brought = read_pieces(reply.brought)
        layers = {piece.layers for piece in brought} - {piece.layers for piece in known}
        if layers:  # hashes come from this device's own file: only pieces of that very file are used
            reply = run_in_network_loop(self._holds(model, self._own(layers))).result()
        pieces = tuple(LayerRange(first, last + 1) for first, last in zip(reply.begins, reply.ends, strict=False))
        cut = frozenset(map(LayerRange, reply.cut[::2], reply.cut[1::2])) if reply.whole else None
        found = LayersOnDevice(frozenset(reply.layers), frozenset(reply.warm), pieces or None, cut)
        return self._known.updated(found, float(reply.memory), reply.unit)

    def stage_host(self) -> "RemoteStageHost":
        return RemoteStageHost(self.endpoint, self._timing, self._own(()))

    async def _holds(self, model: str, pieces: Sequence[LayerPiece]) -> pb.HoldsReply:
        request = pb.HoldsRequest(protocol=PROTOCOL, model=bytes.fromhex(model), pieces=write_pieces(pieces))
        reply = parse_message(pb.HoldsReply, await self.endpoint.ask(HOLDS, request))
        check_version(reply.protocol, self.name)
        check_engine(reply.version, self.name)
        return reply


class RemoteStageHost:
    """The `StageHost` of one stage at a worker."""

    def __init__(self, endpoint: Endpoint, timing: Timing, pieces: Sequence[LayerPiece]) -> None:
        """`pieces`: pieces of the coordinator's own file, with which a worker that lacks the file may compute."""
        self.endpoint, self._pieces = endpoint, tuple(pieces)
        self._link = ServiceLink(WORK, timing, accepted=True)
        self._half = self._closed = False  # half: rows are sent as 16-bit floats

    @property
    def name(self) -> str:
        return self.endpoint.name

    def begin(self, work: StageSpec, post: Post, pipeline: Pipeline) -> None:
        self._half = work.half
        self._link.post(pb.Order(prepare=write_work(replace(work, pieces=self._pieces))))
        run_in_network_loop(self._live(work, post, pipeline))

    def send(self, batch: MicroBatch) -> None:
        self._link.post(pb.Order(parcel=write_micro_batch(batch, self._half)))

    def close(self) -> None:
        self._closed = True
        self._link.close()

    async def _live(self, work: StageSpec, post: Post, pipeline: Pipeline) -> None:
        error, blamed = await self.endpoint.hold(lambda channel: self._hold(channel, work, post, pipeline))
        if not self._closed:
            post(StageLost(error, blamed))

    async def _hold(self, channel: grpc.aio.Channel, work: StageSpec, post: Post, pipeline: Pipeline) -> None:
        """Hold the stage until it ends."""
        link = self._link

        def take(data: bytes) -> None:
            report = parse_message(pb.Report, data)
            if report.WhichOneof("report") == "working":
                owes = pipeline.owes(self) and not link.unsent  # without rows it need not make any progress
                link.progress((report.progress, report.working.step) if owes else object())
            elif (event := read_event(report, work, pipeline.judged)) is not None:
                post(event)

        def beat(waited: float) -> None:
            if pipeline.waiting():
                link.send(_WAITING, count=0)
            if trouble := link.trouble(waited):
                raise DeviceLost(f"it {trouble}.", "Check that it is awake and reachable, and not overloaded.")

        await link.run(channel, take, beat)


def worker_endpoints(names: Sequence[str], peers: Sequence[str], discovered: Sequence[Worker]) -> dict[str, Endpoint]:
    """Return workers by name: the `discovered` ones, or else workers at the addresses `peers`; and all further `names`
    but `HERE`, which are addresses or names of paired devices. Raises InvalidOption, NotPermitted, NotPaired,
    EdgeError: a device does not answer, has granted this one no right to compute there, or cannot be used."""
    given = [worker.reached() for worker in discovered] or map(Endpoint.parse, peers)
    endpoints = {endpoint.name: endpoint for endpoint in given}
    further = [name for name in dict.fromkeys(names) if name not in (HERE, *endpoints)]
    endpoints |= {name: Endpoint.parse(name) for name in further if ":" in name}
    if paired := [name for name in further if ":" not in name]:
        trust = Trust.load()
        answers = probe_peers(trust, list(map(trust.peers.find, paired)), chosen_hosts())
        for name, (peer, answer) in zip(paired, answers, strict=True):
            if isinstance(answer, EdgeError):
                raise answer
            if Right.COMPUTE not in answer.rights:
                raise NotPermitted(
                    f"{name} does not allow this device to have layers computed there.",
                    f"To allow it, run there: edgellm peers grant {trust.identity.id.short} compute",
                )
            endpoints[name] = Endpoint(name, answer.address, trust, peer.id)
    return endpoints
