"""The real decoders of messages that arrive over a link, without the network."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from typing import Any, cast

import numpy as np

from edgellm.engine import Vocabulary
from edgellm.errors import EdgeError
from edgellm.rpc.address import Address
from edgellm.rpc.channel import HELLO, PROTOCOL
from edgellm.rpc.protos import edgellm_pb2 as pb
from edgellm.rpc.protos import trust_pb2 as trust_pb
from edgellm.rpc.trust.handshake import LABEL, read_welcome
from edgellm.rpc.trust.identity import Certificate, Identity
from edgellm.rpc.trust.pairing import Code, Exchange, read_introduction
from edgellm.rpc.trust.peer_store import Peers
from edgellm.rpc.trust.rights import Right
from edgellm.rpc.trust.trust import Trust
from edgellm.rpc.versions import DEVICES_PROTOCOL, PAIRING_PROTOCOL, check_version, parse_message
from edgellm.services.client.link import Timing
from edgellm.services.client.verifier_client import Stream
from edgellm.services.handshake import VerifierInfo, greet
from edgellm.services.server.verification_service import VerificationService, VerifyingModel
from edgellm.services.verification_codec import write_open, write_verdict, write_verify, write_wanted
from edgellm.spec.lost_verifier import VerdictDeadline
from edgellm.spec.model_sampling import ModelSampling
from edgellm.spec.protocols import Capabilities
from edgellm.spec.types import GREEDY, Chunk, Ids, Logprobs, Sampling, Verdict
from edgellm.spec.verification import judge
from edgellm.spec.verifier import VerifyRequest
from edgellm.verifier.judgement import MissingPrefix
from tests.fuzz.reading import Reader, Refused

WORDS, CONTEXT = 300, 512
_PORTS = count(1)  # each session from a device of its own: those of one device are paced
VOCABULARY = Vocabulary.of([b"%d" % i for i in range(WORDS)], bytes(WORDS))
WANTED = ModelSampling(0.7)
INFO = VerifierInfo(
    Capabilities("big", CONTEXT, logprobs=True, penalties=True), VOCABULARY.fingerprint, WORDS, WANTED
)  # fmt: skip
ROUND = 7


def ids(*tokens: int) -> Ids:
    return np.array(tokens, np.int32)


def verify_request(position: int, prefix: Ids, draft: Chunk, extra: int, logprobs: int | None = None) -> VerifyRequest:
    """Return a request of the round that all inputs belong to."""
    return VerifyRequest(0, GREEDY, position, prefix, draft, extra, logprobs, ROUND)


def chunk(drafted: int, *, copied: bool) -> Chunk:
    return Chunk(ids=ids(*(9 + i for i in range(drafted))), retrieved=copied)


class _Line:
    """A stream without a network; `read` waits for `say`."""

    def __init__(self) -> None:
        self._said: asyncio.Queue[Any] = asyncio.Queue()
        self.waits = False
        self.wrote = 0
        self._peer = f"ipv4:127.0.0.1:{next(_PORTS)}"

    async def read(self) -> Any:
        self.waits = True
        try:
            return await self._said.get()
        finally:
            self.waits = False

    async def write(self, _data: bytes) -> None:
        self.wrote += 1

    async def abort(self, code: Any, details: str) -> None:
        raise Refused(f"{code.name}: {details}")

    def peer(self) -> str:
        return self._peer

    def cancel(self) -> None:
        pass

    async def say(self, data: bytes, over: Callable[[], bool]) -> None:
        """Send `data`, and wait until it has been processed."""
        while not self.waits and not over():
            await asyncio.sleep(0)
        self._said.put_nowait(data)
        await asyncio.sleep(0)
        while not over() and (not self._said.empty() or not self.waits):
            await asyncio.sleep(0)


class _Worker:
    """Judges at once, on made-up logits, in place of the verifier's worker, so that all input is used."""

    steps = 0

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._rows = np.random.default_rng(0).normal(0, 3, (257, WORDS)).astype(np.float32)

    def wait_seconds(self) -> float:
        return 0.1

    def end_session(self, _session: int) -> None:
        pass

    def submit(self, ask: VerifyRequest, deliver: Callable[[Any], None]) -> None:
        if ask.position and self._rng.random() < 0.1:
            deliver(MissingPrefix(self._rng.randrange(ask.position)))
            return
        position = ask.position + len(ask.prefix)
        try:
            accepted, token = judge(ask.draft.ids, self._rows[: len(ask.draft) + 1], ask.sampling, position)
        except EdgeError as error:
            deliver(error)
            return
        deliver(Verdict(accepted, ids(token), 0.1, passes=1))


