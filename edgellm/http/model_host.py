"""The models of one server: found by name, opened when they are asked for, shared by requests, closed when idle.

One model is opened at a time. A model is closed when nobody has used it for its keep-alive, or when another one needs
its memory; never while a reply uses it. What does not fit even then is refused before anything is closed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from time import monotonic, time
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

from edgellm.engine import ModelFile
from edgellm.errors import EdgeError, InvalidOption, MemoryShort, ModelNotFound, Stopped
from edgellm.http.admission import stopping
from edgellm.http.schemas.errors import ApiError
from edgellm.http.schemas.responses import ModelInfo
from edgellm.llm import LLM
from edgellm.llm.mesh_timeline import MeshRecorder
from edgellm.llm.model_loading import PairMemory
from edgellm.spec.params import ReplyOptions
from edgellm.system import mapped_memory

if TYPE_CHECKING:
    from edgellm.engine.embedding.embedder import Embedder

KEEP_ALIVE = 300.0  # seconds
MIN_IDLE_SECONDS = 2.0  # least time before a model that was opened may be closed unused
BUSY_SECONDS = 120.0  # longest wait for the memory of models in use
_DURATION = re.compile(r"(-?\d+(?:\.\d+)?)(ms|s|m|h|)")
_SERVICES = re.compile(r"(claude|gpt)-", re.IGNORECASE)  # names of a service's models, which agents ask for
_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0}
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


def keep_alive_seconds(value: str | float, name: str = "The keep-alive") -> float:
    """Return the seconds of 5m, 1h30m or 300; below zero it is infinite, as in Ollama. Raises InvalidOption."""
    text = str(value).strip()
    parts = list(_DURATION.finditer(text))
    if not parts or "".join(part[0] for part in parts) != text:
        raise InvalidOption(f"{name} is {text[:40]!r}.", "Give a time such as 5m or 300, or -1 for no end.")
    if text.startswith("-"):
        return math.inf
    return sum(float(part[1]) * _UNITS[part[2]] for part in parts)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A pair and the name that it is served by. `options` are the choices that requests leave open; up to `replies` are
    written at once."""

    pair: LLM
    name: str
    options: ReplyOptions = field(default_factory=ReplyOptions)
    recorder: MeshRecorder | None = None
    replies: int | None = None
    created: int = field(default_factory=lambda: int(time()))

    def info(self) -> ModelInfo:
        return ModelInfo(id=self.name, created=self.created, context_length=self.pair.context_length, loaded=True)


@dataclass(frozen=True, slots=True)
class ServedEmbedder:
    """A model that embeds texts, besides those that write replies, and the name that it is served by."""

    name: str
    embedder: Embedder
    created: int = field(default_factory=lambda: int(time()))

    def info(self) -> ModelInfo:
        length = self.embedder.positions
        return ModelInfo(id=self.name, created=self.created, context_length=length, loaded=True, embeds=True)


class Opener(Protocol):
    """A model that can be opened, and again once it was closed. The methods are called in a thread."""

    @property
    def name(self) -> str: ...

    def file(self) -> ModelFile | None:
        """Return the file of the model that decides the text; None where it is on another device."""

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


class _LoadedModel:
    """A model in memory, which is closed `keep_alive` seconds after its last use if it is `owned`."""

    def __init__(self, served: ServedModel, keep_alive: float, *, owned: bool) -> None:
        self.served, self.name, self.keep_alive, self.owned = served, served.name, keep_alive, owned
        self.users = 0
        self.closing = False  # no further request gets the model
        self.used_at = monotonic()
        self.timer: asyncio.TimerHandle | None = None
        self.retiring: asyncio.Task[None] | None = None  # asyncio does not keep a task that runs
        self.unused = asyncio.Event()
        self.unused.set()

    @property
    def idle_s(self) -> float:
        """Return the seconds since a request last used the model."""
        return 0.0 if self.users else monotonic() - self.used_at

    @property
    def expires_s(self) -> float | None:
        """Return the seconds until the model is closed; None: it stays."""
        return None if math.isinf(self.keep_alive) else self.keep_alive - self.idle_s

    @property
    def can_write(self) -> bool:
        """Return whether the model can write: one without a draft model here cannot while its verifier is away."""
        pair = self.served.pair
        return pair.draft_name is not None or pair.verifier_up is None or pair.verifier_up()


