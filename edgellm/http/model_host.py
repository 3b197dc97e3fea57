"""The models that requests may name, and the one that embeds texts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from edgellm.engine import ModelFile
from edgellm.errors import ModelNotFound
from edgellm.http.embedding import ServedEmbedder
from edgellm.http.model_pool import KEEP_ALIVE, Lease, LoadedModel, ModelPool, Opener, ServedModel
from edgellm.http.schemas.errors import SERVER, ApiError, ErrorInfo
from edgellm.http.schemas.responses import ModelInfo

LOADING = ErrorInfo(503, "The model is being loaded. Try again soon.", SERVER, code="loading", retry_after=1.0)


class ModelCatalog(Protocol):
    """The models that requests may name besides the one that is served by default."""

    def find(self, name: str) -> Opener:
        """Return the model of that name. Raises ModelNotFound."""

    def infos(self) -> Sequence[ModelInfo]:
        """Return all models that can be named."""


class ModelHost:
    """The models of one server, by their names. Methods other than `open`, `add`, `open_without_model` and `close` are
    for its event loop."""

    def __init__(self, keep_alive: float = KEEP_ALIVE, waiting: int = 16) -> None:
        """Set up a `ModelPool` with these arguments."""
        self.pool = ModelPool(keep_alive, waiting)
        self._openers: dict[str, Opener] = {}
        self._catalog: ModelCatalog | None = None
        self._default: str | None = None
        self._no_model_reason = ""
        self.embedder: ServedEmbedder | None = None
        """The model that embeds texts, besides the models that write replies."""

    def open(self, served: ServedModel, *, opener: Opener | None = None, catalog: ModelCatalog | None = None) -> None:
        """Serve `served` by default from now on, and the models of `catalog` by name; `opener` as for `ModelPool.add`,
        which opens the model again when it is named."""
        self._catalog = catalog
        if opener is not None:
            self._openers[served.name] = opener
        self.pool.add(served, opener)
        self._default = served.name

    def add(self, served: ServedModel) -> None:
        """Serve another model by its name from now on; it is left open."""
        self.pool.add(served)

    def open_embedder(self, embedder: ServedEmbedder) -> None:
        """Embed texts with `embedder` from now on."""
        self.embedder = embedder

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
        """Return the model that is served by default; None if there is none, or if it is not in memory."""
        loaded = self.pool.loaded.get(self.default_name or "")
        return None if loaded is None else loaded.served

    def answers(self) -> list[tuple[str, bool]]:
        """Return the names of the models in memory, and whether each can write a reply: one without a draft model here
        cannot while its verifier is away."""

        def writes(one: LoadedModel) -> bool:
            pair = one.served.pair
            return pair.draft_name is not None or pair.verifier_up is None or pair.verifier_up()

        return [(name, writes(one)) for name, one in self.pool.loaded.items()]

    async def infos(self) -> list[ModelInfo]:
        """Return all models that can be named, the default one first."""
        listed = [] if self._catalog is None else await asyncio.to_thread(self._catalog.infos)
        here = {name: one.served.info() for name, one in self.pool.loaded.items()}
        embeds = {} if self.embedder is None else {self.embedder.name: self.embedder.info()}
        known = {info.id: info for info in listed} | embeds | here
        first = [self.default_name] if self.default_name in known else []
        return [known[name] for name in dict.fromkeys([*first, *known])]

    async def info(self, name: str) -> ModelInfo:
        """Return a model by name. Raises ApiError (404) without such a model."""
        found = name if self._embeds(name) else await self._find(name)
        known = next((info for info in await self.infos() if info.id == found), None)
        return known or self.pool.loaded[found].served.info()

    async def file(self, name: str) -> ModelFile | None:
        """Return the file of a model; None where it is on another device. Raises ApiError (404) without such a
        model."""
        if self.embedder is not None and self._embeds(name):
            return self.embedder.file
        found = await self._find(name)
        model = None if (loaded := self.pool.loaded.get(found)) is None else loaded.served.pair.text_model
        if model is not None:
            return model.file
        opener = self._openers.get(found)
        return None if opener is None else await asyncio.to_thread(opener.file)

    async def lease(self, name: str | None, keep_alive: float | None = None) -> Lease:
        """Return the model of that name, by default the server's, opened if need be. `keep_alive` says for how many
        seconds it stays in memory after its use.

        Raises:
            ApiError: there is no such model (404), it is being loaded for the first time (503), or as
                `ModelPool.lease`.
            EdgeError: it cannot be opened; MemoryShort if it does not fit.
        """
        found = await self._find(name)
        return await self.pool.lease(found, self._openers.get(found), keep_alive, stays=found == self._default)

    async def unload(self, name: str) -> bool:
        """Close a model as `ModelPool.unload`."""
        return await self.pool.unload(await self._find(name))

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
        if name in self.pool.loaded or name in self._openers:
            return name
        if self._catalog is None:
            others = "".join(f" or {one!r}" for one in self.pool.loaded if one != default)
            message = f"The model {name!r} is not served here. Ask for {default!r}{others}, or leave model out."
            raise ApiError(ErrorInfo(404, message, code="model_not_found", param="model"))
        try:
            opener = await asyncio.to_thread(self._catalog.find, name)
        except ModelNotFound as error:
            message = f"{error.what} {error.next_step}"
            raise ApiError(ErrorInfo(404, message, code="model_not_found", param="model")) from None
        self._openers.setdefault(opener.name, opener)
        return opener.name

    def _embeds(self, name: str) -> bool:
        """Return whether `name` is the model that embeds texts, and no other one in memory."""
        return self.embedder is not None and name == self.embedder.name and name not in self.pool.loaded