class _Session:
    """A verifier's session that is fed frame by frame."""

    def __init__(self, *openings: bytes) -> None:
        self._openings = cycle(openings)
        self._service: VerificationService | None = None
        self._task: asyncio.Task[None] | None = None
        self._line = _Line()

    async def feed(self, data: bytes) -> None:
        if self._service is None:
            model = VerifyingModel(INFO, VOCABULARY, cast(Any, _Worker(random.Random(0))), 128)
            self._service = VerificationService(notify=lambda *_: None)
            self._service.add(model)
        if self._task is None:
            self._line = _Line()
            self._task = asyncio.create_task(
                self._service.answering(self._service.session)(None, cast(Any, self._line))
            )
            if not data.startswith(b"\x0a"):  # the input is no Open
                await self._line.say(next(self._openings), self._task.done)
        task = self._task
        await self._line.say(data, task.done)
        if task.done():
            self._task = None
            task.result()


class _Device:
    """A device that waits for a verdict and gets the input."""

    def __init__(self, logprobs: int | None = None) -> None:
        self.timing, self._logprobs = Timing(), logprobs
        self.patience = VerdictDeadline(self.timing.least)
        self._line: Any = None
        self._stream: Stream | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

        self.peer, self.model = INFO, ""

    def post(self, call: Callable[..., None], *arguments: Any) -> bool:
        call(*arguments)
        return True

    def loop_channel(self) -> Any:
        return self

    def stream_stream(self, *_: Any) -> Any:
        self._line = _Line()
        return lambda: self._line

    def loop_task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def loop_pause(self, _seconds: float | None = None) -> None:
        pass

    loop_lost = loop_pause

    def loop_answered(self) -> None:
        pass

    async def feed(self, data: bytes) -> None:
        if self._stream is None:
            self._stream = Stream(cast(Any, self), WORDS)
        asked = verify_request(4, ids(1, 2, 3, 4), chunk(4, copied=True), 4, self._logprobs)
        stream, pending = self._stream, self._stream.send(asked)
        await self._line.say(data, lambda: stream.over)
        if not pending.done():  # the input was Working or NeedPrefix
            stream.close()
            self._stream = None
            return
        verdict = pending.result()
        expected = verdict.accepted + len(verdict.tokens) if self._logprobs is not None else 0
        if len(verdict.logprobs) != expected or any(len(one.ids) != self._logprobs for one in verdict.logprobs):
            raise AssertionError(f"invalid probabilities got through: {verdict}")
        if not (1 <= len(verdict.tokens) <= 9 - verdict.accepted >= 5 and int(verdict.tokens.max()) < WORDS):
            raise AssertionError(f"a verdict that does not fit the request got through: {verdict}")


@dataclass
class _Greeting:
    """A verifier whose HelloReply, or whose block of another vocabulary, is `data`."""

    data: bytes
    other: bool

    def unary_unary(self, method: str, _write: Any, _read: Any) -> Any:
        message = pb.HelloReply(protocol=PROTOCOL, vocabulary=b"other", vocabulary_size=9, context_length=1,
                                sampling=write_wanted(WANTED))  # fmt: skip

        async def answer(_request: Any, timeout: float) -> bytes:
            return message.SerializeToString() if self.other and method == HELLO else self.data

        return answer


def _paired(folder: Path) -> tuple[Trust, Identity]:
    """Return this device, and one that it is paired with."""
    own, other = Trust(Identity.new(), Peers(folder)), Identity.new()
    words = trust_pb.Introduction(name="desk", rights=["verify"], addresses=["10.0.0.2:1"])
    own.peers.add(read_introduction(other.certificate, words.SerializeToString(), frozenset(Right), "10.0.0.2"))
    return own, other


@contextmanager
def readers(folder: Path) -> Iterator[list[Reader]]:
    """Yield all readers of messages over a link; `folder` is for a list of paired devices."""
    loop = asyncio.new_event_loop()
    try:
        yield _readers(folder, loop)
    finally:
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
        loop.close()


