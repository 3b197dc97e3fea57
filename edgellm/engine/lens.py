"""What a model is about to say behind every position of a text, read off its last layer but one (a "logit lens").

Logits of every position would cost the head's work for each, which for a small model with a large vocabulary is a third
of a prefill. The output of the last layer but one is computed anyway, and llama.cpp hands it out; the head's rows of a
few tokens are all that is needed to see which of those is the likeliest.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from edgellm.engine.context import Context
from edgellm.engine.convert import dequantised
from edgellm.engine.cores.openmp import binding
from edgellm.engine.gguf import TensorInfo
from edgellm.engine.head import head_of
from edgellm.engine.model import Model
from edgellm.engine.types import Floats, Ids
from edgellm.errors import ModelUnsupported

# whose head is a root-mean-square norm and a matrix, and no more; and whose graph has what is asked for: llama.cpp ends
# the process where it has not, as for qwen2
ARCHITECTURES = ("llama", "qwen3", "qwen3moe")
# from llama.cpp's llama-ext.h, which promises nothing: where they are missing there is no lens
_SET = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"
_GET = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"
_library: Any = vars(binding)["_lib"]  # llama-cpp-python has no public name for it


class Lens:
    """Of one model. `open` says whether there can be one."""

    def __init__(self, model: Model, norm: TensorInfo, head: TensorInfo, epsilon: float) -> None:
        """Raises ModelUnsupported where one of the two tensors is of a type that cannot be dequantised."""
        self._layer, self._width, self._epsilon = model.n_layer - 1, model.n_embd, epsilon
        data = np.memmap(model.path, dtype=np.uint8, mode="r")
        self._head = head
        self._rows = data[head.offset : head.offset + head.nbytes].reshape(head.shape[1], -1)
        self._norm = dequantised(norm, data[norm.offset : norm.offset + norm.nbytes].reshape(1, -1))[0]
        self.rows(np.zeros(1, dtype=np.int32))
        self._set, self._get = getattr(_library, _SET), getattr(_library, _GET)
        self._numpy = ThreadpoolController()
        self._set.argtypes, self._set.restype = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_bool], None
        self._get.argtypes, self._get.restype = [ctypes.c_void_p, ctypes.c_uint32], ctypes.c_void_p

    @classmethod
    def open(cls, model: Model) -> Lens | None:
        """None: this model's head is another, its file is split, or this llama.cpp does not hand out what it takes."""
        epsilon = model.header.metadata.get(f"{model.architecture}.attention.layer_norm_rms_epsilon")
        if model.architecture not in ARCHITECTURES or not isinstance(epsilon, float):
            return None
        if not all(hasattr(_library, name) for name in (_SET, _GET)):
            return None
        norm, head = model.header.tensor("output_norm.weight"), head_of(model)
        if norm is None or head is None:
            return None
        try:
            return cls(model, norm, head, epsilon)
        except ModelUnsupported:
            return None

    def rows(self, tokens: Ids) -> Floats:
        """The head's rows of `tokens`, (n, n_embd)."""
        return dequantised(self._head, self._rows[tokens])

    def read(self, context: Context, ids: Ids, head: Floats) -> Floats:
        """Decodes `ids` (n, at most `n_batch`) without logits; returns what the rows of `head` (m, n_embd) would say
        behind each, (n, m). Raises what `Context.decode` raises.
        """
        pointer = context.pointer
        self._set(pointer, self._layer, True)
        try:
            context.decode(ids, outputs=0)
            address = self._get(pointer, self._layer)
            if not address:
                return np.zeros((len(ids), len(head)), dtype=np.float32)
            buffer: Any = (ctypes.c_float * (len(ids) * self._width)).from_address(address)
            hidden = np.frombuffer(buffer, dtype=np.float32).reshape(len(ids), self._width)
            scale = np.sqrt(np.square(hidden).mean(axis=1, keepdims=True) + self._epsilon)
            # its threads would go on spinning for a while, and the next decodes take twice as long beside them
            with self._numpy.limit(limits=1, user_api="blas"):
                return np.asarray((hidden * (self._norm / scale)) @ head.T, dtype=np.float32)
        finally:
            self._set(pointer, self._layer, False)
