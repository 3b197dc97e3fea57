"""The verifier's side of the contract: reads frames, has a model's backend answer them, writes frames.

JSON schemas come from other devices. So each device has a limited number of grammars and one thread for them, which
makes masks before the decoding thread needs them, and a grammar ends with its session.
"""

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from time import monotonic, thread_time
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from edgellm import errors
from edgellm.engine import Model
from edgellm.engine.gguf.writer import tokenizer_file
from edgellm.rpc.channel import CONTRACT, HEARTBEAT_SECONDS, MAX_BUSY_MS
from edgellm.rpc.protos import MAX_GREETING, PROTOCOL, check_version, parse_message
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.protos.trust_pb2 import Offer
from edgellm.rpc.trust.handshake import AuthInterceptor
from edgellm.rpc.trust.trust import Right
from edgellm.services import verification_codec as codec
from edgellm.services.server.listener import Notify, Service, Stream, in_thread, next_message, write_in_time
from edgellm.sleeping import AWAKE
from edgellm.spec.protocols import Capabilities, Tenant, VerifyRequest
from edgellm.spec.sampling import GrammarState, ModelSampling, ReplyGrammar
from edgellm.spec.types import NO_IDS, Constraint, Sampling
from edgellm.verifier.in_process import EXTRA_TOKENS
from edgellm.verifier.worker import ColocatedVerifier, VerifierBackend

EVENTS_PER_SECOND = 50.0  # refill of a device's bucket
BURST = 128  # capacity of a bucket
MAX_WAITING = 128  # waiting requests for a model
_TOKENIZER_PART = 2**19  # bytes that a device must read in time
_HELD_SECONDS = 1.0  # longest pause in reading a session that was answered *busy*: the queue may be free sooner
_MAX_TEMPLATE = MAX_GREETING - 4096  # bytes, so that devices can read the greeting


class Queue:
    """The number of waiting requests of each device. Used by the network's thread alone."""

    def __init__(self, capacity: int) -> None:
        """Let at most `capacity` requests wait in all."""
        self._capacity = capacity
        self._waiting: Counter[str] = Counter()

    def full(self, device: str) -> bool:
        """Return whether `device` has used up its share of the queue, equal for all devices with waiting requests."""
        others = len(self._waiting) - (device in self._waiting)
        return self._waiting[device] >= self._capacity // (others + 1)

    def enter(self, device: str) -> None:
        self._waiting[device] += 1

    def leave(self, device: str) -> None:
        self._waiting -= Counter((device,))


class Pacing:
    """A token bucket per device for events that cost the network thread's time without a verdict: a session, *busy*.
    Used by that thread alone."""

    def __init__(self) -> None:
        self._full_at: dict[str, float] = {}  # time when each device's bucket is full, the soonest first

    def delay(self, device: str) -> float:
        """Count one event, and return the seconds until `device` should be served."""
        now = monotonic()
        while self._full_at and (soonest := next(iter(self._full_at.items())))[1] <= now:
            del self._full_at[soonest[0]]
        full_at = max(now, self._full_at.pop(device, now)) + 1.0 / EVENTS_PER_SECOND
        self._full_at[device] = full_at
        return max(0.0, full_at - now - BURST / EVENTS_PER_SECOND)


