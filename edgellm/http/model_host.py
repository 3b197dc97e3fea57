"""The models behind one server: opened when a request names them, shared by requests, and closed when they are idle.

One model is opened at a time. A model is closed when nobody has used it for its keep-alive, or when another one needs
its memory; never while a reply uses it. What does not fit even then is refused before anything is closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Protocol

from edgellm.engine import ModelFile
from edgellm.errors import EdgeError, InvalidOption, MemoryShort, ModelNotFound, Stopped
from edgellm.http.admission import STOPPING
from edgellm.http.embedding import ServedEmbedder
from edgellm.http.mesh_status import MeshRecorder
from edgellm.http.schemas.errors import SERVER, ApiError, ErrorInfo
from edgellm.http.schemas.requests import GenerationRequest
from edgellm.http.schemas.responses import ModelInfo
from edgellm.llm import LLM
from edgellm.llm.model_loading import PairMemory
from edgellm.spec.params import ReplyOptions
from edgellm.system import mapped_memory

KEEP_ALIVE = 300.0  # seconds
_LEAST_SECONDS = 2.0  # for which a model that was opened waits for its request
BUSY_SECONDS = 120.0  # for which a model waits for the memory of others that are in use
LOADING = ErrorInfo(503, "The model is being loaded. Try again soon.", SERVER, code="loading", retry_after=1.0)
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ms|s|m|h|)")
_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_log = logging.getLogger(__name__)


def keep_alive_seconds(value: str | float) -> float:
    """Return the seconds of a keep-alive such as 5m, 30s, 1h30m or 300; below zero it is infinite, as in Ollama. Raise
    InvalidOption if it is none."""
    text = str(value).strip()
    parts = list(_DURATION.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        raise InvalidOption(f"The keep-alive is {text[:40]!r}.", "Give a time such as 5m or 300, or -1 for no end.")
    if text.startswith("-"):
        return math.inf
    return sum(float(part[1]) * _UNITS[part[2]] for part in parts)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A pair and the name that it is served by. `in_turns`: replies compute on this device's processor, round by round.

    `options` are the choices that requests do not make. `recorder` records what the devices of a mesh do for a reply.
    At most so many `replies` are written at once; None: as many as the server writes.
    """

    pair: LLM
    name: str
    in_turns: bool = True
    options: ReplyOptions = field(default_factory=ReplyOptions)
    recorder: MeshRecorder | None = None
    replies: int | None = None
    created: int = field(default_factory=lambda: int(time()))

    def info(self) -> ModelInfo:
        return ModelInfo(id=self.name, created=self.created, context_length=self.pair.context_length, loaded=True)

    def options_for(self, request: GenerationRequest) -> ReplyOptions:
        """Return the options of a reply to `request`.

        Raises:
            ApiError, InvalidOption: the parameters contradict each other, or are out of range.
        """
        return request.options(self.options, self.pair.context_length)


class Opener(Protocol):
    """A model that can be opened, and again once it was closed. The methods are called in a thread."""

    @property
    def name(self) -> str: ...

    def file(self) -> ModelFile | None:
        """Return the file of the model that decides the text; None where it is on another device. Raises what
        `ModelFile.open` raises."""

    def check_fits(self, beside: Counter[str]) -> None:
        """Raise MemoryShort where the model does not fit; `beside` as for `LLM.open`."""

    def open(self, beside: Counter[str], is_closing: Callable[[], bool]) -> ServedModel:
        """Open the model. Raise Stopped where `is_closing` returns True meanwhile."""


class ModelCatalog(Protocol):
    """The models that requests may name besides the one that is served by default."""

    def find(self, name: str) -> Opener:
        """Return the model of that name. Raises ModelNotFound."""

    def infos(self) -> Sequence[ModelInfo]:
        """Return all models that can be named."""


class LoadedModel:
    """A model in memory, which `users` requests use. `keep_alive` is in seconds; `opener` is None where the model is
    never closed."""

    def __init__(self, served: ServedModel, opener: Opener | None, keep_alive: float) -> None:
        self.served, self.opener, self.keep_alive = served, opener, keep_alive
        self.users = 0
        self.closing = False  # no one else gets it
        self.used_at = monotonic()
        self.timer: asyncio.TimerHandle | None = None
        self.unused = asyncio.Event()
        self.unused.set()

    @property
    def name(self) -> str:
        return self.served.name

    @property
    def idle_s(self) -> float:
        """Return for how many seconds no request has used it."""
        return 0.0 if self.users else monotonic() - self.used_at

    @property
    def expires_s(self) -> float | None:
        """Return in how many seconds it will be closed; None: it stays."""
        return None if math.isinf(self.keep_alive) else self.keep_alive - self.idle_s


