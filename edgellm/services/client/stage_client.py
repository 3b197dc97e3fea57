"""A stage on another device, as the coordinator sees it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic

import grpc
import grpc.aio

from edgellm.errors import DeviceLost, EdgeError, ProtocolError
from edgellm.mesh.messages import MicroBatch, StageLost, StageSpec
from edgellm.mesh.pipeline import Post, StageHost
from edgellm.mesh.placement import DeviceCapability
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HEARTBEAT_SECONDS, HELLO_SECONDS, network_loop, open_channel, run_there
from edgellm.rpc.protos import mesh_pb2 as pb
from edgellm.rpc.trust.device_id import DeviceID
from edgellm.rpc.trust.handshake import meet
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import parsed
from edgellm.services.mesh_codec import ENGINE, MESH, lost, read_event, write_parcel, write_work
from edgellm.services.server.mesh_service import HOLDS, WORK
from edgellm.verifier.requests import VerifyRequest


@dataclass(frozen=True, slots=True)
class Timeouts:
    """A device is lost after `silent_beats` heartbeats without a word, or when it has work but makes no progress for
    `stall` seconds: no byte loaded, no block computed. Beats are counted here, so that a coordinator that was itself
    suspended blames no device."""

    beat: float = HEARTBEAT_SECONDS
    silent_beats: int = 12
    stall: float = 60.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A worker's address, and how to connect: with `trust` by mutual TLS, to a certain `device` if one is known."""

    name: str
    address: Address
    trust: Trust | None = None
    device: DeviceID | None = None

    async def connect(self) -> grpc.aio.Channel:
        if self.trust is None:
            return open_channel(self.address)
        return (await meet(self.address, self.trust, self.device, HELLO_SECONDS))[0]


class RemoteMember:
    """A worker that may hold a part of the model; see `edgellm.mesh.coordinator.MeshDevice`."""

    def __init__(
        self, place: Endpoint, patience: Timeouts | None = None, *, direct: bool = True,
        like: DeviceCapability | None = None,
        layer_bytes: float = 0.0, stage_bytes: float = 0.0, recipe: str = "",
    ) -> None:  # fmt: skip
        """Create the member. `recipe`: the digest of the recipe of this device's own file; without it, layers that were
        brought do not count. `direct`: its stage may send rows to the next device itself, if that can be reached.
        `like`: the known cost of its layers. Memory in bytes: `layer_bytes` for each layer with its cache, and
        `stage_bytes` for a stage as such."""
        self.place, self._patience, self._direct = place, patience or Timeouts(), direct
        self.name = place.name
        self._like = like or DeviceCapability(place.name, frozenset())
        self._layer_bytes, self._stage_bytes, self._recipe = layer_bytes, stage_bytes, recipe

    def able(self, model: str) -> DeviceCapability:
        """Ask what the worker holds. Raises DeviceLost if it does not answer, and the errors of `meet`."""
        return run_there(self._able(model)).result()

    def was_brought(self, model: str) -> bool:
        """Ask whether layers of a model were brought there; they count once their recipe is named. Raises as `able`."""
        return run_there(self._holds(model)).result().brought

    def seat(self) -> RemoteSeat:
        return RemoteSeat(self.place, self._patience, self._direct)

    async def _holds(self, model: str) -> pb.HoldsReply:
        channel = None
        try:
            async with asyncio.timeout(2 * HELLO_SECONDS):
                channel = await self.place.connect()
                ask = channel.unary_unary(HOLDS, pb.HoldsRequest.SerializeToString, pb.HoldsReply.FromString)
                recipe = bytes.fromhex(self._recipe)
                reply: pb.HoldsReply = await ask(
                    pb.HoldsRequest(protocol=MESH, model=bytes.fromhex(model), recipe=recipe)
                )
        except TimeoutError:
            raise lost(f"{self.name} at {self.place.address} does not answer.") from None
        except grpc.aio.AioRpcError as error:
            raise lost(f"{self.name} at {self.place.address}: {explained(error)}") from None
        finally:
            if channel is not None:
                await channel.close(None)
        if reply.protocol != MESH:
            raise ProtocolError(
                f"{self.name} speaks version {reply.protocol} of the mesh, and this device version {MESH}.",
                "Install the same version of edgellm on both.",
            )
        if reply.version != ENGINE:
            raise ProtocolError(
                f"{self.name} computes with llama-cpp-python {reply.version[:40]}, and this device with {ENGINE}.",
                "Install the same version on both.",
            )
        return reply

    async def _able(self, model: str) -> DeviceCapability:
        reply = await self._holds(model)
        most = self._like.most
        if reply.memory and self._layer_bytes:
            most = min(most, max(0, int((reply.memory - self._stage_bytes) / self._layer_bytes)))
        said = bool(reply.begins or reply.ends)  # else it can begin and end anywhere, or is older than the question
        return replace(
            self._like, holds=frozenset(reply.layers), warm=frozenset(reply.warm), most=most, memory=reply.memory,
            begins=frozenset(reply.begins) if said else None, ends=frozenset(reply.ends) if said else None,
        )  # fmt: skip