@dataclass(slots=True, eq=False)
class VerifyingModel:
    """A model that a server verifies with: its `text`, which has the tokenizer and the chat template, and its backend.
    Beyond `max_waiting` requests at once, further ones are answered *busy*, first those of the devices with the most
    requests. The model wants this `sampling`, and `model_hash` is the SHA-256 of its file in hex, empty if unknown.
    `size_bytes` is the size of that file, 0 if it is unknown: devices choose the largest one. `behind` says in a few
    words what verifies in the server's place, and how; empty: it verifies itself."""

    text: Model
    backend: VerifierBackend
    capabilities: Capabilities
    sampling: ModelSampling
    model_hash: str
    max_waiting: int
    size_bytes: int = 0
    behind: str = ""
    queue: Queue = field(init=False)
    fingerprint: bytes = field(init=False)
    tokenizer: bytes = b""
    """For devices with another tokenizer; b"" if it cannot be sent."""
    tokenizer_hash: bytes = b""

    def __post_init__(self) -> None:
        self.queue = Queue(self.max_waiting)
        self.fingerprint = bytes.fromhex(self.text.vocabulary.fingerprint)
        with suppress(errors.ModelUnsupported, OSError):  # the tokenizer is too long, or the file has been removed
            self.tokenizer = tokenizer_file(self.text.file, self.name)
            self.tokenizer_hash = hashlib.sha256(self.tokenizer).digest()

    @property
    def name(self) -> str:
        return self.capabilities.name

    @property
    def grammar(self) -> Callable[[str], GrammarState] | None:
        """Return what compiles JSON schemas, if replies can follow them."""
        return self.text.grammar if self.capabilities.grammars else None

    def inside(self) -> ColocatedVerifier:
        """Return this verifier for use in this process; its requests are answered together with devices' requests."""
        extra = EXTRA_TOKENS if self.behind else 0
        return ColocatedVerifier(self.backend, self.capabilities, self.grammar, extra)

    def offer(self) -> Offer:
        """Return what paired devices are told of the model."""
        return Offer(
            model=self.name, size=self.size_bytes, vocabulary=self.fingerprint, behind=self.behind,
            tokenizer=self.tokenizer_hash,
        )  # fmt: skip

    def described(self) -> pb.HelloReply:
        can, template = self.capabilities, self.text.chat_template_source
        return pb.HelloReply(
            protocol=PROTOCOL, vocabulary=self.fingerprint, vocabulary_size=self.text.vocabulary.size, model=self.name,
            context_length=can.context_length, model_hash=bytes.fromhex(self.model_hash),
            chat_template=template if len(template.encode()) <= _MAX_TEMPLATE else "",
            logprobs=can.logprobs, penalties=can.penalties, grammars=can.grammars,
            behind=self.behind, likely_tokens=can.choice.likely, draws_itself=can.choice.draws_itself,
            tokenizer=self.tokenizer_hash,
            sampling=codec.write_wanted(self.sampling),
        )  # fmt: skip


def find_model(models: Sequence[VerifyingModel], wanted: str) -> VerifyingModel:
    """Return the model that a device wants; "" is the only one. Raises ModelNotFound: there is no such model, or none
    is named and there are several; names the models that there are."""
    if not models:
        raise errors.ModelNotFound("None of its servers has answered yet.", "Start one of them.")
    if not wanted and len(models) == 1:
        return models[0]
    if found := next((model for model in models if model.name == wanted), None):
        return found
    named = ", ".join(model.name for model in models)
    what = f"It does not serve {wanted[:200]!r}, but {named}." if wanted else f"It serves several models: {named}."
    raise errors.ModelNotFound(what, "Name one of them.")


class NotReady(errors.EdgeError):
    """A verifier cannot verify yet: what it does is told to the device, which asks again."""

    rpc_status = codec.PREPARING.name


class VerificationService(Service):
    """The calls of the contract, for each of several models."""

    contract, right = CONTRACT, Right.VERIFY

    def __init__(self, notify: Notify, guard: AuthInterceptor | None = None) -> None:
        super().__init__(notify, guard)
        self.models: tuple[VerifyingModel, ...] = ()
        self._preparing = ""
        self.draining = asyncio.Event()  # set: only requests received so far are answered, and every session is told
        self._pacing = Pacing()
        self._owners: WeakValueDictionary[str, GrammarOwner] = WeakValueDictionary()
        self._numbers = count(1)

    def prepare(self, doing: str) -> None:
        self._preparing = doing

    def add(self, model: VerifyingModel) -> None:
        self.models = (*self.models, model)

    async def hello(self, request: bytes, _context: Stream) -> pb.HelloReply:
        """Reply with a description of the model that is asked for. The device compares, so nothing else is read."""
        try:
            wanted = parse_message(pb.HelloRequest, request, MAX_GREETING).model
        except errors.ProtocolError:
            wanted = ""  # the device has another version, as the reply tells it
        if not self.models and self._preparing:
            raise NotReady(self._preparing, "Ask again.")
        return find_model(self.models, wanted).described()

    async def tokenizer(self, request: bytes, _context: Stream) -> pb.TokenizerPart:
        asked = parse_message(pb.TokenizerRequest, request, MAX_GREETING)
        data = find_model(self.models, asked.model).tokenizer
        if not data:
            raise errors.ProtocolError("The tokenizer of this model is not sent.", errors.SAME_VERSION)
        return pb.TokenizerPart(data=data[asked.offset : asked.offset + _TOKENIZER_PART], size=len(data))

    async def session(self, _frames: Any, stream: Stream) -> None:
        session = _Reply(self, stream, next(self._numbers))
        self._notify(f"Session {session.number} from {stream.peer()} begins.")
        try:
            await session.serve()
        except errors.EdgeError as error:
            self._notify(f"Session {session.number} is closed: {error.what}")
            raise
        finally:
            session.end()  # before the goodbye, which a device that does not read never takes
            self._notify(f"Session {session.number} ends.")

    async def pause(self, device: str, seconds: float = 0.0) -> None:
        """Read nothing for `seconds`, or longer if the device has asked in vain too often."""
        if (seconds := max(seconds, self._pacing.delay(device))) > 0.0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.draining.wait(), seconds)

    def grammars(self, device: str) -> "GrammarOwner":
        return self._owners.setdefault(device, GrammarOwner())