class Lease:
    """A model that is not closed before `release`."""

    def __init__(self, served: ServedModel, on_released: Callable[[], None]) -> None:
        self.served, self._on_released = served, on_released
        self.used = self._released = False

    def use(self) -> ServedModel:
        """Return the model, for a reply that calls `release` at its end."""
        self.used = True
        return self.served

    def release(self) -> None:
        """Give the model back; a second call does nothing."""
        if not self._released:
            self._released = True
            self._on_released()


class ModelHost:
    """The models of one server. Methods other than `open`, `add`, `open_without_model` and `close` are for its event
    loop."""

    def __init__(self, keep_alive: float = KEEP_ALIVE, waiting: int = 16) -> None:
        """A model that a request named is closed `keep_alive` seconds after its last use. Up to `waiting` requests wait
        for models to be opened."""
        self._keep_alive, self._most_waiting = keep_alive, waiting
        self._loaded: dict[str, LoadedModel] = {}
        self._openers: dict[str, Opener] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._waiting = 0
        self._lock = asyncio.Lock()  # held while models are opened and closed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgellm-models")
        self._tasks: set[asyncio.Task[None]] = set()
        self._catalog: ModelCatalog | None = None
        self._default: str | None = None
        self._embedder: ServedEmbedder | None = None
        self._no_model_reason = ""
        self._closing = False

    def open(self, served: ServedModel, *, opener: Opener | None = None, catalog: ModelCatalog | None = None) -> None:
        """Serve `served` by default from now on, and the models of `catalog` by name. With an `opener` it is the host's
        from now on, which closes it when others need its memory, and opens it again; without, it is left open."""
        self._catalog = catalog
        if opener is not None:
            self._openers[served.name] = opener
        self._loaded = {**self._loaded, served.name: LoadedModel(served, opener, math.inf)}  # others may be reading it
        self._default = served.name

    def add(self, served: ServedModel) -> None:
        """Serve another model by its name from now on; it is left open."""
        self._loaded = {**self._loaded, served.name: LoadedModel(served, None, math.inf)}

    def open_embedder(self, embedder: ServedEmbedder) -> None:
        """Embed texts with `embedder` from now on, beside the models that write replies."""
        self._embedder = embedder

    @property
    def embedder(self) -> ServedEmbedder | None:
        return self._embedder

    def open_without_model(self, reason: str) -> None:
        """Refuse requests for a model with `reason` from now on."""
        self._no_model_reason = reason

    @property
    def default_name(self) -> str | None:
        """Return the name of the model that is served by default; None if there is none. Raises ApiError (503) while it
        is first being loaded."""
        if self._default is None and not self._no_model_reason:
            raise ApiError(LOADING)
        return self._default

    @property
    def default(self) -> ServedModel | None:
        """Return the model that is served by default; None if there is none, or if it is not in memory. Raises as
        `default_name`."""
        loaded = self._loaded.get(self.default_name or "")
        return None if loaded is None else loaded.served

    @property
    def loading(self) -> list[str]:
        """Return the names of models that requests wait for."""
        return list(self._loading)

    def loaded(self) -> list[LoadedModel]:
        """Return the models in memory, the latest used first."""
        return sorted(self._loaded.values(), key=lambda one: (not one.users, -one.used_at))

    def answers(self) -> list[tuple[str, bool]]:
        """Return the names of the models in memory, and whether each can write a reply: one without a draft model here
        cannot while its verifier is away."""
        found = []
        for name, one in self._loaded.items():
            pair = one.served.pair
            up = pair.draft_name is not None or pair.verifier_up is None or pair.verifier_up()
            found.append((name, up))
        return found

    async def infos(self) -> list[ModelInfo]:
        """Return all models that can be named, the default one first."""
        listed = [] if self._catalog is None else await asyncio.to_thread(self._catalog.infos)
        here = {name: one.served.info() for name, one in self._loaded.items()}
        embeds = {} if self._embedder is None else {self._embedder.name: self._embedder.info()}
        known = {info.id: info for info in listed} | embeds | here
        first = [self.default_name] if self.default_name in known else []
        return [known[name] for name in dict.fromkeys([*first, *known])]

    async def info(self, name: str) -> ModelInfo:
        """Return one model. Raises ApiError (404) where there is none of that name."""
        found = name if self._embeds(name) else await self._find(name)
        known = next((info for info in await self.infos() if info.id == found), None)
        return known or self._loaded[found].served.info()

    async def file(self, name: str) -> ModelFile | None:
        """Return the file of a model; None where it is on another device. Raises ApiError (404) where there is none of
        that name."""
        if self._embedder is not None and self._embeds(name):
            return self._embedder.file
        found = await self._find(name)
        model = None if (loaded := self._loaded.get(found)) is None else loaded.served.pair.text_model
        if model is not None:
            return model.file
        opener = self._openers.get(found)
        return None if opener is None else await asyncio.to_thread(opener.file)

    async def lease(self, name: str | None, keep_alive: float | None = None) -> Lease:
        """Return the model of that name, by default the server's, opened if need be. `keep_alive` says for how many
        seconds it stays in memory after its use.

        Raises:
            ApiError: there is no such model (404), too many requests wait for one (429), or it is being loaded for the
                first time, or waits too long for memory that others use (503).
            EdgeError: it cannot be opened; MemoryShort if it does not fit.
        """
        found = await self._find(name)
        while (loaded := self._loaded.get(found)) is None or loaded.closing:
            if self._waiting >= self._most_waiting:
                message = f"{self._waiting} requests wait for models to be loaded. Try again later."
                raise ApiError(ErrorInfo(429, message, "rate_limit_error", code="queue_full", retry_after=5.0))
            self._waiting += 1
            try:
                # the task goes on where this request ends: others may wait for it
                await asyncio.shield(self._load(found))
            finally:
                self._waiting -= 1
        if loaded.timer is not None:
            loaded.timer.cancel()
        if keep_alive is not None and loaded.opener is not None:
            loaded.keep_alive = keep_alive
        loaded.users += 1
        loaded.unused.clear()
        return Lease(loaded.served, lambda: self._release(loaded))

    async def unload(self, name: str) -> bool:
        """Close a model once no request uses it; return whether it is closed already. Raises ApiError where it is not
        in memory (404), or stays there as long as the server runs (400)."""
        found = await self._find(name)
        if (loaded := self._loaded.get(found)) is None:
            raise ApiError(ErrorInfo(404, f"{found} is not in memory.", code="model_not_loaded", param="model"))
        if loaded.opener is None:
            raise ApiError(ErrorInfo(400, f"{found} stays in memory as long as this server runs. Stop the server.",
                                     param="model"))  # fmt: skip
        loaded.closing = True
        task = asyncio.get_running_loop().create_task(self._close_all([loaded]))
        self._keep(task)
        if loaded.users:
            return False
        await asyncio.shield(task)
        return True

    def stop_loading(self) -> None:
        """Open no more models."""
        self._closing = True

    def close(self) -> None:
        """Close all models that are the host's. Called when no request uses them any more, in any thread."""
        self.stop_loading()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for loaded in list(self._loaded.values()):
            if loaded.opener is not None:
                loaded.served.pair.close()
        self._loaded.clear()

    async def _find(self, name: str | None) -> str:
        """Return the name of the model that `name` means, for which there is an opener if it is not loaded."""
        default = self.default_name
        if default is None:
            raise ApiError(ErrorInfo(404, self._no_model_reason, code="model_not_found"))
        if name is None:
            return default
        if self._embeds(name):
            message = f"{name} embeds texts, and writes no replies. Ask for {default!r}, or leave model out."
            raise ApiError(ErrorInfo(400, message, param="model"))
        if name in self._loaded or name in self._openers:
            return name
        if self._catalog is None:
            others = "".join(f" or {one!r}" for one in self._loaded if one != default)
            message = f"The model {name!r} is not served here. Ask for {default!r}{others}, or leave model out."
            raise ApiError(ErrorInfo(404, message, code="model_not_found", param="model"))
        try:
            opener = await asyncio.to_thread(self._catalog.find, name)
        except ModelNotFound as error:
            message = f"{error.what} {error.next_step}"
            raise ApiError(ErrorInfo(404, message, code="model_not_found", param="model")) from None
        if opener.name not in self._openers:
            self._openers[opener.name] = opener
        return opener.name

    def _embeds(self, name: str) -> bool:
        """Return whether `name` is the model that embeds texts, and no other one in memory."""
        return self._embedder is not None and name == self._embedder.name and name not in self._loaded

    def _release(self, loaded: LoadedModel) -> None:
        loaded.users -= 1
        loaded.used_at = monotonic()
        if not loaded.users:
            loaded.unused.set()
            self._expire_after(loaded, loaded.keep_alive)

    def _expire_after(self, loaded: LoadedModel, seconds: float) -> None:
        if loaded.opener is not None and not math.isinf(seconds):
            loaded.timer = asyncio.get_running_loop().call_later(seconds, self._expire, loaded)

    def _expire(self, loaded: LoadedModel) -> None:
        if not loaded.users and not loaded.closing and not self._closing:
            loaded.closing = True
            _log.info("%s is closed: unused for %.0f s", loaded.name, loaded.keep_alive)
            self._keep(asyncio.get_running_loop().create_task(self._close_all([loaded])))

    def _load(self, name: str) -> asyncio.Task[None]:
        task = self._loading.get(name)
        if task is None:
            task = self._loading[name] = asyncio.get_running_loop().create_task(self._open(name))
            self._keep(task)
            task.add_done_callback(lambda _: self._loading.pop(name))
        return task

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Keep a task until it has ended; its error is for those who wait for it."""
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if not done.cancelled():
                done.exception()

        task.add_done_callback(ended)

    async def _open(self, name: str) -> None:
        """Open a model, closing others first where it does not fit beside them. Raises as `lease`."""
        async with self._lock:
            loaded = self._loaded.get(name)
            if loaded is not None and not loaded.closing:
                return
            if loaded is not None:
                await self._close_now([loaded])
            if self._closing:
                raise ApiError(STOPPING)
            opener, run = self._openers[name], asyncio.get_running_loop().run_in_executor
            victims = await run(self._thread, self._choose, opener, self._candidates())
            await self._close_unused(victims, name)
            beside = beside_memory([one.served.pair.memory for one in self._loaded.values()], ())
            served = await run(self._thread, self._open_now, opener, beside)
            keep_alive = math.inf if name == self._default else self._keep_alive
            self._loaded[name] = loaded = LoadedModel(served, opener, keep_alive)
            self._expire_after(loaded, max(keep_alive, _LEAST_SECONDS))  # requests for it may all have left

    def _open_now(self, opener: Opener, beside: Counter[str]) -> ServedModel:
        try:
            served = opener.open(beside, self._is_closing)
        except Stopped:
            raise ApiError(STOPPING) from None
        if self._closing:
            served.pair.close()
            raise ApiError(STOPPING)
        return served

    def _is_closing(self) -> bool:
        return self._closing

    def _candidates(self) -> list[LoadedModel]:
        """Return the models that may be closed, in that order: unused ones first, the longest unused before others."""
        own = [one for one in self._loaded.values() if one.opener is not None]
        return sorted(own, key=lambda one: (bool(one.users), one.used_at))

    def _choose(self, opener: Opener, candidates: Sequence[LoadedModel]) -> list[LoadedModel]:
        """Return as few of `candidates` as must be closed for a model to fit. Raises what `check_fits` raises where it
        does not fit even then."""
        loaded = list(self._loaded.values())
        for count in range(len(candidates) + 1):
            victims = list(candidates[:count])
            kept = [one.served.pair.memory for one in loaded if one not in victims]
            try:
                opener.check_fits(beside_memory(kept, [one.served.pair.memory for one in victims]))
            except MemoryShort:
                if count == len(candidates):
                    raise
            else:
                return victims
        return []

    async def _close_unused(self, victims: Sequence[LoadedModel], name: str) -> None:
        """Close models once no request uses them. Raises ApiError where that takes too long: all are kept then."""
        marked = [one for one in victims if not one.closing]
        for one in marked:
            one.closing = True
        try:
            async with asyncio.timeout(BUSY_SECONDS):
                for one in victims:
                    await one.unused.wait()
        except TimeoutError:
            for one in marked:
                one.closing = False
            busy = ", ".join(one.name for one in victims if one.users)
            raise ApiError(ErrorInfo(503, f"{name} needs the memory of {busy}, which is still in use. Try again later.",
                                     SERVER, code="memory_in_use", retry_after=BUSY_SECONDS / 4)) from None  # fmt: skip
        if victims:
            _log.info("%s closed: %s needs memory", ", ".join(one.name for one in victims), name)
        await self._close_now(victims)

    async def _close_all(self, models: Sequence[LoadedModel]) -> None:
        """Close models that are marked as closing, once nobody uses them."""
        for one in models:
            await one.unused.wait()
        async with self._lock:
            await self._close_now([one for one in models if self._loaded.get(one.name) is one])

    async def _close_now(self, models: Iterable[LoadedModel]) -> None:
        for one in models:
            await one.unused.wait()
            if one.timer is not None:
                one.timer.cancel()
            del self._loaded[one.name]
            with suppress(EdgeError):
                await asyncio.get_running_loop().run_in_executor(self._thread, one.served.pair.close)


def beside_memory(kept: Sequence[PairMemory], closed: Sequence[PairMemory]) -> Counter[str]:
    """Return the bytes by device that a model finds taken though the system counts them as free: weights of `kept`
    models that are pages of files, and their contexts that are not opened yet; less what models give back that are
    `closed` first and the system counts as taken.

    A model's pages are in memory as pages of a file or, where llama.cpp has packed them again, as its own.
    """
    mapped = sum(one.mapped for one in (*kept, *closed))
    resident = mapped_memory()
    share = 1.0 if resident is None or not mapped else min(1.0, resident / mapped)
    found: Counter[str] = Counter()
    for one in kept:
        found["CPU"] += int(share * one.mapped)
        found.update(one.unopened)
    for one in closed:
        found.subtract(one.by_device)
        found.update(one.unopened)
        found["CPU"] += int(share * one.mapped)
    return found