class ModelHost:
    """The models of one server, by their names. Methods other than `open`, `add`, `open_without_model`, `open_embedder`
    and `close` are for its event loop."""

    def __init__(
        self, keep_alive: float = KEEP_ALIVE, waiting: int = 16, aliases: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """A model that was opened here is closed `keep_alive` seconds after its last use. Up to `waiting` requests wait
        for models to be opened. `aliases` are further names, each with the one that it stands for."""
        self._keep_alive, self._most_waiting, self._aliases = keep_alive, waiting, aliases
        self.loaded: dict[str, _LoadedModel] = {}
        self.loading: dict[str, asyncio.Task[None]] = {}
        """The tasks that open models, by name, for which requests wait."""
        self.embedder: ServedEmbedder | None = None
        """The model that embeds texts, besides the models that write replies."""
        self._openers: dict[str, Opener] = {}
        self._catalog: ModelCatalog | None = None
        self._default: str | None = None
        self._no_model_reason = ""
        self._waiting = 0
        self._lock = asyncio.Lock()  # the lock for opening and closing models
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="edgellm-models")
        self._stopped = False

    def open(self, served: ServedModel, *, opener: Opener | None = None, catalog: ModelCatalog | None = None) -> None:
        """Serve `served` by default, and a `catalog` by name. An `opener` opens it again once it is closed."""
        self._catalog = catalog
        if opener is not None:
            self._openers[served.name] = opener
        self.add(served)
        self._default = served.name

    def unmet_aliases(self) -> Iterator[str]:
        """Yield a sentence for each alias of a model that the catalogue does not have now: a device may be asleep."""
        for alias, name in self._aliases.items():
            if self._catalog is not None and name not in self.loaded and not self._embeds(name):
                try:
                    self._catalog.find(name)
                except ModelNotFound as error:
                    yield f"The alias {alias} stands for a model that is not here now. {error.what}"

    def add(self, served: ServedModel) -> None:
        """Serve another model by its name from now on; without an opener it is left open."""
        model = _LoadedModel(served, math.inf, owned=served.name in self._openers)
        self.loaded = {**self.loaded, served.name: model}  # others may read the old one

    def open_without_model(self, reason: str) -> None:
        """Refuse requests for a model with `reason` from now on."""
        self._no_model_reason = reason

    def open_embedder(self, embedder: ServedEmbedder) -> None:
        """Embed texts with `embedder` from now on."""
        self.embedder = embedder

    @property
    def default_name(self) -> str | None:
        """Return the default model's name; None if there is none. Raises ApiError (503) while it is first loaded."""
        if self._default is None and not self._no_model_reason:
            raise ApiError(503, "The model is being loaded. Try again soon.", code="loading", retry_after=1.0)
        return self._default

    @property
    def default(self) -> ServedModel | None:
        """Return the model that is served by default; None if there is none, or if it is not in memory."""
        loaded = self.loaded.get(self.default_name or "")
        return None if loaded is None else loaded.served

    def by_use(self) -> list[_LoadedModel]:
        """Return the models in memory, the latest used first."""
        return sorted(self.loaded.values(), key=lambda one: (not one.users, -one.used_at))

    async def infos(self) -> list[ModelInfo]:
        """Return all models that can be named, the default one first."""
        listed = [] if self._catalog is None else await asyncio.to_thread(self._catalog.infos)
        embedders = [] if self.embedder is None else [self.embedder.info()]
        if (name := self._default) in self._openers:  # It may have been unloaded, and be in no catalogue.
            embedders.append(ModelInfo(id=name or "", created=int(time()), context_length=None, loaded=False))
        known = {info.id: info for info in (*embedders, *listed, *(one.served.info() for one in self.loaded.values()))}
        first = [self.default_name] if self.default_name in known else []
        return [known[name] for name in dict.fromkeys([*first, *known])]

    async def info(self, name: str) -> ModelInfo:
        """Return a model by name. Raises ApiError (404) without such a model."""
        found = name if self._embeds(name) else await self._find(name)
        known = next((info for info in await self.infos() if info.id == found), None)
        return known or self.loaded[found].served.info()

    async def file(self, name: str) -> ModelFile | None:
        """Return a model's file; None where it is on another device. Raises ApiError (404) without such a model."""
        if self.embedder is not None and self._embeds(name):
            return self.embedder.embedder.model.file
        found = await self._find(name)
        if (loaded := self.loaded.get(found)) is not None and (model := loaded.served.pair.text_model) is not None:
            return model.file
        opener = self._openers.get(found)
        return None if opener is None else await asyncio.to_thread(opener.file)

    @asynccontextmanager
    async def lease(self, name: str | None, keep_alive: float | None = None) -> AsyncIterator[ServedModel]:
        """Lend a model, by default the server's, opened if need be, and kept for `keep_alive` seconds after its use.
        Raises ApiError: no such model (404), too many wait (429), it is first loaded or waits for memory (503);
        EdgeError: it cannot be opened; MemoryShort if it does not fit."""
        found = await self._find(name)
        while (loaded := self.loaded.get(found)) is None or loaded.closing:
            if self._waiting >= self._most_waiting:
                message = f"{self._waiting} requests wait for models to be loaded. Try again later."
                raise ApiError(429, message, code="queue_full", retry_after=5.0)
            self._waiting += 1
            try:
                if found not in self.loading:
                    self.loading[found] = asyncio.create_task(self._open(found))
                    self.loading[found].add_done_callback(lambda _: self.loading.pop(found))
                # the task goes on where this request ends: others may wait for it
                await asyncio.shield(self.loading[found])
            finally:
                self._waiting -= 1
        if loaded.timer is not None:
            loaded.timer.cancel()
        if keep_alive is not None and loaded.owned:
            loaded.keep_alive = keep_alive
        loaded.users += 1
        loaded.unused.clear()
        try:
            yield loaded.served
        finally:
            loaded.users -= 1
            loaded.used_at = monotonic()
            if not loaded.users:
                loaded.unused.set()
                self._expire_after(loaded, loaded.keep_alive)

    async def unload(self, name: str) -> bool:
        """Close a model once it is unused; return whether it is closed. Raises ApiError if it is not here, or stays."""
        found = await self._find(name)
        if (loaded := self.loaded.get(found)) is None:
            raise ApiError(404, f"{found} is not in memory.", code="model_not_loaded", param="model")
        if not loaded.owned:
            message = f"{found} stays in memory as long as this server runs. Stop the server."
            raise ApiError(400, message, param="model")
        loaded.retiring = asyncio.create_task(self._retire(loaded))
        if not loaded.users:
            await asyncio.shield(loaded.retiring)
        return not loaded.users

    def stop(self) -> None:
        """Open no more models."""
        self._stopped = True

    def close(self) -> None:
        """Close all models that are the host's. Called when no request uses them any more, in any thread."""
        self.stop()
        self._thread.shutdown(wait=True, cancel_futures=True)
        for loaded in list(self.loaded.values()):
            if loaded.owned:
                loaded.served.pair.close()
        self.loaded.clear()

    async def _find(self, name: str | None) -> str:
        """Return the name of the model that `name` means, for which there is an opener if it is not loaded."""
        default = self.default_name
        if default is None:
            raise ApiError(404, self._no_model_reason, code="model_not_found")
        if name is None:
            return default
        name = self._aliases.get(name, name)
        if self._embeds(name):
            message = f"{name} embeds texts, and writes no replies. Ask for {default!r}, or leave model out."
            raise ApiError(400, message, param="model")
        if name in self.loaded or name in self._openers:
            return name
        try:
            if self._catalog is None:
                others = "".join(f" or {one!r}" for one in self.loaded if one != default)
                next_step = f"Ask for {default!r}{others}, or leave model out."
                raise ModelNotFound(f"The model {name!r} is not served here.", next_step)
            opener = await asyncio.to_thread(self._catalog.find, name)
        except ModelNotFound as error:
            if _SERVICES.match(name):
                return default
            raise ApiError(404, str(error), code="model_not_found", param="model") from None
        self._openers.setdefault(opener.name, opener)
        return opener.name

    def _embeds(self, name: str) -> bool:
        """Return whether `name` is the model that embeds texts, and no other one in memory."""
        return self.embedder is not None and name == self.embedder.name and name not in self.loaded

    async def _in_thread(self, call: Callable[..., _T], *words: object) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *words)

    async def _open(self, name: str) -> None:
        """Open a model, closing others first where it does not fit beside them."""
        async with self._lock:
            if (former := self.loaded.get(name)) is not None:
                if not former.closing:
                    return
                await self._close(former)
            opener = self._openers[name]
            await self._make_room(await self._in_thread(self._victims, opener), name)
            beside = beside_memory([one.served.pair.memory for one in self.loaded.values()], ())
            served = await self._in_thread(self._opened, opener, beside)
            keep_alive = math.inf if name == self._default else self._keep_alive
            self.loaded[name] = loaded = _LoadedModel(served, keep_alive, owned=True)
            # all requests for the model may have left
            self._expire_after(loaded, max(keep_alive, MIN_IDLE_SECONDS))

    def _opened(self, opener: Opener, beside: Counter[str]) -> ServedModel:
        with suppress(Stopped):
            served = opener.open(beside, lambda: self._stopped)
            if not self._stopped:
                return served
            served.pair.close()
        raise stopping()

    def _victims(self, opener: Opener) -> list[_LoadedModel]:
        """Return the models to close for another one, the longest unused first. Raises MemoryShort."""
        if self._stopped:
            raise stopping()
        loaded = list(self.loaded.values())
        candidates = sorted((one for one in loaded if one.owned), key=lambda one: (bool(one.users), one.used_at))
        for count in range(len(candidates) + 1):
            victims = candidates[:count]
            kept = [one.served.pair.memory for one in loaded if one not in victims]
            try:
                opener.check_fits(beside_memory(kept, [one.served.pair.memory for one in victims]))
                break
            except MemoryShort:
                if count == len(candidates):
                    raise
        return victims

    async def _make_room(self, victims: Sequence[_LoadedModel], name: str) -> None:
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
            message = f"{name} needs the memory of {busy}, which is still in use. Try again later."
            raise ApiError(503, message, code="memory_in_use", retry_after=BUSY_SECONDS / 4) from None
        for one in victims:
            _log.info("%s closed: %s needs memory", one.name, name)
            await self._close(one)

    def _expire_after(self, loaded: _LoadedModel, seconds: float) -> None:
        """Have a model closed if it is unused for so many seconds."""

        def expire() -> None:
            if not loaded.users and not loaded.closing and not self._stopped:
                _log.info("%s is closed: unused for %.0f s", loaded.name, loaded.keep_alive)
                loaded.retiring = asyncio.create_task(self._retire(loaded))

        if loaded.owned and not math.isinf(seconds):
            loaded.timer = asyncio.get_running_loop().call_later(seconds, expire)

    async def _retire(self, loaded: _LoadedModel) -> None:
        """Give a model to no further request, and close it once nobody uses it."""
        loaded.closing = True
        await loaded.unused.wait()
        async with self._lock:
            if self.loaded.get(loaded.name) is loaded:
                await self._close(loaded)

    async def _close(self, loaded: _LoadedModel) -> None:
        await loaded.unused.wait()
        if loaded.timer is not None:
            loaded.timer.cancel()
        del self.loaded[loaded.name]
        with suppress(EdgeError):
            await self._in_thread(loaded.served.pair.close)


def beside_memory(kept: Sequence[PairMemory], closed: Sequence[PairMemory]) -> Counter[str]:
    """Return the bytes by device to add to the memory that the system counts as taken: weights of `kept` models that
    are pages of files, less the counted memory of models that are `closed` first.

    A model's weights are in memory as pages of a file or, where llama.cpp has repacked them, as memory of its own.
    """
    mapped = sum(one.mapped for one in (*kept, *closed))
    resident = mapped_memory()
    share = 1.0 if resident is None or not mapped else min(1.0, resident / mapped)
    found: Counter[str] = Counter()
    for one in kept:
        found["CPU"] += int(share * one.mapped)
    for one in closed:
        found.subtract(one.by_device)
        found["CPU"] += int(share * one.mapped)
    return found