class _Reply:
    """A session of a device, which opens it with its first frame, and then asks for one verdict after the other."""

    def __init__(self, service: VerificationService, stream: Stream, number: int) -> None:
        """Answer over `stream`. A paired device is one tenant over all its connections; on this machine each connection
        is one, and all may share cached prompts."""
        self.number, self._service, self._stream = number, service, stream
        device = service.owner(stream)
        self._tenant = Tenant(device or stream.peer(), cache_salt=device)
        self._model: VerifyingModel | None = None
        self._grammar: SessionGrammar | None = None
        self._text, self._round = NO_IDS, 0  # the tokens that the session holds, and the number of the latest request

    async def serve(self) -> None:
        """Answer the device until it has finished, or the verifier drains. Raises EdgeError: the session is to end."""
        await self._service.pause(self._tenant.device)
        if (frame := await self._next()) is not None:
            model, sampling = self._opened(frame)
            while (frame := await self._next()) is not None:
                request = self._request(frame, model, sampling)
                if model.queue.full(self._tenant.device):
                    await self._push_back(request, model.backend.wait_seconds())
                elif self._grammar is not None and not await self._grammar.prepare(request):
                    await self._push_back(request, _HELD_SECONDS)
                else:
                    await self._answer(request, model)
        if self._service.draining.is_set():
            await self._write(draining=pb.Draining())

    def end(self) -> None:
        """Have the backend forget the session, and free its grammar."""
        if self._model is not None:
            self._model.backend.end_session(self.number)
        if self._grammar is not None:
            self._grammar.end()

    def _opened(self, frame: pb.DeviceFrame) -> tuple[VerifyingModel, Sampling]:
        if frame.WhichOneof("frame") != "open":
            raise errors.ProtocolError("The first frame is not Open.", errors.SAME_VERSION)
        check_version(frame.open.protocol, "the device")
        model = find_model(self._service.models, frame.open.model)
        if frame.open.vocabulary != model.fingerprint:
            raise errors.VocabularyMismatch(
                "The device expects a verifier with another vocabulary.", "Connect again: they are compared then."
            )
        sampling, self._model = codec.read_sampling(frame.open.sampling), model
        if (constraint := sampling.constraint) is not None:
            self._grammar = SessionGrammar(self._service.grammars(self._tenant.device), constraint, model.grammar)
        return model, sampling

    def _request(self, frame: pb.DeviceFrame, model: VerifyingModel, sampling: Sampling) -> VerifyRequest:
        """Return a request with the whole text: the tokens that the session holds, and its own. Raises ProtocolError:
        some are missing."""
        if frame.WhichOneof("frame") != "verify":
            raise errors.ProtocolError("The session was opened twice, or a frame is empty.", errors.SAME_VERSION)
        size, context = model.text.vocabulary.size, model.capabilities.context_length
        request = codec.read_verify(frame.verify, size, context, self.number, sampling, self._tenant)
        if request.round <= self._round:
            raise errors.ProtocolError(
                f"Round {request.round} was sent after round {self._round}.", errors.SAME_VERSION
            )
        if request.position > len(self._text):
            raise errors.ProtocolError(f"The session holds only {len(self._text)} tokens.", errors.SAME_VERSION)
        request.prefix = self._text = np.concatenate((self._text[: request.position], request.prefix))
        request.position, self._round = 0, request.round
        return request

    async def _answer(self, request: VerifyRequest, model: VerifyingModel) -> None:
        """Write the backend's verdict on a request, and signs of life meanwhile."""
        model.queue.enter(self._tenant.device)
        try:
            with AWAKE.working():
                future = asyncio.wrap_future(model.backend.submit(request))
                future.add_done_callback(lambda done: done.cancelled() or done.exception())  # the device may have left
                while not (await asyncio.wait({future}, timeout=HEARTBEAT_SECONDS))[0]:
                    read = {"computed": request.computed, "cached": request.cached}
                    await self._write(working=pb.Working(round=request.round, step=model.backend.steps, **read))
        finally:
            model.queue.leave(self._tenant.device)
        try:
            verdict = future.result()
        except errors.VerifierBusy as busy:
            await self._push_back(request, busy.seconds)
        else:
            self._text = codec.text_after(request, verdict)
            await write_in_time(self._stream, codec.write_verdict(request.round, verdict))

    async def _push_back(self, request: VerifyRequest, seconds: float) -> None:
        """Have the device ask again after about `seconds`. The session's tokens stay."""
        busy = pb.Busy(round=request.round, retry_ms=min(math.ceil(seconds * 1e3), MAX_BUSY_MS))
        await self._write(busy=busy)
        await self._service.pause(self._tenant.device, min(busy.retry_ms / 1e3, _HELD_SECONDS))

    async def _write(self, **frame: Any) -> None:
        await write_in_time(self._stream, pb.VerifierFrame(**frame))

    async def _next(self) -> pb.DeviceFrame | None:
        """Return the next frame; None when the device has finished, or this verifier is draining."""
        reading = asyncio.ensure_future(next_message(self._stream, pb.DeviceFrame))
        draining = asyncio.ensure_future(self._service.draining.wait())
        try:
            await asyncio.wait({reading, draining}, return_when=asyncio.FIRST_COMPLETED)
            return reading.result() if reading.done() else None
        finally:
            reading.cancel()
            draining.cancel()


