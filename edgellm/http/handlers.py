"""Request handlers, between HTTP and the models: they admit requests, write replies in threads, and count them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from edgellm.engine import ToolCall
from edgellm.errors import EdgeError, Stopped
from edgellm.http.admission import STOPPING, Admission, FairLock
from edgellm.http.mesh_status import MeshRecorder, PlanOut
from edgellm.http.metrics import Metrics
from edgellm.http.middleware import redact, unredacted
from edgellm.http.model_host import ModelCatalog, ModelHost
from edgellm.http.model_pool import KEEP_ALIVE, Lease, Opener, ServedModel, keep_alive_seconds
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.builder import (
    MakeBuilder,
    ResponseBuilder,
    TextDelta,
    WrittenReply,
    json_bytes,
    turns_left_out,
)
from edgellm.http.schemas.errors import ApiError, ErrorInfo, error_info
from edgellm.http.schemas.requests import ChatRequest, GenerationRequest
from edgellm.http.streaming import Event, ReplyOrder, ReplyTask, TokenTimes, stream_pieces, without_calls
from edgellm.llm import LLM
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stream import Reply
from edgellm.spec.types import Ids, Notice, Summary, Token

IGNORED, VERIFIED, REQUIRE = "X-EdgeLLM-Ignored", "X-EdgeLLM-Verified", "X-EdgeLLM-Require-Verified"
LEFT_OUT = "X-EdgeLLM-Turns-Left-Out"
"""Headers: parameters of the request without effect; the share of a whole reply's tokens that the verifier checked; and
of a request, 1 or true to ask for `require_verified`."""
Result = TypeVar("Result")
_MAX_NAMED, _MAX_NAME = 20, 60  # unknown parameters that a header names, and characters of each


def header_names(names: Iterable[str]) -> list[str]:
    """Return the first of the `names` of parameters that have no effect, fit for a header."""
    return [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:_MAX_NAME] for name in sorted(names)[:_MAX_NAMED]]


SIGN_OF_LIFE = 10.0  # seconds between signs of a stream that waits for a model, a slot or its first token


@dataclass(frozen=True, slots=True)
class PreparedReply:
    """The functions that begin the replies to each prompt, their options, the builder of their responses, and the
    parameters of the request that are `ignored` because of the model."""

    writes: Sequence[Callable[..., Reply]]
    options: ReplyOptions
    builder: ResponseBuilder
    ignored: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class BegunReply:
    """A reply being written, and the first event of its stream; the rest as in `PreparedReply`."""

    task: ReplyTask
    first: Event | None
    events: AsyncIterator[Event]
    builder: ResponseBuilder
    ignored: Sequence[str]


class ClientLeft(Exception):
    """Raised where a client leaves before its reply begins."""


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
        keep_alive: float = KEEP_ALIVE,
    ) -> None:
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
        self._tasks: set[ReplyTask] = set()
        self._on_error = on_error

    def open(
        self, served: ServedModel, plan: PlanOut | None = None, *, opener: Opener | None = None,
        catalog: ModelCatalog | None = None,
    ) -> None:  # fmt: skip
        """Answer requests from now on, and show `plan` on the page; the rest as for `ModelHost.open`."""
        self.plan = plan
        if served.pair.verifier_up is not None:
            self.metrics.watch_verifier(served.pair.verifier_up)
        self.models.open(served, opener=opener, catalog=catalog)

    async def reply(
        self, request: GenerationRequest, http: Request, make_builder: MakeBuilder, ignored: Iterable[str],
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> Response:  # fmt: skip
        """Return a reply, whole or as a stream. It is cancelled when the client leaves.

        An API says how responses are made, which parameters of its request are `ignored`, and the `names` of those
        that are called otherwise than in OpenAI's chat completions.

        Raises:
            ApiError: the model is not ready or is not here, parameters contradict each other, the queue is full, or the
                reply failed before its first token.
            InvalidOption: a parameter is out of range.
        """
        unread = await in_reader(lambda: header_names([*ignored, *request.unkept()]))

        def prepare(served: ServedModel) -> PreparedReply:
            options, left_out = self._fitting_options(served, request, names)
            builder = make_builder(served.name, served.pair.piece)
            return PreparedReply(request.writes(served.pair), options, builder, left_out)

        self.check_known(unread)
        disconnect = asyncio.create_task(_wait_for_disconnect(http.receive))
        begin = asyncio.ensure_future(self._begin(request, http, prepare, disconnect))
        stream: StreamingResponse | None = None
        try:
            # an error before the first token gets its own status, unless that takes long
            await asyncio.wait({begin}, timeout=SIGN_OF_LIFE if request.stream else None)
            begun = begin.result() if begin.done() else None
            without_effect = header_names({*unread, *(begun.ignored if begun is not None else ())})
            headers = {IGNORED: ", ".join(without_effect)} if without_effect else {}
            if begun is not None and not request.stream:
                return await _collect(begun.task, begun.events, begun.builder, headers)
            waiting = make_builder(request.model or "", bytes)
            pieces = self._pieces(begin, disconnect, waiting)
            headers["X-Accel-Buffering"] = "no"  # otherwise nginx holds a stream back
            stream = StreamingResponse(pieces, media_type=waiting.media_type, headers=headers)
            return stream
        except ClientLeft:
            return Response(status_code=499)
        finally:
            if stream is None:
                disconnect.cancel()
                _discard(begin)

    async def count_tokens(self, request: ChatRequest, http: Request, ignored: Iterable[str]) -> int | Response:
        """Return how many tokens the prompt of a conversation has."""
        messages = await in_reader(request.turns)
        self.check_known(header_names(ignored))
        lease = await self.models.lease(request.model)
        try:
            served = lease.served

            def count(left: Callable[[], bool]) -> Ids:
                options, _ = self._fitting_options(served, request, {})
                return served.pair.prompts.ids(messages, options, left)

            ids = await self.compute(http, count)
        finally:
            lease.release()
        return ids if isinstance(ids, Response) else len(ids)

    def _fitting_options(
        self, served: ServedModel, request: GenerationRequest, names: Mapping[str, str]
    ) -> tuple[ReplyOptions, list[str]]:
        """Return the options of a reply to `request`, as far as the model has them, and the parameters that are
        therefore ignored. Raises ApiError where the server is strict, and there are some."""
        options = served.options_for(request)
        if not isinstance(request, ChatRequest):
            return options, []
        options, left_out = served.pair.prompts.fitting_options(options)
        ignored = header_names(names.get(name) or request.parameter(name) for name in left_out)
        self.check_known(ignored)
        return options, ignored

    async def compute(self, http: Request, work: Callable[[Callable[[], bool]], Result]) -> Result | Response:
        """Return the result of `work`, which is done in a thread once there is a slot for it; an empty response where
        the client has left. `work` is given a function that returns whether it has.

        Raises:
            ApiError: the queue is full.
        """
        disconnect = asyncio.create_task(_wait_for_disconnect(http.receive))
        try:
            await self._admit(disconnect)
            try:
                return await asyncio.get_running_loop().run_in_executor(self._executor, work, disconnect.done)
            finally:
                self.admission.release(None)
        except (ClientLeft, Stopped):
            return Response(status_code=499)
        finally:
            disconnect.cancel()

    async def _begin(
        self, request: GenerationRequest, http: Request, prepare: Callable[[ServedModel], PreparedReply],
        disconnect: asyncio.Task[None],
    ) -> BegunReply:  # fmt: skip
        """Begin a reply, of a stream up to its first event. Raise ClientLeft where the client leaves first."""
        requested_at = perf_counter()
        keep_alive = None if request.keep_alive is None else keep_alive_seconds(request.keep_alive)
        lease = await _unless_left(self.models.lease(request.model, keep_alive), disconnect, Lease.release)
        task: ReplyTask | None = None
        try:
            served, prepared = lease.served, await in_reader(prepare, lease.served)
            options = prepared.options
            self._check_verified(request, http, served, options)
            seeds = [None if options.seed is None else options.seed + number for number in range(request.n)]
            starts = [
                partial(_started, write, replace(options, seed=seed)) for write in prepared.writes for seed in seeds
            ]
            await self._admit(disconnect, served)
            order = ReplyOrder(
                starts,
                requested_at,
                verified=requires_verified(request, http),
                progress=request.stream and request.return_progress,
                read=partial(_read, served.pair, options, _most_calls(request)) if options.tools else without_calls,
                redact=redact if self.anonymous else unredacted,
            )
            task = self._start(lease, order, disconnect)
            events = task.events()
            first = await anext(events, None) if request.stream else None
            begun, task = BegunReply(task, first, events, prepared.builder, prepared.ignored), None
            return begun
        finally:
            if task is not None:
                task.cancel()
            if not lease.used:
                lease.release()

    async def _pieces(
        self, begin: asyncio.Future[BegunReply], disconnect: asyncio.Task[None], waiting: ResponseBuilder
    ) -> AsyncIterator[bytes]:
        """Yield the pieces of a stream. Until it begins, they are those of `waiting`."""
        try:
            while not begin.done():
                for piece in waiting.waiting():
                    yield piece
                await asyncio.wait({begin}, timeout=SIGN_OF_LIFE)
            try:
                begun = begin.result()
            except ClientLeft:
                return
            except Exception as error:  # noqa: BLE001  the client gets to know any error
                self.report_unexpected(error)
                for piece in waiting.failure(self.error_info(error)):
                    yield piece
                return
            async for piece in stream_pieces(begun.task, begun.first, begun.events, begun.builder):
                yield piece
        finally:
            disconnect.cancel()
            _discard(begin)

    def error_info(self, error: BaseException) -> ErrorInfo:
        """Return the part of an error that a client may know."""
        info = error_info(error)
        return replace(info, message=redact(info.message)) if self.anonymous else info

    def _check_verified(
        self, request: GenerationRequest, http: Request, served: ServedModel, options: ReplyOptions
    ) -> None:
        """Raise ApiError where unverified text would be certain though `require_verified` asks for none."""
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
            message = f"{ignored[0]!r} has no effect here. Leave it out, or start the server without --strict."
            raise ApiError(ErrorInfo(400, message, param=ignored[0], code="unknown_parameter"))

    def report_unexpected(self, error: BaseException) -> None:
        """Report an error that edgellm does not raise on purpose to whoever runs the server; clients get no details."""
        if not isinstance(error, (EdgeError, ApiError)):
            self._on_error(f"A reply failed: {type(error).__name__}: {error}")

    async def shut_down(self, grace: float) -> None:
        """Refuse new requests, give replies `grace` seconds to end, then cancel them."""
        self.admission.close(STOPPING)
        self.models.pool.stop()
        try:
            async with asyncio.timeout(grace):
                await self.admission.wait_until_empty()
        except TimeoutError:
            for task in list(self._tasks):
                task.cancel()
            await self.admission.wait_until_empty()

    def close(self) -> None:
        """Close what was opened here. Call it after the event loop has ended."""
        self._executor.shutdown(wait=False)
        self.models.pool.close()

    async def _admit(self, disconnect: asyncio.Task[None], served: ServedModel | None = None) -> None:
        """Wait for a slot, for a reply also until its model has one. Raise ClientLeft where the client leaves first."""
        slot = self.admission.acquire() if served is None else self.admission.acquire(served.name, served.replies)
        try:
            await _unless_left(slot, disconnect)
        except ApiError:
            self.metrics.count_refused()
            raise

    def _start(self, lease: Lease, order: ReplyOrder, disconnect: asyncio.Task[None]) -> ReplyTask:
        served = lease.use()
        task = ReplyTask(order, self._fair_lock if served.in_turns else nullcontext(), self._record)
        self._tasks.add(task)
        run = asyncio.get_running_loop().run_in_executor(self._executor, partial(_run, task, served.recorder))
        run.add_done_callback(partial(self._finished, task, lease, perf_counter()))
        disconnect.add_done_callback(lambda _: task.cancel())
        return task

    def _record(self, summary: Summary | None, times: TokenTimes, failed: bool) -> None:
        self.metrics.record_reply(summary, times, failed)
        if summary is not None and summary.rtt_ms is not None:
            self.rtt_ms = summary.rtt_ms

    def _finished(
        self, task: ReplyTask, lease: Lease, started_at: float, run: asyncio.Future[BaseException | None]
    ) -> None:
        self._tasks.discard(task)
        lease.release()
        self.admission.release(perf_counter() - started_at, lease.served.name)
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


async def _unless_left(
    wanted: Coroutine[Any, Any, Result], disconnect: asyncio.Task[None], undo: Callable[[Result], None] | None = None
) -> Result:
    """Return the result of `wanted`. Raise ClientLeft where the client leaves first; `undo` is called with a result
    that nobody gets."""
    task = asyncio.ensure_future(wanted)
    taken = False
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        taken = task.done()
        if not taken:
            raise ClientLeft
        return task.result()
    finally:
        if not taken and not task.cancel() and undo is not None and task.exception() is None:
            undo(task.result())


def _discard(begin: asyncio.Future[BegunReply]) -> None:
    """Cancel a reply that nobody wants any more."""
    if not begin.done():
        begin.cancel()
    elif not begin.cancelled() and begin.exception() is None:
        begin.result().task.cancel()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _started(write: Callable[..., Reply], options: ReplyOptions, cancelled: Callable[[], bool]) -> Reply:
    return write(options, should_stop=cancelled)


def _most_calls(request: GenerationRequest) -> int | None:
    """Return how many calls of tools a reply to `request` may have; None: any number."""
    return 1 if isinstance(request, ChatRequest) and not request.parallel_tool_calls else None


def _read(
    pair: LLM, options: ReplyOptions, most: int | None, tokens: Iterable[Token], cut: Callable[[], bool]
) -> Iterator[Token | ToolCall]:
    """Yield the tokens of a reply, and its first `most` calls of tools."""
    calls = 0
    for one in pair.prompts.calls(tokens, options, cut):
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
        elif isinstance(event, Notice):
            notices.append(event)
    if len(written) < task.replies:
        return Response(status_code=499)  # the reply was cancelled, as the client has left
    if count := turns_left_out(written[0].notices):
        headers[LEFT_OUT] = str(count)
    if written[0].summary.tokens:
        headers[VERIFIED] = f"{written[0].summary.share_verified or 0.0:.4f}"
    return Response(json_bytes(builder.whole(written)), headers=headers, media_type="application/json")