def _readers(folder: Path, loop: asyncio.AbstractEventLoop) -> list[Reader]:
    def run(work: Callable[[bytes], Coroutine[Any, Any, Any]]) -> Callable[[bytes], object]:
        return lambda data: loop.run_until_complete(work(data))

    opening = write_open(GREEDY, VOCABULARY.fingerprint)
    warm = write_open(Sampling(0.8, 40, 0.9, 5), VOCABULARY.fingerprint)
    hot = write_open(Sampling(1e300, 0, 1.0, 5), VOCABULARY.fingerprint)
    likely = [Logprobs(-0.5, ids(5, 6), np.array([-0.5, -2.0])) for _ in range(4)]
    telling = write_verdict(ROUND, Verdict(2, ids(5, 6), 0.1, logprobs=tuple(likely)))
    asks = [write_verify(verify_request(at, ids(*range(1, 9)), chunk(n, copied=copied), 3))
            for at, n, copied in ((0, 0, True), (0, 4, False), (8, 4, True), (400, 1, False))]  # fmt: skip
    asks.append(write_verify(verify_request(0, ids(1, 2), chunk(2, copied=True), 3, 20)))
    verdict = write_verdict(ROUND, Verdict(2, ids(5, 6), 0.1, passes=2, plausible=(True, True, False, True)))
    frames = [verdict, pb.VerifierFrame(need_prefix=pb.NeedPrefix(round=ROUND, position=1)),
              pb.VerifierFrame(working=pb.Working(round=ROUND, step=3)),
              pb.VerifierFrame(busy=pb.Busy(round=ROUND, retry_ms=10)),
              pb.VerifierFrame(draining=pb.Draining())]  # fmt: skip
    hello = pb.HelloReply(protocol=PROTOCOL, vocabulary=bytes.fromhex(VOCABULARY.fingerprint), vocabulary_size=WORDS,
                          model="big", context_length=512, model_hash=bytes(32),
                          sampling=write_wanted(WANTED))  # fmt: skip
    block = pb.VocabularyBlock(first_token=256, tokens=[b"%d" % i for i in range(44)], kinds=bytes(44))
    own, other = _paired(folder)
    nonce = bytes(32)
    offer = trust_pb.Offer(role="verifier", model="big", size=5, vocabulary=bytes(32))
    welcome = trust_pb.WelcomeReply(
        protocol=DEVICES_PROTOCOL, device=other.id.digest, version="1", rights=["verify", "files"], models=[offer],
        time=1, signature=other.sign(LABEL + nonce + other.id.digest + own.identity.id.digest),
    )  # fmt: skip
    spake = Exchange("A", Code(7, ("lamp", "otter")), other).spake
    first = trust_pb.PairFrame(
        hello=trust_pb.PairHello(protocol=PAIRING_PROTOCOL, certificate=other.certificate.der, spake=spake)
    )
    words = trust_pb.Introduction(
        name="desk", rights=["verify"], addresses=["10.0.0.2:50151", "[fe80::1]:5"], version="1"
    )

    def window(data: bytes) -> None:
        message = parse_message(trust_pb.PairFrame, data)
        if message.WhichOneof("frame") == "hello":
            check_version(message.hello.protocol, PAIRING_PROTOCOL, "the other device")
            Certificate.of(message.hello.certificate)

    def exchange(data: bytes) -> None:
        Exchange("B", Code(7, ("lamp", "otter")), own.identity).agree(other.certificate, data)

    host = Address("10.0.0.2", 1)
    session, device = _Session(opening.SerializeToString(), warm.SerializeToString()), _Device()
    return [
        Reader("session", [warm, opening, hot, *asks], run(session.feed)),
        Reader("verdict", frames, run(device.feed)),
        Reader("probabilities", [telling], run(_Device(logprobs=2).feed)),
        Reader("hello", [hello], run(lambda data: greet(cast(Any, _Greeting(data, False)), VOCABULARY, 1.0, "there"))),
        Reader(
            "vocabulary", [block], run(lambda data: greet(cast(Any, _Greeting(data, True)), VOCABULARY, 1.0, "there"))
        ),
        Reader("welcome", [welcome], lambda data: read_welcome(data, nonce, own, None, host, 0.1)),
        Reader("pairing", [first], window),
        Reader(
            "introduction",
            [words],
            lambda data: read_introduction(other.certificate, data, frozenset(Right), "10.0.0.2"),
        ),
        Reader("certificate", [other.certificate.der, own.identity.certificate.der], Certificate.of),
        Reader("spake", [spake], exchange),
    ]
