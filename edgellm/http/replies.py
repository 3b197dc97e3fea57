"""Replies to HTTP clients: admitted, written in threads, passed on as events, cancelled when their client leaves."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TypeAlias, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive

from edgellm.engine import ToolCall
from edgellm.errors import EdgeError, Stopped
from edgellm.http.admission import Admission
from edgellm.http.metrics import Metrics
from edgellm.http.middleware import HttpConfig, Keys, redact
from edgellm.http.model_host import ModelHost, ServedModel, keep_alive_seconds
from edgellm.http.schemas.body import in_reader
from edgellm.http.schemas.errors import ApiError, api_error
from edgellm.http.schemas.requests import ChatRequest, GenerationRequest
from edgellm.http.schemas.responses import Event, Writer, WrittenReply, json_bytes
from edgellm.llm.mesh_timeline import MeshRecorder
from edgellm.sleeping import AWAKE
from edgellm.spec.params import ReplyOptions
from edgellm.spec.stats import Summary
from edgellm.spec.stream import Reply, whole_characters
from edgellm.spec.types import UNVERIFIED, Ids, Notice, Token

IGNORED, VERIFIED, REQUIRE = "X-EdgeLLM-Ignored", "X-EdgeLLM-Verified", "X-EdgeLLM-Require-Verified"
LEFT_OUT, INSTEAD, CHANGED = "X-EdgeLLM-Turns-Left-Out", "X-EdgeLLM-Model", "X-EdgeLLM-Template"
"""Headers: parameters of the request without effect; the share of a whole reply's tokens that the verifier checked; of
a request, 1 or true to ask for `require_verified`; turns that truncation left out; the model that answers for another
name; and what the chat template has changed in the conversation."""
SIGN_OF_LIFE = 10.0  # seconds between signs of a stream that waits for a model, a slot or its first token
_MAX_NAMED, _MAX_NAME = 20, 60  # unknown parameters that a header names, and characters of each
_T = TypeVar("_T")
Shown: TypeAlias = Callable[[str], str]
StartReply: TypeAlias = Callable[..., Reply]
"""Starts a reply. It is given `should_stop`, a function that returns whether the reply is cancelled."""


def header_names(names: Iterable[str]) -> list[str]:
    """Return the first of the `names` of parameters that have no effect, fit for a header."""
    return [re.sub(r"[^\w.-]", "?", name, flags=re.ASCII)[:_MAX_NAME] for name in sorted(names)[:_MAX_NAMED]]


def left_response() -> Response:
    """Return the answer to a client that has left."""
    return Response(status_code=499)


class _Job:
    """The replies to one request, which are written one after the other. `write` is for a thread, all else for the
    event loop."""

    def __init__(
        self, handler: "RequestHandler", request: GenerationRequest, writer: Writer, shown: Shown, *, verified: bool
    ) -> None:
        """`shown` as for `RequestHandler.reader`. `verified`: an unchecked token ends a reply with an error."""
        self._handler, self.shown = handler, shown
        self.request, self.writer, self.verified = request, writer, verified
        self.requested_at = perf_counter()
        self.ignored: set[str] = set()  # parameters without effect
        self.instead = ""  # the model that answers for a foreign name
        self.changed = ""  # what the chat template wants otherwise
        self.count = 1
        self.with_calls: Callable[..., Iterator[Token | ToolCall]] | None = None  # tells calls of tools from tokens
        self.one_call = False  # only a reply's first call is returned
        self.work: asyncio.Task[None] | None = None  # the task that may be cancelled: no reply is begun yet
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event | ApiError | None] = asyncio.Queue()
        self._reply: Reply | None = None
        self._cancelled = False

    @property
    def summary(self) -> Summary:
        """Return the figures of the reply so far."""
        return Summary() if self._reply is None else self._reply.summary

    @property
    def headers(self) -> dict[str, str]:
        found = {IGNORED: ", ".join(header_names(self.ignored)), INSTEAD: self.instead, CHANGED: self.changed}
        return {name: value for name, value in found.items() if value}

    def is_cancelled(self) -> bool:
        return self._cancelled

    def cancel(self) -> None:
        """Cancel the replies and return at once. The thread ends soon after, even within a long decode."""
        self._cancelled = True  # A reply that begins just now sees this.
        if self._reply is not None:
            self._reply.cancel()
        if self.work is not None:
            self.work.cancel()
        self._events.put_nowait(None)

    async def next(self) -> Event | None:
        """Return the next text, notice or summary; None after `cancel`. Raise ApiError where a reply failed."""
        event = await self._events.get()
        if isinstance(event, ApiError):
            raise event
        return event

    @property
    def has_more(self) -> bool:
        """Return whether `next` has something at once."""
        return not self._events.empty()

    def put(self, event: Event | ApiError) -> None:
        """Add an event, in any thread."""
        self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def write(self, start: StartReply) -> Summary | None:
        """Write a reply until it ends or is cancelled; return its figures, or None where `next` raises an error. It is
        recorded before the client gets either."""
        times, summary, error = [self.requested_at], Summary(), None
        try:
            self._reply = reply = start(should_stop=self.is_cancelled)
            self.changed = " ".join(reply.told)
            try:
                if not self._cancelled:
                    self._pass_on(reply, times)
            finally:
                reply.close()
                summary = reply.summary
        except Stopped:  # there is no reply yet
            pass
        except BaseException as raised:  # noqa: BLE001  the client and the caller get to know any error
            error = self._handler.answer_to(raised, self.shown)
        self._handler.metrics.record_reply(summary, times, error is not None)
        self.put(error or summary)
        return None if error else summary

    def _pass_on(self, reply: Reply, times: list[float]) -> None:
        progress = self.put if self.request.stream and self.request.return_progress else None
        reply.listen(on_notice=self._notice, on_progress=progress)
        events: Iterator[Token | ToolCall] = reply
        if self.with_calls is not None:
            events = self.with_calls(events, cut=lambda: reply.summary.finish_reason != "stop")
        called = False
        for event in whole_characters(self._timed(events, times)):
            if isinstance(event, ToolCall):
                if called and self.one_call:
                    continue
                called = True
            self.put(event)

    def _timed(self, events: Iterable[Token | ToolCall], times: list[float]) -> Iterator[Token | ToolCall]:
        """Yield the same events, and add the time of each token. Raise ApiError for one that must be verified."""
        for event in events:
            if isinstance(event, Token):
                if self.verified and event.source in UNVERIFIED:
                    what = "The verifier is not available, and the request allows no unverified text."
                    message = f"{what} Try again, or leave require_verified out."
                    raise ApiError(503, message, code="not_verified", retry_after=2.0)
                times.append(perf_counter())
            yield event

    def _notice(self, notice: Notice) -> None:
        self.put(replace(notice, text=self.shown(notice.text)))


class RequestHandler:
    """The handlers of one server. Methods other than `close` must be called in its event loop."""

    def __init__(self, config: HttpConfig) -> None:
        self.config, self.keys = config, Keys(config.key, config.page_key, config.on_event)
        self.admission = Admission(config.replies, config.waiting)
        self.models = ModelHost(config.keep_alive, config.waiting, config.aliases)
        self.metrics = Metrics(self.admission)
        self._executor = ThreadPoolExecutor(config.replies, thread_name_prefix="edgellm-http")
        self._jobs: set[_Job] = set()

    async def reply(
        self, request: GenerationRequest, http: Request, writer: Writer, ignored: Iterable[str]
    ) -> Response:
        """Return a reply, whole or as a stream. It is cancelled when the client leaves. An API gives the writer of its
        responses, and the parameters of its request that are `ignored`. Raises ApiError: the model is not ready or is
        not here, parameters contradict each other or are out of range, the queue is full, or the reply failed before
        its first token."""
        verified = request.require_verified or http.headers.get(REQUIRE, "").lower() in ("1", "true")
        job = _Job(self, request, writer, self.reader(http), verified=verified)
        job.ignored.update(await in_reader(lambda: header_names([*ignored, *request.unkept()])))
        self.check_known(sorted(job.ignored))
        job.work = asyncio.create_task(self._write(job))
        self._jobs.add(job)
        job.work.add_done_callback(lambda _: self._jobs.discard(job))
        left = asyncio.create_task(_when_left(http.receive, job.cancel))
        streams = False
        try:
            if not request.stream:
                return await self._whole(job)
            first: Event | None = None
            with suppress(TimeoutError):  # an error before the first token gets its own status, unless that takes long
                async with asyncio.timeout(SIGN_OF_LIFE):
                    if (first := await job.next()) is None:
                        return left_response()
            # nginx would hold a stream back
            headers = {**job.headers, "X-Accel-Buffering": "no"}
            streams = True
            return StreamingResponse(self._pieces(job, first, left), media_type=writer.media_type, headers=headers)
        finally:
            if not streams:
                left.cancel()
                job.cancel()

    async def count_tokens(self, request: ChatRequest, http: Request, ignored: Iterable[str]) -> int | Response:
        """Return how many tokens the prompt of a conversation has."""
        messages = await in_reader(request.turns)
        self.check_known(header_names(ignored))
        async with self.models.lease(request.model) as served:

            def count(left: Callable[[], bool]) -> Ids:
                options, _ = self._fitting_options(served, request, {})
                return served.pair.prompt_writer.ids(messages, options, left)

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
                self.admission.release()
        except (asyncio.CancelledError, Stopped):
            return left_response()
        finally:
            left.cancel()

    def check_known(self, ignored: Sequence[str]) -> None:
        """Raise ApiError where parameters are `ignored`, and the server is strict."""
        if self.config.strict and ignored:
            message = f"{ignored[0]!r} has no effect here. Leave it out, or start the server without --strict."
            raise ApiError(400, message, param=ignored[0], code="unknown_parameter")

    def answer_to(self, error: BaseException, shown: Shown) -> ApiError:
        """Return the answer to an error, as `shown` to a client; whoever runs the server gets what was not foreseen."""
        if not isinstance(error, (EdgeError, ApiError)):
            self.config.on_event(f"A reply failed: {type(error).__name__}: {error}")
        return api_error(error, shown)

    def reader(self, client: Request) -> Shown:
        """Return the function that makes of a text what a client may read."""
        return redact if self.keys.is_anonymous(client) else str

    async def shut_down(self, grace: float) -> None:
        """Refuse new requests, give replies `grace` seconds to end, then cancel them."""
        self.admission.close()
        self.models.stop()
        try:
            async with asyncio.timeout(grace):
                await self.admission.wait_until_empty()
        except TimeoutError:
            for job in list(self._jobs):
                job.cancel()
            await self.admission.wait_until_empty()

    def close(self) -> None:
        """Close what was opened here. Call it after the event loop has ended."""
        self._executor.shutdown(wait=False)
        self.models.close()

    async def _write(self, job: _Job) -> None:
        """Write all replies to a request: have its model loaded, wait for a slot, then write them in a thread."""
        request = job.request
        try:
            keep_alive = None if request.keep_alive is None else keep_alive_seconds(request.keep_alive)
            async with self.models.lease(request.model, keep_alive) as served:
                starts = await in_reader(self._prepare, job, served)
                await self._admit(served)
                job.work = None
                try:
                    run = asyncio.get_running_loop().run_in_executor
                    await run(self._executor, self._run, job, starts, served.recorder)
                finally:
                    self.admission.release(served.name)
        except Exception as error:  # noqa: BLE001  the client gets to know any error
            job.put(self.answer_to(error, job.shown))

    def _prepare(self, job: _Job, served: ServedModel) -> Sequence[StartReply]:
        """Return what starts each of the replies. Raises ApiError where the model cannot write what is asked for."""
        request = job.request
        options, ignored = self._fitting_options(served, request, job.writer.names)
        if job.verified:
            _check_verified(served, options)
        if request.model not in (None, served.name):
            job.instead = re.sub(r"[^!-~]", "?", served.name)
        job.writer.begin(served.name, served.pair.piece)
        job.ignored.update(ignored)
        if isinstance(request, ChatRequest) and options.tools:
            job.with_calls = partial(served.pair.prompt_writer.calls, options=options)
            job.one_call = not request.parallel_tool_calls
        seeds = [None if options.seed is None else options.seed + number for number in range(request.n)]
        writes = request.writes(served.pair)
        job.count = len(writes) * len(seeds)
        return [partial(write, replace(options, seed=seed)) for write in writes for seed in seeds]

    def _fitting_options(
        self, served: ServedModel, request: GenerationRequest, names: Mapping[str, str]
    ) -> tuple[ReplyOptions, list[str]]:
        """Return the options that the model has, and the parameters ignored. Raises ApiError if those are forbidden."""
        options = request.options(served.options, served.pair.context_length)
        if not isinstance(request, ChatRequest):
            return options, []
        options, left_out = served.pair.prompt_writer.fitting_options(options)
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

    def _run(self, job: _Job, starts: Sequence[StartReply], recorder: MeshRecorder | None) -> None:
        """Write the replies, of which the `recorder` keeps the times of the last one."""
        summary = None
        if recorder is not None:
            recorder.reply_started()
        try:
            for start in starts:
                with AWAKE.working():
                    summary = job.write(start)
                if summary is None or job.is_cancelled():
                    break
        finally:
            if recorder is not None:
                recorder.reply_finished(summary)

    async def _whole(self, job: _Job) -> Response:
        """Return the whole response, with the share of its tokens that were verified."""
        written, events = list[WrittenReply](), list[Event]()
        while not written or len(written) < job.count:
            if (event := await job.next()) is None:
                return left_response()
            if isinstance(event, Summary):
                written.append(WrittenReply(events, event))
                events = []
            else:
                events.append(event)
        headers, first = job.headers, written[0]
        if left_out := first.turns_left_out:
            headers[LEFT_OUT] = str(left_out)
        if first.summary.tokens:
            headers[VERIFIED] = f"{first.summary.share_verified or 0.0:.4f}"
        return Response(json_bytes(job.writer.whole(written)), headers=headers, media_type="application/json")

    async def _pieces(self, job: _Job, event: Event | None, client: asyncio.Task[None]) -> AsyncIterator[bytes]:
        """Yield the pieces of a stream that begins with `event`; until there is one, signs of life."""
        writer, ended, begun, ready = job.writer, 0, False, list[bytes]()
        try:
            while event is None:
                yield writer.waiting()
                with suppress(TimeoutError):
                    async with asyncio.timeout(SIGN_OF_LIFE):
                        if (event := await job.next()) is None:
                            return
            while event is not None:
                if not begun:
                    ready += map(writer.framed, writer.open(job.summary))
                begun = not isinstance(event, Summary)
                ended += not begun
                ready += map(writer.framed, writer.pieces(event, last=ended == job.count))
                if ended == job.count:
                    yield b"".join((*ready, writer.last_bytes))
                    return
                if not job.has_more:  # A write takes longer than a piece.
                    yield b"".join(ready)
                    ready = []
                event = await job.next()
        except ApiError as error:
            yield b"".join((*ready, writer.framed(writer.failure(error))))
        finally:
            client.cancel()
            job.cancel()


def _check_verified(served: ServedModel, options: ReplyOptions) -> None:
    """Raise ApiError where unverified text would be certain though `require_verified` asks for none."""
    reason = None
    if served.pair.verifier_name is None:
        reason = "no verifier is open here. Leave it out."
    elif options.budget not in (None, 1.0) or options.gate not in ("auto", "always"):
        reason = "the budget or the gate leaves drafts unchecked. Leave one of them out."
    if reason is not None:
        raise ApiError(400, f"require_verified is set, and {reason}", param="require_verified")


async def _when_left(receive: Receive, call: Callable[[], object]) -> None:
    """Call `call` when the client leaves."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call()
