"""llama.cpp's own context over a model."""

from collections.abc import Sequence

import numpy as np

from edgellm.engine import Floats, Model
from edgellm.engine.native import lib


class Plain:
    """llama.cpp's own context over a model, with its default attention or, for float32 models, none that rounds."""

    def __init__(self, model: Model, n_ctx: int, batch: int | None = None, threads: int = 1) -> None:
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, batch or n_ctx, batch or n_ctx
        params.n_threads = params.n_threads_batch = threads
        params.no_perf = True
        if model.header.is_f32:
            params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
            params.type_k = params.type_v = lib.GGML_TYPE_F32
        self._n_vocab = model.n_vocab
        self._context = lib.llama_init_from_model(model.owned.pointer, params)
        if not self._context:
            raise MemoryError(f"llama.cpp opens no context of {n_ctx} positions.")

    def decode(self, ids: Sequence[int]) -> Floats:
        """Decode ids together; return the logits of the last one, (n_vocab,), which are valid until the next call."""
        array = (lib.llama_token * len(ids))(*ids)
        if lib.llama_decode(self._context, lib.llama_batch_get_one(array, len(ids))) != 0:
            raise RuntimeError("llama_decode failed")
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, -1), (self._n_vocab,))

    def clear(self) -> None:
        """Forget all that was decoded."""
        lib.llama_memory_seq_rm(lib.llama_get_memory(self._context), 0, -1, -1)

    def close(self) -> None:
        lib.llama_free(self._context)