R = TypeVar("R")

MAX_GRAMMARS = 8  # grammars of one device at once, each of up to some tens of megabytes
_SLOW_SECONDS = 0.002  # processor time above which making a mask counts as slow


class GrammarOwner:
    """A device, with its grammars on this verifier."""

    def __init__(self) -> None:
        self.places, self._turn = asyncio.Semaphore(MAX_GRAMMARS), asyncio.Lock()

    async def run(self, work: Callable[[], R]) -> R:
        """Return the result of `work`, in a thread: one at a time, also where a device leaves meanwhile."""
        async with self._turn:
            return await in_thread(work)


class SessionGrammar:
    """The grammar of one session of `owner`, from its first request on until `end`."""

    def __init__(
        self, owner: GrammarOwner, constraint: Constraint, compile_schema: Callable[[str], GrammarState] | None
    ) -> None:
        """Compile by `compile_schema`; None: this verifier follows no schemas."""
        self._owner, self._constraint, self._compile = owner, constraint, compile_schema
        self._grammar: ReplyGrammar | None = None
        self._holds = self._slow = False

    async def prepare(self, request: VerifyRequest) -> bool:
        """Have the verdict on `request` follow the grammar, with masks that are made now; return False where the device
        has too many grammars for another one. Raises ProtocolError: the schema cannot be followed; EngineFailed: the
        text breaks the grammar."""
        if not self._holds:
            if self._owner.places.locked():
                return False
            self._holds = await self._owner.places.acquire()
        try:
            await self._owner.run(lambda: self._make_masks(request))
        except errors.InvalidOption as error:
            raise errors.ProtocolError(error.what, error.next_step) from None
        if self._slow:  # the decoding thread would make masks while other devices wait
            request.extra = 0
        request.grammar = self._grammar
        return True

    def _make_masks(self, request: VerifyRequest) -> None:
        if self._grammar is None:
            if self._compile is None:
                raise errors.ProtocolError("This verifier follows no JSON schemas.", errors.SAME_VERSION)
            self._grammar = ReplyGrammar(self._compile(self._constraint.schema), self._constraint)
        began = thread_time()
        self._grammar.prepare(request.prefix, request.draft.ids)
        self._slow |= thread_time() - began > _SLOW_SECONDS * (len(request.draft) + 1)

    def end(self) -> None:
        """Give the device's place back; may be called again."""
        if self._holds:
            self._owner.places.release()
        self._holds, self._grammar = False, None
