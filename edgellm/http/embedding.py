"""The model that embeds texts for HTTP clients, besides the models that write replies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from time import time

import numpy as np

from edgellm.engine import Floats, ModelFile
from edgellm.engine.embedding.embedder import Embedder
from edgellm.errors import InvalidOption, Stopped
from edgellm.http.schemas.responses import ModelInfo


class ServedEmbedder:
    """An embedder and the name that it is served by. Requests embed in turn."""

    def __init__(self, embedder: Embedder, name: str) -> None:
        self._embedder, self.name, self.width = embedder, name, embedder.width
        self._lock = threading.Lock()
        self._created = int(time())

    def info(self) -> ModelInfo:
        positions = self._embedder.positions
        return ModelInfo(id=self.name, created=self._created, context_length=positions, loaded=True, embeds=True)

    @property
    def file(self) -> ModelFile:
        return self._embedder.model.file

    @property
    def offloaded(self) -> bool:
        """Return whether layers of the model are in the memory of a GPU."""
        return self._embedder.model.offloaded

    def embed(
        self, texts: Sequence[str | Sequence[int]], has_left: Callable[[], bool], *, cut: bool = False
    ) -> tuple[list[Floats], int]:
        """Return the vectors of `texts` or ids, and how many tokens they have. `cut`: long texts lose their end.

        Raises:
            InvalidOption: an id is no token of the model.
            Stopped: `has_left` says that the client has gone.
            PromptTooLong, TextRefused: as for `Embedder`.
        """
        vectors, tokens, n_vocab = [], 0, self._embedder.model.n_vocab
        for text in texts:
            if has_left():
                raise Stopped
            if isinstance(text, str):
                ids = self._embedder.ids(text, cut=cut, should_stop=has_left)
            elif (bad := next((one for one in text if not 0 <= one < n_vocab), None)) is not None:
                raise InvalidOption(f"{bad} is not a token of {self.name}.", f"Ids are 0 to {n_vocab - 1}.")
            else:
                ids = np.array(text, dtype=np.int32)
            with self._lock:
                vectors.append(self._embedder.embed(ids))
            tokens += len(ids)
        return vectors, tokens
