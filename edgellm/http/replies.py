"""Replies to HTTP clients: admitted, written in threads, passed on as events, cancelled when their client leaves."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from edgellm.engine import ToolCall
from edgellm.errors import EdgeError, Stopped
from edgellm.http.admission import STOPPING, Admission, FairLock
from edgellm.http.metrics import Metrics
from edgellm.http.middleware import redact
from edgellm.http.model_host import KEEP_ALIVE, ModelHost, ServedModel, keep_alive_seconds
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.errors import SERVER, ApiError, ErrorInfo, error_info
from edgellm.http.schemas.requests import ChatRequest, GenerationRequest
from edgellm.http.schemas.responses import Event, MakeBuilder, ResponseBuilder, TextDelta, WrittenReply, json_bytes
from edgellm.http.status import MeshRecorder, PlanOut
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stats import Stats
from edgellm.spec.stream import Reply, Utf8
from edgellm.spec.types import UNVERIFIED, Ids, Notice, Summary, Token

IGNORED, VERIFIED, REQUIRE = "X-EdgeLLM-Ignored", "X-EdgeLLM-Verified", "X-EdgeLLM-Require-Verified"
LEFT_OUT = "X-EdgeLLM-Turns-Left-Out"
"""Headers: parameters of the request without effect; the share of a whole reply's tokens that the verifier checked; and
of a request, 1 or true to ask for `require_verified`."""
SIGN_OF_LIFE = 10.0  # seconds between signs of a stream that waits for a model, a slot or its first token
NOT_VERIFIED = ErrorInfo(
    503, "The verifier is not available, and the request allows no unverified text. Try again, or leave"
    " require_verified out.", SERVER, code="not_verified", retry_after=2.0,
)  # fmt: skip
_MAX_NAMED, _MAX_NAME = 20, 60  # unknown parameters that a header names, and characters of each
_T = TypeVar("_T")

StartReply: TypeAlias = Callable[..., Reply]
"""Starts a reply. It is given `should_stop`, a function that returns whether the reply is cancelled."""


def header_names(names: Iterable[str]) -> list[str]:
    """Return the first of the `names` of parameters that have no effect, fit for a header."""
    return [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:_MAX_NAME] for name in sorted(names)[:_MAX_NAMED]]


def left_response() -> Response:
    """Return the answer to a client that has left."""
    return Response(status_code=499)


def without_calls(tokens: Iterable[Token], _cut: Callable[[], bool]) -> Iterator[Token | ToolCall]:
    """Read a reply that calls no tools."""
    return iter(tokens)


@dataclass(frozen=True, slots=True)
class ReplyOrder:
    """The way in which a request's replies are written. `requested_at` is a time of `perf_counter`. `lock` is held
    while a reply computes. `verified`: a token that the verifier has not checked ends the reply with an error.
    `progress`: the reading of a long prompt is an event, too. `read` tells calls of tools from tokens; the function
    that it is given returns after the last token whether the reply broke off."""

    requested_at: float
    lock: AbstractContextManager[object]
    verified: bool = False
    progress: bool = False
    read: Callable[[Iterable[Token], Callable[[], bool]], Iterator[Token | ToolCall]] = without_calls


class _ReplyTask:
    """The replies to one request. `write` is for a thread, all else for the event loop."""

    def __init__(self, *, redacted: bool = False) -> None:
        """`redacted`: notices and errors do not name other devices."""
        self.builder: ResponseBuilder | None = None
        self.ignored: Sequence[str] = ()  # parameters without effect because of the model
        self.count = 1  # replies that are written, one after the other
        self.work: asyncio.Task[None] | None = None  # the task that may be cancelled: no reply is begun yet
        self._redacted = redacted
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | BaseException | None] = asyncio.Queue()
        self._reply: Reply | None = None
        self._lock = threading.Lock()
        self._cancelled = False

    @property
    def prompt_tokens(self) -> int:
        """Return the length of the prompt; 0 before it is known."""
        return 0 if self._reply is None else self._reply.prompt_tokens

    def is_cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the reply and return at once. The thread ends soon after, even within a long decode."""
        with self._lock:
            self._cancelled = True
            reply = self._reply
        if reply is not None:
            reply.cancel()
        if self.work is not None:
            self.work.cancel()
        self._events.put_nowait(None)

    async def next(self) -> Event | None:
        """Return the next text, notice or summary; None after `cancel`. Raise ApiError where the reply failed."""
        event = await self._events.get()
        if isinstance(event, BaseException):
            info = error_info(event)
            raise ApiError(replace(info, message=redact(info.message)) if self._redacted else info) from event
        return replace(event, text=redact(event.text)) if self._redacted and isinstance(event, Notice) else event

    def put(self, event: Event | BaseException | None) -> None:
        """Add an event, in any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def write(
        self, order: ReplyOrder, start: StartReply, on_finished: Callable[[Summary | None, Sequence[float], bool], None]
    ) -> Summary | BaseException:
        """Write a reply until it ends or is cancelled; return its summary, or the error that `next` raises.

        `on_finished` is called before the client gets the summary, with the summary as far as there is one, the times
        of the request and of each token, and whether the reply failed.
        """
        times, summary = [order.requested_at], None
        error: BaseException | None = None
        try:
            reply = start(should_stop=self.is_cancelled)
            with self._lock:
                self._reply, cancelled = reply, self._cancelled
            try:
                if not cancelled:
                    self._pass_on(reply, order, times)
            finally:
                with order.lock:
                    reply.close()
                summary = reply.summary
        except Stopped:  # there is no reply yet
            summary = Stats().summary(0)
        except BaseException as raised:  # noqa: BLE001  the client and the caller get to know any error
            error = raised
        on_finished(summary, times, error is not None)
        result = error or summary or Stats().summary(0)
        self.put(result)
        return result

    def _pass_on(self, reply: Reply, order: ReplyOrder, times: list[float]) -> None:
        def next_token() -> Token | None:
            with order.lock:
                return next(reply, None)

        reply.listen(on_notice=self.put, on_progress=self.put if order.progress else None)
        text, tokens = Utf8(), list[Token]()
        for token in order.read(iter(next_token, None), lambda: reply.summary.finish_reason != "stop"):
            if isinstance(token, ToolCall):
                self.put(token)
                continue
            if order.verified and token.source in UNVERIFIED:
                raise ApiError(NOT_VERIFIED)
            times.append(perf_counter())
            if tokens and tokens[0].channel is not token.channel:
                self.put(TextDelta(text.end(), tuple(tokens)))
                tokens = []
            tokens.append(token)
            characters = text.feed(token.piece)
            if characters or not text.has_partial:
                self.put(TextDelta(characters, tuple(tokens)))
                tokens = []
        if (rest := text.end()) or tokens:
            self.put(TextDelta(rest, tuple(tokens)))


class RequestHandler:
    """The handlers of one server. Methods other than `close` must be called in its event loop."""

    def __init__(
        self, replies: int, waiting: int, on_error: Callable[[str], None], *, anonymous: bool = False,
        strict: bool = False, keep_alive: float = KEEP_ALIVE,
    ) -> None:  # fmt: skip
        """`replies` are written at once, and up to `waiting` requests wait. `on_error` is called with a sentence for an
        unexpected error. `anonymous`: clients show no key, and so learn nothing about other devices. `strict`: requests
        with unknown parameters are refused. `keep_alive` as for `ModelHost`."""
        self.anonymous, self._strict = anonymous, strict
        self.admission = Admission(replies, waiting)
        self.models = ModelHost(keep_alive, waiting)
        self.metrics = Metrics(self.admission)
        self.plan: PlanOut | None = None
        self.rtt_ms: float | None = None  # from the last reply that reported a round trip
        self._fair_lock = FairLock()
        self._executor = ThreadPoolExecutor(replies, thread_name_prefix="edgellm-http")
        self._tasks: set[_ReplyTask] = set()
        self._on_error = on_error

    async def reply(
        self, request: GenerationRequest, http: Request, make_builder: MakeBuilder, ignored: Iterable[str],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> Response:  # fmt: skip
        """Return a reply, whole or as a stream. It is cancelled when the client leaves.

        An API says how responses are made, which parameters of its request are `ignored`, and the `names` of those
        that are called otherwise than in OpenAI's chat completions.

        Raises:
            ApiError: the model is not ready or is not here, parameters contradict each other or are out of range, the
                queue is full, or the reply failed before its first token.
        """
        unread = await in_reader(lambda: header_names([*ignored, *request.unkept()]))
        self.check_known(unread)
        task = _ReplyTask(redacted=self.anonymous)
        task.work = asyncio.create_task(self._write(task, request, http, make_builder, names))
        self._tasks.add(task)
        task.work.add_done_callback(lambda _: self._tasks.discard(task))
        left = asyncio.create_task(_when_left(http.receive, task.cancel))
        stream: Response | None = None
        try:
            if not request.stream:
                return await self._whole(task, unread)
            first: Event | None = None
            try:  # an error before the first token gets its own status, unless that takes long
                async with asyncio.timeout(SIGN_OF_LIFE):
                    if (first := await task.next()) is None:
                        return left_response()
            except TimeoutError:
                pass
            waiting = make_builder(request.model or "", bytes)
            pieces = self._pieces(task, first, waiting, left)
            # nginx would hold a stream back
            headers = {**_ignored_header(unread, task), "X-Accel-Buffering": "no"}
            stream = StreamingResponse(pieces, media_type=waiting.media_type, headers=headers)
            return stream
        finally:
            if stream is None:
                left.cancel()
                task.cancel()

    async def count_tokens(self, request: ChatRequest, http: Request, ignored: Iterable[str]) -> int | Response:
        """Return how many tokens the prompt of a conversation has."""
        messages = await in_reader(request.turns)
        self.check_known(header_names(ignored))
        with await self.models.lease(request.model) as served:

            def count(left: Callable[[], bool]) -> Ids:
                options, _ = self._fitting_options(served, request, {})
                return served.pair.prompts.ids(messages, options, left)

            ids = await self.compute(http, count)
        return ids if isinstance(ids, Response) else len(ids)

    async def compute(self, http: Request, work: Callable[[Callable[[], bool]], _T]) -> _T | Response:
        """Return the result of `work`, done in a thread once there is a slot; an empty response if the client left.

        `work` is given a function that returns whether the client has left. Raises ApiError where the queue is full.
        """
        admitted = asyncio.ensure_future(self._admit())
        left = asyncio.create_task(_when_left(http.receive, admitted.cancel))
        try:
            await admitted
            try:
                return await asyncio.get_running_loop().run_in_executor(self._executor, work, left.done)
            finally:
                self.admission.release(None)
        except (asyncio.CancelledError, Stopped):
            return left_response()
        finally:
            left.cancel()

    def check_known(self, ignored: Sequence[str]) -> None:
        """Raise ApiError where parameters are `ignored`, and the server is strict."""
        if self._strict and ignored:
            message = f"{ignored[0]!r} has no effect here. Leave it out, or start the server without --strict."
            raise ApiError(ErrorInfo(400, message, param=ignored[0], code="unknown_parameter"))

    def report_unexpected(self, error: BaseException) -> None:
        """Report an error that edgellm does not raise on purpose to whoever runs the server; clients get no details."""
        if not isinstance(error, (EdgeError, ApiError)):
            self._on_error(f"A reply failed: {type(error).__name__}: {error}")

    async def shut_down(self, grace: float) -> None:
        """Refuse new requests, give replies `grace` seconds to end, then cancel them."""
        self.admission.close(STOPPING)
        self.models.stop()
        try:
            async with asyncio.timeout(grace):
                await self.admission.wait_until_empty()
        except TimeoutError:
            for task in list(self._tasks):
                task.cancel()
            await self.admission.wait_until_empty()

    def show_plan(self, plan: PlanOut | None) -> None:
        """Show a plan on the page from now on."""
        self.plan = plan

    def close(self) -> None:
        """Close what was opened here. Call it after the event loop has ended."""
        self._executor.shutdown(wait=False)
        self.models.close()

    async def _write(
        self, task: _ReplyTask, request: GenerationRequest, http: Request, make_builder: MakeBuilder,
        names: Mapping[str, str],
    ) -> None:  # fmt: skip
        """Write all replies to a request: have its model loaded, wait for a slot, then write them in a thread."""
        requested_at = perf_counter()
        try:
            keep_alive = None if request.keep_alive is None else keep_alive_seconds(request.keep_alive)
            with await self.models.lease(request.model, keep_alive) as served:
                options = await in_reader(self._prepare, task, served, request, make_builder, names)
                verified = request.require_verified or http.headers.get(REQUIRE, "").lower() in ("1", "true")
                if verified:
                    _check_verified(served, options)
                seeds = [None if options.seed is None else options.seed + number for number in range(request.n)]
                starts = [
                    partial(write, replace(options, seed=seed))
                    for write in request.writes(served.pair)
                    for seed in seeds
                ]
                task.count = len(starts)
                order = ReplyOrder(
                    requested_at,
                    self._fair_lock if served.in_turns else nullcontext(),
                    verified,
                    request.stream and request.return_progress,
                    partial(_read, served, options, request.most_calls) if options.tools else without_calls,
                )
                await self._admit(served)
                started_at, task.work = perf_counter(), None
                try:
                    run = asyncio.get_running_loop().run_in_executor
                    await run(self._executor, self._run, task, order, starts, served.recorder)
                finally:
                    self.admission.release(perf_counter() - started_at, served.name)
        except Exception as error:  # noqa: BLE001  the client gets to know any error
            self.report_unexpected(error)
            task.put(error)

    def _prepare(
        self, task: _ReplyTask, served: ServedModel, request: GenerationRequest, make_builder: MakeBuilder,
        names: Mapping[str, str],
    ) -> ReplyOptions:  # fmt: skip
        options, task.ignored = self._fitting_options(served, request, names)
        task.builder = make_builder(served.name, served.pair.piece)
        return options

    def _fitting_options(
        self, served: ServedModel, request: GenerationRequest, names: Mapping[str, str]
    ) -> tuple[ReplyOptions, list[str]]:
        """Return the options that the model has, and the parameters ignored. Raises ApiError if those are forbidden."""
        options = request.options(served.options, served.pair.context_length)
        if not isinstance(request, ChatRequest):
            return options, []
        options, left_out = served.pair.prompts.fitting_options(options)
        ignored = header_names(names.get(name) or request.parameter(name) for name in left_out)
        self.check_known(ignored)
        return options, ignored

    async def _admit(self, served: ServedModel | None = None) -> None:
        """Wait for a slot, for a reply also until its model has one."""
        try:
            await (self.admission.acquire(served.name, served.replies) if served else self.admission.acquire())
        except ApiError:
            self.metrics.count_refused()
            raise

    def _run(
        self, task: _ReplyTask, order: ReplyOrder, starts: Sequence[StartReply], recorder: MeshRecorder | None
    ) -> None:
        """Write the replies. The `recorder` asks devices about them only after the client has all of them."""
        result: Summary | BaseException | None = None
        if recorder is not None:
            recorder.reply_started()
        try:
            for start in starts:
                result = task.write(order, start, self._record)
                if isinstance(result, BaseException):
                    self.report_unexpected(result)
                if isinstance(result, BaseException) or task.is_cancelled():
                    break
        finally:
            if recorder is not None:
                recorder.reply_finished(result if isinstance(result, Summary) else None)

    def _record(self, summary: Summary | None, times: Sequence[float], failed: bool) -> None:
        self.metrics.record_reply(summary, times, failed)
        if summary is not None and summary.rtt_ms is not None:
            self.rtt_ms = summary.rtt_ms

    async def _whole(self, task: _ReplyTask, unread: Sequence[str]) -> Response:
        """Return the whole response, with the share of its tokens that were verified."""
        written: list[WrittenReply] = []
        events: list[Event] = []
        while len(written) < task.count or task.builder is None:
            if (event := await task.next()) is None:
                return left_response()
            if isinstance(event, Summary):
                written.append(WrittenReply(events, event))
                events = []
            else:
                events.append(event)
        headers = _ignored_header(unread, task)
        if left_out := written[0].turns_left_out:
            headers[LEFT_OUT] = str(left_out)
        if written[0].summary.tokens:
            headers[VERIFIED] = f"{written[0].summary.share_verified or 0.0:.4f}"
        return Response(json_bytes(task.builder.whole(written)), headers=headers, media_type="application/json")

    async def _pieces(
        self, task: _ReplyTask, event: Event | None, waiting: ResponseBuilder, client: asyncio.Task[None]
    ) -> AsyncIterator[bytes]:
        """Yield the pieces of a stream that begins with `event`; until there is one, those of `waiting`."""
        try:
            while event is None:
                for piece in waiting.waiting():
                    yield piece
                try:
                    async with asyncio.timeout(SIGN_OF_LIFE):
                        if (event := await task.next()) is None:
                            return
                except TimeoutError:
                    pass
            builder, left, begun = task.builder or waiting, task.count, False
            while event is not None:
                pieces = [] if begun else builder.opening(task.prompt_tokens)
                begun = not isinstance(event, Summary)
                left -= not begun
                for piece in (*pieces, *builder.pieces(event, last=not left)):
                    yield piece
                event = await task.next() if left else None
        except ApiError as error:
            for piece in (task.builder or waiting).failure(error.info):
                yield piece
        finally:
            client.cancel()
            task.cancel()


def _ignored_header(unread: Sequence[str], task: _ReplyTask) -> dict[str, str]:
    names = header_names({*unread, *task.ignored})
    return {IGNORED: ", ".join(names)} if names else {}


def _check_verified(served: ServedModel, options: ReplyOptions) -> None:
    """Raise ApiError where unverified text would be certain though `require_verified` asks for none."""
    reason = None
    if served.pair.verifier_name is None:
        reason = "no verifier is open here. Leave it out."
    elif options.budget not in (None, 1.0) or options.gate not in ("auto", "always"):
        reason = "the budget or the gate leaves drafts unchecked. Leave one of them out."
    if reason is not None:
        raise ApiError(ErrorInfo(400, f"require_verified is set, and {reason}", param="require_verified"))


async def _when_left(receive: Receive, call: Callable[[], object]) -> None:
    """Call `call` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call()


def _read(
    served: ServedModel, options: ReplyOptions, most: int | None, tokens: Iterable[Token], cut: Callable[[], bool]
) -> Iterator[Token | ToolCall]:
    """Yield the tokens of a reply, and its first `most` calls of tools."""
    calls = 0
    for one in served.pair.prompts.calls(tokens, options, cut):
        calls += isinstance(one, ToolCall)
        if not isinstance(one, ToolCall) or most is None or calls <= most:
            yield one
