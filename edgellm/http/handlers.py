"""Request handlers, between HTTP and the models: is a model loaded, is there a place, and which thread writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from edgellm.engine import Message
from edgellm.errors import EdgeError
from edgellm.http.admission import Admission, FairLock, closing
from edgellm.http.mesh_status import MeshRecorder, PlanOut
from edgellm.http.metrics import Metrics
from edgellm.http.middleware import keep, redact
from edgellm.http.schemas.errors import SERVER, ApiError, ErrorInfo, refuse
from edgellm.http.schemas.requests import ChatRequest, CompletionRequest, Sampled
from edgellm.http.schemas.responses import ResponseShape
from edgellm.http.streaming import Begin, Event, ReplyTask, TextDelta, TokenTimes
from edgellm.llm import Pair
from edgellm.spec.params import ReplyOptions
from edgellm.spec.types import Notice, Summary

TAKE_SECONDS = 30.0  # how long a client may leave a chunk untaken
LOADING = ErrorInfo(503, "The model is being loaded.", SERVER, "loading", retry_after=1.0)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A pair and the name that it is served by. `in_turns`: replies compute on this device's processor, round by round.

    `options` are the choices that requests do not make. `course` watches what the devices of a mesh do for a reply.
    """

    pair: Pair
    name: str
    in_turns: bool = True
    options: ReplyOptions = field(default_factory=ReplyOptions)
    course: MeshRecorder | None = None


