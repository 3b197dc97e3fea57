"""Vectors of texts, by a model that pools the states of its tokens: an encoder such as BERT, or a decoder.

The model's file names the pooling. A model without one generates text, and is refused: nobody has measured the mean of
its states as an embedding.
"""

import threading
from typing import Any, Self

import numpy as np

from edgellm.engine import llama_api, native
from edgellm.engine.llama_api import LlamaBatch, NativeContext, NativeSpec
from edgellm.engine.model import Model
from edgellm.engine.native import ShouldStop, lib, never
from edgellm.engine.vocabulary import Floats, Ids
from edgellm.errors import EngineFailed, ModelUnsupported, PromptTooLong

POSITIONS = 2048
"""Tokens of the longest text, if the model was trained for as many: all are in one batch."""
_POOLED = (lib.LLAMA_POOLING_TYPE_MEAN, lib.LLAMA_POOLING_TYPE_CLS, lib.LLAMA_POOLING_TYPE_LAST)


class Embedder:
    """A context in which `model` embeds one text at a time; threads take turns.

    `positions` are the tokens of the longest text with the model's tokens around it, `width` the numbers of a vector.
    """

    def __init__(self, model: Model, *, positions: int = POSITIONS) -> None:
        """Reserve the memory for texts of `positions` tokens, at most those that the model was trained for. Raises
        ModelUnsupported: the model does not say how its states are pooled, or ranks texts instead; EngineFailed:
        llama.cpp cannot reserve it."""
        self.model, self.positions = model, min(positions, model.n_ctx_train or positions)
        self.width = int(lib.llama_model_n_embd_out(model.owned.pointer))
        threads = model.hardware.threads or native.default_threads(model.n_params)
        spec = NativeSpec(self.positions, 1, self.positions, threads, unified=True, embeddings=True)
        owned = llama_api.open_context(model.owned, spec)
        self._context = NativeContext(owned, threads, model.n_vocab)
        pooling = lib.llama_pooling_type(owned.pointer)
        if pooling not in _POOLED:
            self.close()
            what = "ranks texts" if pooling == lib.LLAMA_POOLING_TYPE_RANK else "does not say how to pool its states"
            raise ModelUnsupported(
                f"{model.name} {what}, so it gives no embeddings.", "Use an embedding model, such as BERT's kind."
            )
        self._batch = LlamaBatch(self.positions, self.positions, planes=model.position_planes)
        self._around = self._tokens_around()
        self._lock = threading.Lock()

    def ids(self, text: str, *, cut: bool = False, should_stop: ShouldStop = never) -> Ids:
        """Return the ids of a text, with the tokens that the model wants around it, shape (n,). With `cut` a text that
        is too long loses its end. Raises PromptTooLong: the text does not fit; TextRefused, Stopped: as for
        `Model.tokenize`."""
        before, after = self._around
        room = self.positions - len(before) - len(after)
        ids = self.model.tokenize(text, should_stop=should_stop)
        if len(ids) > room and not cut:
            raise PromptTooLong(
                f"A text has {len(ids)} tokens, and {self.model.name} embeds at most {room}.", "Split the text."
            )
        return np.concatenate((before, ids[:room], after))

    def embed(self, ids: Ids) -> Floats:
        """Return the vector of a text's `ids` (n,), shape (width,), of length 1. Raises PromptTooLong: there are none,
        or too many; EngineFailed: llama.cpp cannot compute it."""
        if not 1 <= len(ids) <= self.positions:
            raise PromptTooLong(f"The text has {len(ids)} tokens.", f"Give a text of 1 to {self.positions} tokens.")
        context = self._context.owned
        with self._lock:
            if memory := lib.llama_get_memory(context.pointer):
                lib.llama_memory_clear(memory, True)
            n = self._batch.put(0, 0, 0, ids, len(ids))
            self._context.decode(self._batch.tokens, n)
            found: Any = lib.llama_get_embeddings_seq(context.pointer, 0)
            if not found:
                raise EngineFailed(f"llama.cpp gives no embedding of {n} tokens.", "Use another model.")
            vector: Floats = np.ctypeslib.as_array(found, (self.width,)).astype(np.float32)  # a copy
        length = float(np.linalg.norm(vector))
        if not np.isfinite(length) or not length:
            raise EngineFailed(f"The embedding of {n} tokens has no direction.", "Use another model or text.")
        return vector / np.float32(length)

    def close(self) -> None:
        """Free the memory; the model stays."""
        self._context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _tokens_around(self) -> tuple[Ids, Ids]:
        """Return the tokens that the model wants before and after a text, such as BERT's [CLS] and [SEP]."""
        plain = self.model.tokenize("a")
        buffer = np.zeros(16, dtype=np.int32)
        pointer = buffer.ctypes.data_as(lib.llama_token_p)
        count = lib.llama_tokenize(self.model.vocab_pointer, b"a", 1, pointer, len(buffer), True, False)
        whole = buffer[: max(0, count)]
        at = next(
            (start for start in range(len(whole)) if np.array_equal(whole[start : start + len(plain)], plain)), None
        )
        if at is None:
            return buffer[:0], buffer[:0]
        return whole[:at].copy(), whole[at + len(plain) :].copy()
