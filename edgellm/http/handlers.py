"""Request handlers, between HTTP and the models: they admit requests, write replies in threads, and count them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter, time
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from edgellm.engine import ToolCall
from edgellm.errors import EdgeError, Stopped
from edgellm.http.admission import STOPPING, Admission, FairLock
from edgellm.http.mesh_status import MeshRecorder, PlanOut
from edgellm.http.metrics import Metrics
from edgellm.http.middleware import redact, unredacted
from edgellm.http.schemas.builder import MakeBuilder, ResponseBuilder, TextDelta, WrittenReply, json_bytes
from edgellm.http.schemas.errors import SERVER, ApiError, ErrorInfo
from edgellm.http.schemas.requests import ChatRequest, CompletionRequest, GenerationRequest
from edgellm.http.schemas.responses import ChatResponseBuilder, CompletionResponseBuilder, ModelInfo
from edgellm.http.streaming import Event, ReadReply, ReplyTask, StartReply, TokenTimes, stream_pieces
from edgellm.llm import LLM
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stream import Reply
from edgellm.spec.types import Notice, Summary, Token

IGNORED, VERIFIED, REQUIRE = "X-EdgeLLM-Ignored", "X-EdgeLLM-Verified", "X-EdgeLLM-Require-Verified"
"""Headers: unknown parameters of the request; the share of a whole reply's tokens that the verifier checked; and of a
request, 1 or true to ask for `require_verified`."""
Result = TypeVar("Result")
_MAX_NAMED, _MAX_NAME = 20, 60  # unknown parameters that a header names, and characters of each


def header_names(names: Iterable[str]) -> list[str]:
    """Return the first of the `names` of parameters that have no effect, fit for a header."""
    return [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:_MAX_NAME] for name in sorted(names)[:_MAX_NAMED]]


LOADING = ErrorInfo(503, "The model is being loaded. Try again soon.", SERVER, code="loading", retry_after=1.0)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A pair and the name that it is served by. `in_turns`: replies compute on this device's processor, round by round.

    `options` are the choices that requests do not make. `recorder` records what the devices of a mesh do for a reply.
    """

    pair: LLM
    name: str
    in_turns: bool = True
    options: ReplyOptions = field(default_factory=ReplyOptions)
    recorder: MeshRecorder | None = None
    created: int = field(default_factory=lambda: int(time()))

    def info(self) -> ModelInfo:
        return ModelInfo(id=self.name, created=self.created, context_length=self.pair.context_length)

    def check_name(self, name: str | None) -> None:
        """Raise ApiError (404) where `name` is another model's."""
        if name not in (None, self.name):
            message = f"The model {name!r} is not served here. Ask for {self.name!r}, or leave model out."
            raise ApiError(ErrorInfo(404, message, code="model_not_found", param="model"))

    def options_for(self, request: GenerationRequest) -> ReplyOptions:
        """Return the options of a reply to `request`.

        Raises:
            ApiError, InvalidOption: the parameters contradict each other, or are out of range.
        """
        self.check_name(request.model)
        return request.options(self.options, self.pair.context_length)


