"""The door into a running graph: attention rows, layer outputs, and a stop after a chosen layer.

llama.cpp asks about every node of the graph whether it is wanted, and shows the wanted ones once they are computed. A
context without a capture has no such callback, and pays nothing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from edgellm.engine import native
from edgellm.engine.native import lib
from edgellm.engine.types import Floats
from edgellm.errors import EngineFailed, InvalidOption


@dataclass(frozen=True, slots=True)
class Capture:
    """What to look at while a context decodes; layers count from 0.

    `attention`: layers whose attention rows are kept. They exist only without flash attention, which a context with
    such a capture switches off. `outputs`: layers whose output rows (the residual stream after the block) are kept.
    `stop_after`: the layer after whose output the graph stops, so that norm and head are never computed; decoding then
    returns no logits. It must be the last one captured, and the deeper layers' cache stays empty for these tokens.
    """

    attention: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    stop_after: int | None = None

    def check(self, n_layer: int) -> None:
        """Raises InvalidOption where a layer does not exist, or lies behind the stop."""
        last = n_layer - 1 if self.stop_after is None else self.stop_after
        for layer in (*self.attention, *self.outputs, last):
            if not 0 <= layer < n_layer or layer > last:
                highest = max(0, min(last, n_layer - 1))
                raise InvalidOption(f"Layer {layer} cannot be captured.", f"Layers run from 0 to {highest}.")


class _Tensor(ctypes.Structure):
    """The head of llama.cpp's public tensor record: what is needed to read its data."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


class Recorder:
    """Keeps what one decode call shows. Rows of several llama.cpp batches are joined in the order of the tokens."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._parts: dict[str, list[Floats]] = {}
        self._wanted = {f"kq_soft_max-{i}" for i in capture.attention} | {f"l_out-{i}" for i in capture.outputs}
        self._last = None if capture.stop_after is None else f"l_out-{capture.stop_after}"
        self._names = frozenset(name.encode() for name in self._wanted | ({self._last} if self._last else set()))
        self._library = native.ggml()
        self.error: BaseException | None = None
        self.callback = lib.ggml_backend_sched_eval_callback(self._see)

    def clear(self) -> None:
        """Forgets what was kept; called before every decode."""
        self._parts.clear()
        self.error = None

    def attention(self, layer: int) -> Floats:
        """Attention of the last decode, shape (heads, tokens, keys).

        Keys are cells of the cache, padded with zeros up to llama.cpp's next block; in a context of one sequence cell
        `i` holds position `i`. Every row sums to 1.

        Raises:
            EngineFailed: the layer was not captured, or the graph did not show it.
        """
        parts = self._kept(f"kq_soft_max-{layer}")
        keys = max(part.shape[2] for part in parts)
        return np.concatenate([np.pad(p, ((0, 0), (0, 0), (0, keys - p.shape[2]))) for p in parts], axis=1)

    def output(self, layer: int) -> Floats:
        """Output rows of a layer in the last decode, shape (tokens, n_embd).

        Raises:
            EngineFailed: the layer was not captured, or the graph did not show it.
        """
        return np.concatenate(self._kept(f"l_out-{layer}"))

    def _kept(self, name: str) -> list[Floats]:
        if name not in self._parts:
            raise EngineFailed(f"The last decode showed no {name}.", "Name the layer in the context's Capture.")
        return self._parts[name]

    def _see(self, tensor: int, asking: bool, _user: int | None) -> bool:
        # asked about a node: is it wanted? shown a node: go on? Nothing may be raised through C.
        try:
            name: bytes = self._library.ggml_get_name(tensor)
            if asking:
                return name in self._names
            text = name.decode()
            if text in self._wanted:
                self._parts.setdefault(text, []).append(self._read(tensor, text))
            return text != self._last
        except BaseException as error:  # noqa: BLE001  raised again once C has returned
            self.error = error
            return False

    def _read(self, address: int, name: str) -> Floats:
        tensor = _Tensor.from_address(address)
        cols, rows, heads, streams = tensor.ne
        if tensor.type != lib.GGML_TYPE_F32 or tensor.nb[0] != 4 or tensor.nb[1] != 4 * cols:
            raise EngineFailed(f"{name} is not laid out in float32 rows.", "Capture on a device that keeps it so.")
        data = np.empty((streams * heads, rows, cols), dtype=np.float32)
        self._library.ggml_backend_tensor_get(address, data.ctypes.data, 0, data.nbytes)
        if name.startswith("l_out"):
            rows_only: Floats = data[0]
            return rows_only
        # several streams hold one sequence each: their rows follow each other
        return np.concatenate(np.split(data, streams), axis=1) if streams > 1 else data
