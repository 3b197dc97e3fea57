"""The verifier's side of the contract: reads frames, has the backend answer them, writes frames."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import grpc
import grpc.aio

from edgellm.errors import (
    SAME_VERSION,
    ContextFull,
    DeviceStuck,
    EdgeError,
    ModelNotFound,
    PeerTooNew,
    PeerTooOld,
    ProtocolError,
    VerifierBusy,
    VocabularyMismatch,
)
from edgellm.rpc.channel import HEARTBEAT_SECONDS, MAX_BUSY_MS, PROTOCOL, SERVICE
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.trust.auth_interceptor import AuthInterceptor, caller_id
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.versions import MAX_GREETING, MAX_VOCABULARY, check_version, parse_message
from edgellm.services.handshake import PREPARING, first_different_block
from edgellm.services.server.listener import EventKind, Notify, Service, write_in_time
from edgellm.services.server.session_grammar import GrammarOwner, SessionGrammar
from edgellm.services.server.verifying_model import VerifyingModel, find_model
from edgellm.services.verification_codec import (
    read_sampling,
    read_verify,
    write_verdict,
)
from edgellm.spec.types import Sampling
from edgellm.spec.verifier import Tenant, VerifyRequest
from edgellm.verifier.fairness import Pacing
from edgellm.verifier.judgement import Answer, MissingPrefix

Stream: TypeAlias = grpc.aio.ServicerContext[bytes, bytes]


class _Reply:
    """A session of a device; it has a model once it is open."""

    def __init__(self, number: int, tenant: Tenant) -> None:
        self.number, self.tenant = number, tenant
        self.model: VerifyingModel | None = None
        self.grammar: SessionGrammar | None = None

    def end(self) -> None:
        """Have the backend forget the session, and free its grammar."""
        if self.model is not None:
            self.model.backend.end_session(self.number)
        if self.grammar is not None:
            self.grammar.end()


class VerificationService(Service):
    """The calls of the contract, for each of several models."""

    right = Right.VERIFY

    def __init__(
        self,
        models: Sequence[VerifyingModel],
        *,
        notify: Notify,
        guard: AuthInterceptor | None = None,
        preparing: Callable[[], str] = lambda: "",
    ) -> None:
        """Serve `models`. With a `guard`, only paired devices with the right to have drafts verified are answered.
        `preparing` returns what is done before there is a model, for devices; "" if nothing is."""
        super().__init__(notify, guard)
        self._models = tuple(models)
        self._pacing = Pacing()
        self._owners: WeakValueDictionary[str, GrammarOwner] = WeakValueDictionary()
        self._preparing = preparing
        self._numbers = count(1)
        self._draining = asyncio.get_running_loop().create_future()

    def add(self, model: VerifyingModel) -> None:
        """Serve another model from now on."""
        self._models = (*self._models, model)

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """Return the handlers for `add_generic_rpc_handlers`. They take bytes, to parse only after the guard."""
        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Hello": grpc.unary_unary_rpc_method_handler(
                    self._guarded(self.hello), None, pb.HelloReply.SerializeToString
                ),
                "CompareVocabulary": grpc.unary_unary_rpc_method_handler(
                    self._guarded(self.compare_vocabulary), None, pb.VocabularyBlock.SerializeToString
                ),
                "Tokenizer": grpc.unary_stream_rpc_method_handler(self._guarded(self.tokenizer)),
                "Session": grpc.stream_stream_rpc_method_handler(self._guarded(self.session)),
            },
        )

    def drain(self) -> None:
        """Answer only requests received so far from now on, and tell every session."""
        if not self._draining.done():
            self._draining.set_result(None)

    async def hello(self, request: bytes, context: Stream) -> pb.HelloReply:
        """Reply with a description of the model that is asked for. The device compares, so nothing else is read."""
        try:
            wanted = parse_message(pb.HelloRequest, request, MAX_GREETING).model
        except ProtocolError:
            wanted = ""  # the device has another version, as the reply tells it
        if not self._models and (preparing := self._preparing()):
            await context.abort(PREPARING, preparing)
        try:
            return self._find(wanted).described()
        except ModelNotFound as error:
            await context.abort(_STATUS[ModelNotFound], error.what)
            raise  # abort does not return

    async def compare_vocabulary(self, request: bytes, context: Stream) -> pb.VocabularyBlock:
        """Reply with this side's tokens of the first block that differs."""
        try:
            hashes = parse_message(pb.VocabularyHashes, request, MAX_VOCABULARY)
            return first_different_block(self._find(hashes.model).vocabulary, hashes)
        except (ProtocolError, ModelNotFound) as error:
            await context.abort(_STATUS[type(error)], error.what)
            raise  # abort does not return

    async def tokenizer(self, request: bytes, stream: Stream) -> None:
        """Send the tokenizer of the model that is asked for, in parts."""
        try:
            model = self._find(parse_message(pb.TokenizerRequest, request, MAX_GREETING).model)
            if not model.tokenizer:
                raise ProtocolError("The tokenizer of this model is not sent.", SAME_VERSION)
            data, size = model.tokenizer, len(model.tokenizer)
            for at in range(0, size, _TOKENIZER_PART):
                part = pb.TokenizerPart(data=data[at : at + _TOKENIZER_PART], size=0 if at else size)
                await write_in_time(stream, part)
        except (ProtocolError, ModelNotFound, DeviceStuck) as error:
            await stream.abort(_STATUS[type(error)], error.what)

    def _find(self, wanted: str) -> VerifyingModel:
        return find_model(self._models, wanted)

    async def session(self, _frames: Any, stream: Stream) -> None:
        """Serve one session, from Open to the end of the stream."""
        number = next(self._numbers)
        self._notify(EventKind.CONNECTED, f"Session {number} from {stream.peer()} begins.")
        session = _Reply(number, self._tenant(stream))
        try:
            await self._serve(session, stream)
        except EdgeError as error:
            session.end()  # a device that does not read never takes the goodbye
            self._notify(_event_kind(error), f"Session {number} is closed: {error.what}")
            await stream.abort(_STATUS.get(type(error), grpc.StatusCode.INTERNAL), error.what)
        finally:
            session.end()
            self._notify(EventKind.ENDED, f"Session {number} ends.")

    def _tenant(self, stream: Stream) -> Tenant:
        """Return the tenant of a stream: a paired device is one tenant over all its connections; on this machine each
        connection is one, and all may share cached prompts."""
        if self._guard is None:
            return Tenant(stream.peer())
        device = caller_id(stream).digest.hex()
        return Tenant(device, cache_salt=device)

    async def _serve(self, session: _Reply, stream: Stream) -> None:
        number, tenant = session.number, session.tenant
        sampling = Sampling()
        await self._pause(tenant)
        last, again = 0, False  # the latest round, and whether it was answered with NeedPrefix
        while (frame := await self._next(stream)) is not None:
            if (model := session.model) is None:
                model, sampling = self._opened(frame)
                session.model = model
                if (constraint := sampling.constraint) is not None:
                    owner = self._owners.setdefault(tenant.device, GrammarOwner())
                    session.grammar = SessionGrammar(owner, constraint, model.grammar)
                continue
            if frame.WhichOneof("frame") != "verify":
                raise ProtocolError("The session was opened twice, or a frame is empty.", SAME_VERSION)
            request = read_verify(frame.verify, model.bounds, number, sampling, tenant)
            if request.round < last or (request.round == last and not again):
                raise ProtocolError(f"Round {request.round} was sent after round {last}.", SAME_VERSION)
            last, again = request.round, False
            if not await self._admitted(model, session.grammar, request, stream):
                continue
            answer = await self._answer(model, request, stream)
            if isinstance(answer, VerifierBusy):
                await self._push_back(request, answer.seconds, stream)
                continue
            if isinstance(answer, EdgeError):
                raise answer
            if isinstance(answer, MissingPrefix):
                again = True
                need = pb.NeedPrefix(round=request.round, position=answer.position)
                await write_in_time(stream, pb.VerifierFrame(need_prefix=need))
                await self._pause(tenant)
            else:
                if session.grammar is not None:
                    session.grammar.observe(request, answer)
                await write_in_time(stream, write_verdict(request.round, answer))
                took = 1e3 * answer.seconds
                _log.debug("session %d: %d of %d accepted, %.1f ms", number, answer.accepted, len(request.draft), took)
        if self._draining.done():
            await write_in_time(stream, pb.VerifierFrame(draining=pb.Draining()))

    async def _admitted(
        self, model: VerifyingModel, grammar: SessionGrammar | None, request: VerifyRequest, stream: Stream
    ) -> bool:
        """Return whether a request can be answered now, by the session's `grammar`; if not, have the device ask
        again."""
        if model.queue.full(request.tenant.device):
            await self._push_back(request, model.backend.wait_seconds(), stream)
        elif grammar is not None and not await grammar.prepare(request):
            await self._push_back(request, _HELD_SECONDS, stream)
        else:
            return True
        return False

    async def _push_back(self, request: VerifyRequest, seconds: float, stream: Stream) -> None:
        """Have the device ask again after about `seconds`. The session's tokens stay."""
        busy = pb.Busy(round=request.round, retry_ms=_milliseconds(seconds))
        _log.info("session %d is asked to retry in %d ms", request.session, busy.retry_ms)
        await write_in_time(stream, pb.VerifierFrame(busy=busy))
        await self._pause(request.tenant, min(busy.retry_ms / 1e3, _HELD_SECONDS))

    async def _pause(self, tenant: Tenant, seconds: float = 0.0) -> None:
        """Read nothing for `seconds`, or longer if the device has asked in vain too often."""
        if (seconds := max(seconds, self._pacing.delay(tenant.device))) > 0.0:
            await asyncio.wait({self._draining}, timeout=seconds)

    def _opened(self, frame: pb.DeviceFrame) -> tuple[VerifyingModel, Sampling]:
        if frame.WhichOneof("frame") != "open":
            raise ProtocolError("The first frame is not Open.", SAME_VERSION)
        check_version(frame.open.protocol, PROTOCOL, "the device")
        model = self._find(frame.open.model)
        if frame.open.vocabulary != model.fingerprint:
            raise VocabularyMismatch(
                "The device expects a verifier with another vocabulary.", "Connect again: they are compared then."
            )
        return model, read_sampling(frame.open.sampling)

    async def _answer(self, model: VerifyingModel, request: VerifyRequest, stream: Stream) -> Answer:
        """Return the backend's answer to a request; send signs of life meanwhile."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Answer] = loop.create_future()

        def deliver(answer: Answer) -> None:
            loop.call_soon_threadsafe(_settle, future, answer)

        model.queue.enter(request.tenant.device)
        try:
            model.backend.submit(request, deliver)
            while not (await asyncio.wait({future}, timeout=HEARTBEAT_SECONDS))[0]:
                step, computed = model.backend.steps, request.computed
                working = pb.Working(round=request.round, step=step, computed=computed)
                await write_in_time(stream, pb.VerifierFrame(working=working))
        finally:
            model.queue.leave(request.tenant.device)
        return future.result()

    async def _next(self, stream: Stream) -> pb.DeviceFrame | None:
        """Return the next frame; None when the device has finished, or this verifier is draining."""
        if self._draining.done():
            return None
        reading = asyncio.ensure_future(stream.read())
        try:
            await asyncio.wait({reading, self._draining}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                return None
            data = reading.result()
        finally:
            reading.cancel()
        if not isinstance(data, bytes):  # the end of the stream
            return None
        return parse_message(pb.DeviceFrame, data)


def _settle(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():  # the future is cancelled when the device leaves
        future.set_result(answer)


def _milliseconds(seconds: float) -> int:
    """Return a wait for a device in milliseconds, not so short that it would ask all the time."""
    return max(_SHORTEST_BUSY_MS, min(math.ceil(seconds * 1e3), MAX_BUSY_MS))


def _event_kind(error: EdgeError) -> EventKind:
    return EventKind.REFUSED if type(error) in _STATUS else EventKind.FAILED


_STATUS = {
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    PeerTooOld: grpc.StatusCode.FAILED_PRECONDITION,
    PeerTooNew: grpc.StatusCode.FAILED_PRECONDITION,
    VocabularyMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    ModelNotFound: grpc.StatusCode.NOT_FOUND,
    ContextFull: grpc.StatusCode.OUT_OF_RANGE,
    DeviceStuck: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
_log = logging.getLogger(__name__)
_TOKENIZER_PART = 2**16  # bytes that a device must read in time
_SHORTEST_BUSY_MS = 50
_HELD_SECONDS = 1.0  # longest pause in reading a session that was answered *busy*: the queue may be free sooner