class RequestHandler:
    """The handlers of one server. Methods other than the `open` ones and `close` must be called in its event loop."""

    def __init__(
        self,
        replies: int,
        waiting: int,
        on_error: Callable[[str], None],
        *,
        anonymous: bool = False,
        strict: bool = False,
    ) -> None:
        """`replies` are written at once, and up to `waiting` requests wait. `on_error` is called with a sentence for an
        unexpected error. `anonymous`: clients show no key, and so learn nothing about other devices. `strict`: requests
        with unknown parameters are refused."""
        self.anonymous, self._strict = anonymous, strict
        self.admission = Admission(replies, waiting)
        self.metrics = Metrics(self.admission)
        self.plan: PlanOut | None = None
        self.rtt_ms: float | None = None  # of the last reply that reported one
        self._served: ServedModel | None = None
        self._no_model_reason = ""
        self._fair_lock = FairLock()
        self._executor = ThreadPoolExecutor(replies, thread_name_prefix="edgellm-http")
        self._tasks: set[ReplyTask] = set()
        self._on_error = on_error

    def open(self, served: ServedModel, plan: PlanOut | None = None) -> None:
        """Answer requests from `served` from now on, and show `plan` on the page."""
        self.plan = plan
        if served.pair.verifier_up is not None:
            self.metrics.watch_verifier(served.pair.verifier_up)
        self._served = served

    def open_without_model(self, reason: str) -> None:
        """Answer requests for a reply with `reason`, and all others as usual."""
        self._no_model_reason = reason

    def check_ready(self) -> ServedModel | None:
        """Return the served model, None where there is none. Raises ApiError (503) while it is being loaded."""
        if self._served is None and not self._no_model_reason:
            raise ApiError(LOADING)
        return self._served

    def served_model(self) -> ServedModel:
        """Return the served model. Raises ApiError while it is being loaded (503), or where there is none (404)."""
        if (served := self.check_ready()) is None:
            raise ApiError(ErrorInfo(404, self._no_model_reason, code="model_not_found"))
        return served

    async def chat(
        self, request: ChatRequest, http: Request, make_builder: MakeBuilder | None = None,
        ignored: Iterable[str] | None = None,
    ) -> Response:  # fmt: skip
        """Return a reply to a conversation, whole or as a stream. It is cancelled when the client leaves.

        A request of another API than OpenAI's chat completions says how responses are made, and which of its parameters
        are `ignored`.

        Raises:
            ApiError: the model is not ready or another one, parameters contradict each other, the queue is full, or the
                reply failed before its first token.
            InvalidOption: a parameter is out of range.
        """
        served = self.served_model()
        options, messages = served.options_for(request), request.turns()
        make_builder = make_builder or partial(ChatResponseBuilder, include_usage=request.include_usage)
        builder = make_builder(served.name, served.pair.piece)
        names = request.unknown() if ignored is None else ignored
        return await self._respond(request, http, served, partial(served.pair.reply, messages), options, builder, names)

    async def complete(
        self, request: CompletionRequest, http: Request, make_builder: MakeBuilder | None = None,
        ignored: Iterable[str] | None = None,
    ) -> Response:  # fmt: skip
        """Return the continuation of a text, as `chat` does. Raises what `chat` raises."""
        served = self.served_model()
        options, prompt = served.options_for(request), request.text_or_ids()
        make_builder = make_builder or partial(CompletionResponseBuilder, include_usage=request.include_usage)
        builder = make_builder(served.name, served.pair.piece)
        names = request.unknown() if ignored is None else ignored
        write = partial(served.pair.complete, prompt)
        return await self._respond(request, http, served, write, options, builder, names)

    async def count_tokens(self, request: ChatRequest, http: Request, ignored: Iterable[str]) -> int | Response:
        """Return how many tokens the prompt of a conversation has. Raises what `chat` raises."""
        served = self.served_model()
        options, messages = served.options_for(request), request.turns()
        self.check_known(header_names(ignored))
        ids = await self.compute(http, lambda left: served.pair.prompt_ids(messages, options, left))
        return ids if isinstance(ids, Response) else len(ids)

    async def compute(self, http: Request, work: Callable[[Callable[[], bool]], Result]) -> Result | Response:
        """Return the result of `work`, which is done in a thread once there is a slot for it; an empty response where
        the client has left. `work` is given a function that returns whether it has.

        Raises:
            ApiError: the queue is full.
        """
        disconnect = asyncio.create_task(_wait_for_disconnect(http.receive))
        try:
            if not await self._admit(disconnect):
                return Response(status_code=499)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._executor, work, disconnect.done)
            except Stopped:
                return Response(status_code=499)
            finally:
                self.admission.release(None)
        finally:
            disconnect.cancel()

    async def _respond(
        self, request: GenerationRequest, http: Request, served: ServedModel, write: Callable[..., Reply],
        options: ReplyOptions, builder: ResponseBuilder, ignored: Iterable[str],
    ) -> Response:  # fmt: skip
        names = header_names(ignored)
        self._check(request, http, served, options, names)
        starts = [
            partial(_started, write, replace(options, seed=None if options.seed is None else options.seed + number))
            for number in range(request.n)
        ]
        requested_at = perf_counter()
        disconnect = asyncio.create_task(_wait_for_disconnect(http.receive))
        task: ReplyTask | None = None
        stream: StreamingResponse | None = None
        try:
            if not await self._admit(disconnect):
                return Response(status_code=499)
            task = self._start(
                served,
                starts,
                disconnect,
                requested_at,
                verified=requires_verified(request, http),
                read=partial(_read, served.pair, options, _most_calls(request)) if options.tools else iter,
            )
            events = task.events()
            headers = {IGNORED: ", ".join(names)} if names else {}
            if not request.stream:
                return await _collect(task, events, builder, headers)
            first = await anext(events, None)  # an error before the first token gets its own status
            pieces = stream_pieces(task, first, events, builder)
            stream = StreamingResponse(pieces, media_type=builder.media_type, headers=headers)
            return stream
        finally:
            if stream is None:
                disconnect.cancel()
                if task is not None:
                    task.cancel()

    def _check(
        self, request: GenerationRequest, http: Request, served: ServedModel, options: ReplyOptions,
        ignored: Sequence[str],
    ) -> None:  # fmt: skip
        """Raise ApiError where a strict server does not know a parameter, or unverified text would be certain though
        `require_verified` asks for none."""
        self.check_known(ignored)
        if not requires_verified(request, http):
            return
        if served.pair.verifier_name is None:
            raise ApiError(ErrorInfo(400, "require_verified is set, and no verifier is open here. Leave it out.",
                                     param="require_verified"))  # fmt: skip
        if options.budget not in (None, 1.0) or options.gate not in ("auto", "always"):
            raise ApiError(ErrorInfo(400, "require_verified is set, but the budget or the gate leaves drafts unchecked."
                                     " Leave one of them out.", param="require_verified"))  # fmt: skip

    def check_known(self, ignored: Sequence[str]) -> None:
        """Raise ApiError where parameters are `ignored`, and the server is strict."""
        if self._strict and ignored:
            message = f"There is no parameter {ignored[0]!r}. Leave it out, or start the server without --strict."
            raise ApiError(ErrorInfo(400, message, param=ignored[0], code="unknown_parameter"))

    def report_unexpected(self, error: BaseException) -> None:
        """Report an error that edgellm does not raise on purpose to whoever runs the server; clients get no details."""
        if not isinstance(error, (EdgeError, ApiError)):
            self._on_error(f"A reply failed: {type(error).__name__}: {error}")

    async def shut_down(self, grace: float) -> None:
        """Refuse new requests, give replies `grace` seconds to end, then cancel them."""
        self.admission.close(STOPPING)
        try:
            async with asyncio.timeout(grace):
                await self.admission.wait_until_empty()
        except TimeoutError:
            for task in list(self._tasks):
                task.cancel()
            await self.admission.wait_until_empty()

    def close(self) -> None:
        self._executor.shutdown(wait=False)

    async def _admit(self, disconnect: asyncio.Task[None]) -> bool:
        """Wait for a slot; return False where the client leaves first."""
        acquire = asyncio.ensure_future(self.admission.acquire())
        try:
            await asyncio.wait({acquire, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if acquire.done():
                acquire.result()
            return acquire.done()
        except ApiError:
            self.metrics.count_refused()
            raise
        finally:
            acquire.cancel()

    def _start(
        self, served: ServedModel, starts: Sequence[StartReply], disconnect: asyncio.Task[None], requested_at: float,
        *, verified: bool, read: ReadReply,
    ) -> ReplyTask:  # fmt: skip
        lock = self._fair_lock if served.in_turns else nullcontext()
        redaction = redact if self.anonymous else unredacted
        task = ReplyTask(
            starts, lock, self._record, requested_at=requested_at, redact=redaction, verified=verified, read=read
        )
        self._tasks.add(task)
        run = asyncio.get_running_loop().run_in_executor(self._executor, partial(_run, task, served.recorder))
        run.add_done_callback(partial(self._finished, task, perf_counter()))
        disconnect.add_done_callback(lambda _: task.cancel())
        return task

    def _record(self, summary: Summary | None, times: TokenTimes, failed: bool) -> None:
        self.metrics.record_reply(summary, times, failed)
        if summary is not None and summary.rtt_ms is not None:
            self.rtt_ms = summary.rtt_ms

    def _finished(self, task: ReplyTask, started_at: float, run: asyncio.Future[BaseException | None]) -> None:
        self._tasks.discard(task)
        self.admission.release(perf_counter() - started_at)
        if (error := run.result()) is not None:
            self.report_unexpected(error)


def requires_verified(request: GenerationRequest, http: Request) -> bool:
    """Return whether a request must not be answered with unverified text, by its field or its header."""
    return request.require_verified or http.headers.get(REQUIRE, "").lower() in ("1", "true")


def _run(task: ReplyTask, recorder: MeshRecorder | None) -> BaseException | None:
    """Write the reply. The `recorder` asks devices about it only after the client has all of it."""
    if recorder is None:
        return task.run()
    recorder.reply_started()
    try:
        return task.run()
    finally:
        recorder.reply_finished(task.summary)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _started(write: Callable[..., Reply], options: ReplyOptions, cancelled: Callable[[], bool]) -> Reply:
    return write(options, should_stop=cancelled)


def _most_calls(request: GenerationRequest) -> int | None:
    """Return how many calls of tools a reply to `request` may have; None: any number."""
    return 1 if isinstance(request, ChatRequest) and not request.parallel_tool_calls else None


def _read(pair: LLM, options: ReplyOptions, most: int | None, tokens: Iterable[Token]) -> Iterator[Token | ToolCall]:
    """Yield the tokens of a reply, and its first `most` calls of tools."""
    calls = 0
    for one in pair.calls(tokens, options):
        calls += isinstance(one, ToolCall)
        if not isinstance(one, ToolCall) or most is None or calls <= most:
            yield one


async def _collect(
    task: ReplyTask, events: AsyncIterator[Event], builder: ResponseBuilder, headers: dict[str, str]
) -> Response:
    """Return the whole response, with `headers` and the share of its tokens that were verified."""
    written: list[WrittenReply] = []
    deltas: list[TextDelta] = []
    calls: list[ToolCall] = []
    notices: list[Notice] = []
    async for event in events:
        if isinstance(event, Summary):
            written.append(WrittenReply(deltas, notices, event, calls))
            deltas, notices, calls = [], [], []
        elif isinstance(event, TextDelta):
            deltas.append(event)
        elif isinstance(event, ToolCall):
            calls.append(event)
        else:
            notices.append(event)
    if len(written) < task.replies:
        return Response(status_code=499)  # the reply was cancelled, as the client has left
    headers[VERIFIED] = f"{written[0].summary.share_verified or 0.0:.4f}"
    return Response(json_bytes(builder.whole(written)), headers=headers, media_type="application/json")