class RemoteSeat:
    """One stage at a worker; see `edgellm.mesh.pipeline.StageHost`."""

    def __init__(self, place: Endpoint, patience: Timeouts, direct: bool = True) -> None:
        self.place, self._patience, self._direct = place, patience, direct
        self.name = place.name
        self.stage = os.urandom(16)
        self._orders: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._asked: dict[int, VerifyRequest] = {}
        self._work: StageSpec | None = None
        self._closed = False
        self._waiting: Callable[[], bool] = bool
        self._heard = 0  # beats since the last word
        self._mark: tuple[float, int] = (-1.0, -1)
        self._moved = monotonic()
        self._said_idle, self._unsent = False, 0

    def begin(self, work: StageSpec, post: Post, after: StageHost | None, waiting: Callable[[], bool]) -> None:
        self._work, self._waiting = work, waiting
        prepare = write_work(work, self.stage)
        if self._direct and isinstance(after, RemoteSeat) and after.reached_from(self.place):
            prepare.next, prepare.next_stage = str(after.place.address), after.stage
            prepare.next_device = b"" if after.place.device is None else after.place.device.digest
        run_there(self._live(pb.Order(prepare=prepare).SerializeToString(), work, post))

    def reached_from(self, place: Endpoint) -> bool:
        """Return whether a worker at `place` may reach this one by the coordinator's address and protocol."""
        mine = self.place
        return mine.address.loopback == place.address.loopback and (mine.trust is None) == (place.trust is None)

    def expect(self, number: int, request: VerifyRequest) -> None:
        """Accept an answer to this request, whichever stage the parcel was given to."""
        self._asked[number] = request

    def put(self, parcel: MicroBatch) -> None:
        if self._work is not None:
            self._send(pb.Order(parcel=write_parcel(parcel, self._work.wide)))

    def tell(self, session: int) -> None:
        self._send(pb.Order(tell=pb.Tell(session=session)))

    def idle(self) -> bool:
        return self._said_idle and not self._unsent

    def close(self) -> None:
        self._closed = True
        network_loop().call_soon_threadsafe(self._orders.put_nowait, None)

    def _send(self, order: pb.Order) -> None:
        network_loop().call_soon_threadsafe(self._queue, order.SerializeToString())

    def _queue(self, order: bytes) -> None:
        self._unsent += 1
        self._orders.put_nowait(order)

    async def _live(self, prepare: bytes, work: StageSpec, post: Post) -> None:
        gone = StageLost(lost("the line to it is closed."))
        channel = None
        tasks: list[asyncio.Task[None]] = []
        try:
            async with asyncio.timeout(2 * HELLO_SECONDS):
                channel = await self.place.connect()
            call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(WORK, bytes, bytes)()  # type: ignore[call-arg]
            works = (self._write(call, prepare), self._read(call, work, post), self._beats())
            tasks = [asyncio.ensure_future(one) for one in works]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except TimeoutError:
            gone = StageLost(lost(f"nobody answers at {self.place.address}."))
        except grpc.aio.AioRpcError as error:
            blamed = error.code() not in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED)
            gone = StageLost(lost(explained(error)), blamed)
        except ProtocolError as error:
            gone = StageLost(lost(f"it breaks the contract: {error}"))
        except EdgeError as error:
            gone = StageLost(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if channel is not None:
                await channel.close(None)
            if not self._closed:
                post(gone)

    async def _write(self, call: grpc.aio.StreamStreamCall[bytes, bytes], prepare: bytes) -> None:
        """Send orders until the end; the reader reports a broken stream."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(prepare)
            while (data := await self._orders.get()) is not None:
                await call.write(data)
                self._unsent -= data is not _WAITING
            return
        await asyncio.Event().wait()

    async def _read(
        self, call: grpc.aio.StreamStreamCall[bytes, bytes], work: StageSpec, post: Callable[..., None]
    ) -> None:
        while isinstance(data := await call.read(), bytes):
            report = parsed(pb.Report, data)
            self._heard = 0
            if report.WhichOneof("report") == "working":
                self._progress(report)
            elif (event := read_event(report, work, self._asked)) is not None:
                if report.WhichOneof("report") == "answer":
                    self._asked.pop(report.answer.verdict.round, None)
                post(event)
        raise lost("it has ended the stage.")

    def _progress(self, report: pb.Report) -> None:
        """Record the worker's progress; an idle device need not make any."""
        mark = (report.progress, report.working.step)
        idle = not report.working.round and self._work is not None and report.progress >= self._all(self._work)
        self._said_idle = idle
        if mark != self._mark or idle:
            self._mark, self._moved = mark, monotonic()

    def _all(self, work: StageSpec) -> int:
        return len(work.layers)

    async def _beats(self) -> None:
        patience = self._patience
        self._moved = monotonic()
        while True:
            began = monotonic()
            await asyncio.sleep(patience.beat)
            if self._waiting():
                self._orders.put_nowait(_WAITING)
            if monotonic() - began < 2 * patience.beat:  # if late itself, no evidence of silence
                self._heard += 1
            if self._heard > patience.silent_beats:
                raise DeviceLost("it gives no sign of life.", "Is it asleep, or out of reach?")
            if monotonic() - self._moved > patience.stall:
                raise DeviceLost(f"it has got no further for {patience.stall:g} seconds.", "Is it overloaded?")


_WAITING = pb.Order(waiting=pb.Waiting()).SerializeToString()


def explained(error: grpc.aio.AioRpcError) -> str:
    """Return gRPC's error as text for people."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return "what answers there is no worker (edgellm serve --role worker starts one)."
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return "nobody answers, or no longer."
    return error.details() or error.code().name