class RequestHandler:
    """The handlers of one server. All but the constructor, `open` and `close` is for its event loop."""

    def __init__(self, replies: int, waiting: int, on_error: Callable[[str], None], *, anonymous: bool = False) -> None:
        """`replies` are written at once, and up to `waiting` requests wait; `on_error` is told of unexpected errors.
        `anonymous`: clients show no key, and so are told nothing of other devices."""
        self.anonymous = anonymous
        self.admission = Admission(replies, waiting)
        self.metrics = Metrics(self.admission)
        self._writer: ServedModel | None = None
        self._idle = ""  # why no pair is served here
        self._turns = FairLock()
        self._threads = ThreadPoolExecutor(replies, thread_name_prefix="edgellm-http")
        self._under_way: set[ReplyTask] = set()
        self._on_error = on_error
        self.rtt_ms: float | None = None  # of the last reply that reported one
        self.plan: PlanOut | None = None

    def open(self, writer: ServedModel, plan: PlanOut | None = None) -> None:
        """Let `writer` answer from now on, and the page show `plan`."""
        self.plan = plan
        if writer.pair.verifier_up is not None:
            self.metrics.watch(writer.pair.verifier_up)
        self._writer = writer

    def rest(self, why: str) -> None:
        """Serve without a pair, on purpose; `why` is the answer to requests for a reply."""
        self._idle = why

    def ready(self) -> ServedModel | None:
        """Return the writer, None where no pair is served. Raises ApiError while the model is being loaded."""
        if self._writer is None and not self._idle:
            raise ApiError(LOADING)
        return self._writer

    def writer(self) -> ServedModel:
        """Return the writer. Raises ApiError while the model is being loaded, or where no pair is served."""
        if (writer := self.ready()) is None:
            raise ApiError(ErrorInfo(404, self._idle, code="model_not_found"))
        return writer

    async def answer(self, request: Request, ask: Sampled, begin: Begin, shape: ResponseShape) -> Response:
        """Return the reply that `begin` makes, in `shape`, whole or streamed by `ask`. A client that leaves ends it.

        Raises:
            ApiError: there is no place, or it failed before its first token.
        """
        gone = asyncio.create_task(_left(request.receive))
        try:
            if not await self._place(gone):
                return Response(status_code=499)
            running = self._start(begin, gone)
        except BaseException:
            gone.cancel()
            raise
        streamed: EventStream | None = None
        try:
            events = running.events()
            if not ask.stream:
                return await _whole(events, shape)
            first = await anext(events, None)  # so that a failure at once has a status of its own
            streamed = EventStream(running, gone, _chunks(first, events, shape, ask.wants_usage()))
            return streamed
        finally:
            if streamed is None:
                running.stop()
                gone.cancel()

    def unexpected(self, error: BaseException) -> None:
        """Report an error that is none of edgellm's to the server's user; the client gets no details."""
        if not isinstance(error, (EdgeError, ApiError)):
            self._on_error(f"A reply failed: {type(error).__name__}: {error}")

    async def finish(self, grace: float) -> None:
        """Refuse new requests, give replies under way `grace` seconds to end, then stop them."""
        self.admission.close(closing())
        try:
            async with asyncio.timeout(grace):
                await self.admission.empty()
        except TimeoutError:
            for running in list(self._under_way):
                running.stop()
            await self.admission.empty()

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def _place(self, gone: asyncio.Task[None]) -> bool:
        """Wait in line; return False where the client has left meanwhile."""
        entering = asyncio.ensure_future(self.admission.enter())
        try:
            await asyncio.wait({entering, gone}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            entering.cancel()
            raise
        if entering.done():
            try:
                entering.result()
            except ApiError:
                self.metrics.refused()
                raise
            return True
        entering.cancel()
        return False

    def _start(self, begin: Begin, gone: asyncio.Task[None]) -> ReplyTask:
        writer = self.writer()
        turn = self._turns if writer.in_turns else nullcontext()
        running = ReplyTask(begin, turn, self._measured, redact if self.anonymous else keep)
        self._under_way.add(running)
        work = asyncio.get_running_loop().run_in_executor(self._threads, partial(_work, running, writer.course))
        work.add_done_callback(partial(self._over, running, perf_counter()))
        gone.add_done_callback(lambda _: running.stop())
        return running

    def _measured(self, summary: Summary | None, marks: TokenTimes, failed: bool) -> None:
        self.metrics.reply(summary, marks, failed)
        if summary is not None and summary.rtt_ms is not None:
            self.rtt_ms = summary.rtt_ms

    def _over(self, running: ReplyTask, began: float, work: asyncio.Future[BaseException | None]) -> None:
        self._under_way.discard(running)
        self.admission.leave(perf_counter() - began)
        if (error := work.result()) is not None:
            self.unexpected(error)


def _work(running: ReplyTask, course: MeshRecorder | None) -> BaseException | None:
    """Write the reply; only after the client has it, `course` asks the devices about it."""
    if course is None:
        return running.work()
    course.begins()
    try:
        return running.work()
    finally:
        course.over(running.summary)


class EventStream(Response):
    """A response of server-sent events, which ends the reply when the client leaves or does not read."""

    def __init__(self, running: ReplyTask, gone: asyncio.Task[None], chunks: AsyncIterator[bytes]) -> None:
        super().__init__(media_type="text/event-stream")
        del self.headers["content-length"]
        self._running, self._gone, self._chunks = running, gone, chunks

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for data in self._chunks:
                async with asyncio.timeout(TAKE_SECONDS):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        except (OSError, TimeoutError):
            return  # the client has left
        finally:
            self._running.stop()
            self._gone.cancel()


async def _left(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(events: AsyncIterator[Event], shape: ResponseShape) -> Response:
    pieces: list[TextDelta] = []
    notices: list[Notice] = []
    async for event in events:
        if isinstance(event, Summary):
            return JSONResponse(shape.whole(pieces, notices, event))
        if isinstance(event, TextDelta):
            pieces.append(event)
        else:
            notices.append(event)
    return Response(status_code=499)  # the reply was stopped, and the client has left


async def _chunks(
    first: Event | None, events: AsyncIterator[Event], shape: ResponseShape, with_usage: bool
) -> AsyncIterator[bytes]:
    for opening in shape.opening():
        yield _event(opening, with_usage)
    try:
        while first is not None:
            if isinstance(first, TextDelta):
                yield _event(shape.chunk(first), with_usage)
            elif isinstance(first, Notice):
                yield _event(shape.notice(first), with_usage)
            else:
                yield _event(shape.closing(first), with_usage)
                if with_usage:
                    yield _event(shape.usage(first), with_usage)
                yield b"data: [DONE]\n\n"
            first = await anext(events, None)
    except ApiError as refused:
        yield _event(refused.fault.body(), with_usage=False)


def _event(data: dict[str, Any], with_usage: bool) -> bytes:
    if with_usage and "usage" not in data:
        data["usage"] = None
    return b"data: " + json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


_ROLES = {"developer": "system"}


def check_model(name: str | None, writer: ServedModel) -> None:
    """Raise ApiError where another model is asked for than the one that is here."""
    if name not in (None, writer.name):
        raise ApiError(
            ErrorInfo(
                404, f"There is no model {name!r} here, only {writer.name!r}.", code="model_not_found", param="model"
            )
        )


def chat_options(ask: ChatRequest, writer: ServedModel) -> ReplyOptions:
    """Return the options of a chat request.

    Raises:
        ApiError, InvalidOption: they contradict each other, or make no sense.
    """
    if ask.top_logprobs is not None and not ask.logprobs:
        raise refuse("top_logprobs is given, and logprobs is not true.", "top_logprobs")
    both = (ask.max_tokens, ask.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise refuse("max_tokens and max_completion_tokens are given and differ. Give one.", "max_completion_tokens")
    most = next((one for one in both if one is not None), writer.pair.context_length)
    return _options(ask, writer, most, (ask.top_logprobs or 0) if ask.logprobs else None)


def completion_options(ask: CompletionRequest, writer: ServedModel) -> ReplyOptions:
    """Return the options of a completion request. Raises what `chat_options` raises."""
    return _options(ask, writer, ask.max_tokens, ask.logprobs)


def messages(ask: ChatRequest) -> list[Message]:
    return [Message(_ROLES.get(message.role, message.role), message.text()) for message in ask.messages]


def plain_prompt(ask: CompletionRequest) -> str | list[int]:
    if isinstance(ask.prompt, str):
        return ask.prompt
    return "".join(one for one in ask.prompt if isinstance(one, str)) or [
        one for one in ask.prompt if isinstance(one, int)
    ]


def _options(ask: Sampled, writer: ServedModel, max_tokens: int, logprobs: int | None) -> ReplyOptions:
    check_model(ask.model, writer)
    if ask.stream_options is not None and not ask.stream:
        raise refuse("stream_options is given, and stream is not true.", "stream_options")
    return replace(
        writer.options,
        max_tokens=max_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        seed=None if ask.seed is None else ask.seed & (2**64 - 1),
        stop=ask.stops(),
        logprobs=logprobs,
        budget=ask.budget,
        gate=ask.gate,
        retrieval=ask.retrieval if ask.retrieval != "auto" else writer.options.retrieval,
    )
