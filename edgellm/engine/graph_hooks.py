"""The door into a running graph: attention rows, a layer's output, and a stop after that layer.

llama.cpp asks about every node of the graph whether it is wanted, and shows wanted nodes once they are computed. A
context without a capture has no callback, and pays nothing.
"""

import ctypes
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from edgellm.engine.gguf.header import GgufHeader
from edgellm.engine.native import ggml, lib
from edgellm.engine.vocabulary import Floats
from edgellm.errors import EngineFailed, InvalidOption

Flags: TypeAlias = npt.NDArray[np.bool_]
_SMALL = 8  # rows of batches whose graphs are remembered


@dataclass(frozen=True, slots=True)
class Capture:
    """The rows to look at while a context decodes; layers count from 0.

    `attention`: layers whose attention rows are kept. They exist only without flash attention, which a context with
    such a capture switches off. `stop_after`: the layer whose output rows (the residual stream after the block) are
    kept. The graph stops there, so that norm and head are never computed; decoding then returns no logits. It must be
    the last captured layer, and the deeper layers' cache stays empty for these tokens.
    """

    attention: tuple[int, ...] = ()
    stop_after: int | None = None

    def check(self, n_layer: int) -> None:
        """Raise InvalidOption where a layer does not exist, or comes after the stop."""
        last = n_layer - 1 if self.stop_after is None else self.stop_after
        for layer in (*self.attention, last):
            if not 0 <= layer < n_layer or layer > last:
                highest = max(0, min(last, n_layer - 1))
                raise InvalidOption(f"Layer {layer} cannot be captured.", f"Layers run from 0 to {highest}.")


class _Tensor(ctypes.Structure):
    """The beginning of llama.cpp's public tensor record: the fields needed to read its data and that of its sources."""

    _fields_ = (
        ("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4), ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int), ("op_params", ctypes.c_int32 * 16), ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
    )  # fmt: skip


_ALL = slice(None)

SCORES = 256 * 2**20
"""Bytes of attention scores that a batch may take, where attention is captured."""


def attention_rows(header: GgufHeader, cells: int) -> int:
    """Return the rows of a batch whose attention scores over `cells` positions take at most `SCORES` bytes; at least
    one."""
    return max(1, SCORES // (4 * header.number("attention.head_count", 1) * cells))


def attention_bytes(header: GgufHeader, cells: int, n_batch: int) -> int:
    """Return the bytes of a batch's attention scores over `cells` positions, in a context of `n_batch` that captures
    them."""
    return 4 * header.number("attention.head_count", 1) * cells * min(n_batch, attention_rows(header, cells))


class NodeCallback(dict[int, bool]):
    """A callback for every node of every graph: whether llama.cpp shows the node, and whether it then goes on.

    The dictionary holds the addresses of unwanted nodes, hundreds in a pass: its own lookup answers for these, without
    a Python function. Graphs of one kind have the same nodes at the same addresses.
    """

    def __init__(self, wants: Callable[[int], bool], show: Callable[[int], bool]) -> None:
        """Ask `wants` about an unknown node, and pass a wanted node to `show`, which returns whether to go on."""
        super().__init__()
        self._wants, self._show = wants, show
        self._wanted = 0  # the node that is shown next
        self._error: BaseException | None = None
        self._kind: Hashable = None
        self._kinds: dict[Hashable, dict[int, bool]] = {}
        # C's calling conventions let a function leave arguments unread: here, whether it is a question, and user data
        self._function: Any = _Node(self.__getitem__)
        self.callback: Any = ctypes.cast(self._function, lib.ggml_backend_sched_eval_callback)

    def __missing__(self, node: int) -> bool:
        try:
            if node == self._wanted:
                self._wanted = 0
                return self._show(node)
            if self._wants(node):
                self._wanted = node
                return True
        except BaseException as error:  # noqa: BLE001  nothing may be raised through C: raised by `end`
            self._error = error
            return False
        self[node] = False
        return False

    def begin(self, kind: Hashable) -> None:
        """Begin a graph. Graphs of one `kind` have the same nodes and wanted nodes; None: unknown kind."""
        self._wanted, self._error = 0, None
        if kind is None or kind != self._kind:
            if self._kind is not None:
                self._kinds[self._kind] = dict(self)
            self.clear()
            self.update(self._kinds.get(kind, {}))
            self._kind = kind

    def end(self) -> None:
        """Raise the error that occurred while looking at nodes, such as an interrupt."""
        if self._error is not None:
            raise self._error

    def forget(self) -> None:
        """Forget all nodes: their addresses are used again."""
        self._kinds.clear()
        self.clear()


_Node = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)


class Recorder:
    """A recorder of the rows that one decode call shows, joined from llama.cpp's batches in the tokens' order.
    Sequences with cells of their own are decoded one by one."""

    def __init__(self, capture: Capture, n_seq: int, unified: bool) -> None:
        """Set up for a context of `n_seq` sequences; if `shared`, sequences share cells, so cells are not positions."""
        self.capture = capture
        self.shared = unified and n_seq > 1
        self._visible = np.empty(0, dtype=np.bool_)
        self.stops = capture.stop_after is not None
        """The graph stops after `Capture.stop_after`."""
        self._rows = 0  # rows of the next batch
        self._to_come = 0
        self._parts: dict[bytes, list[Floats]] = {}
        self._last = (b"l_out-%d" % capture.stop_after,) if capture.stop_after is not None else ()
        self.nodes = NodeCallback(self._wants, self._see)
        self.attend(slice(None))

    def stop(self, early: bool) -> None:
        """Have the next decodes stop after `Capture.stop_after`, or go on to the logits."""
        self.stops = early

    def begin(self, rows: int) -> None:
        """Announce a batch of `rows` rows."""
        self._rows = rows

    def attend(self, keys: slice | None) -> None:
        """Keep attention to these `keys` only, from the next decode on; None: read none (in a prefill it is large)."""
        self._keys = keys
        layers = self.capture.attention if keys is not None else ()
        self._wanted = frozenset((*self._last, *(b"kq_soft_max-%d" % layer for layer in layers)))

    def clear(self) -> None:
        """Forget the kept rows; called before every decode."""
        self._parts.clear()

    def __enter__(self) -> Self:
        """Begin a llama.cpp batch: each node that is asked for will be shown once."""
        self._to_come = len(self._wanted)
        self.nodes.begin((self._rows, self._wanted) if self._rows <= _SMALL else None)
        return self

    def __exit__(self, *_raised: object) -> None:
        """End the batch; raise any error that occurred while looking at it."""
        if self._to_come > 0:  # another graph, or a graph that did not run to its end
            self.nodes.forget()
        self.nodes.end()

    def attention(self, layer: int) -> Floats:
        """Return the attention of the last decode, shape (heads, tokens, keys), for the keys set by `attend`.

        Keys are cells of the cache, padded with zeros up to llama.cpp's next block; cell `i` holds position `i`, unless
        the cells are `shared`: then see `visible`. Over all keys every row sums to 1. Raises EngineFailed: the layer
        was not captured, or the graph did not show it.
        """
        parts = self._kept(b"kq_soft_max-%d" % layer)
        if len(parts) == 1:
            return parts[0]
        keys = max(part.shape[2] for part in parts)
        return np.concatenate([np.pad(p, ((0, 0), (0, 0), (0, keys - p.shape[2]))) for p in parts], axis=1)

    def visible(self) -> Flags:
        """Return which cells the last token of the last decode could attend to, its own included, shape (keys,).

        Known where cells are `shared` and attention was captured, of any keys: a token's own cell is the cell that its
        predecessor did not see.
        """
        return self._visible

    def output(self) -> Floats:
        """Return the output rows of the layer `Capture.stop_after` in the last decode, shape (tokens, n_embd). Raises
        EngineFailed: none was captured, or the graph did not show it."""
        parts = self._kept(*self._last or (b"the output of a layer",))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _kept(self, name: bytes) -> list[Floats]:
        if name not in self._parts:
            raise EngineFailed(
                f"The last decode did not capture {name.decode()}.", "Name the layer in the context's Capture."
            )
        return self._parts[name]

    def _wants(self, tensor: int) -> bool:
        # A name takes longer to look up than the question, so no name is looked up once all wanted nodes were shown.
        return bool(self._to_come) and ggml.ggml_get_name(tensor) in self._wanted

    def _see(self, tensor: int) -> bool:
        name: bytes = ggml.ggml_get_name(tensor)
        self._to_come -= 1
        self._parts.setdefault(name, []).append(self._read(tensor, name))
        return not (self.stops and name in self._last)

    def _read(self, address: int, name: bytes) -> Floats:
        node = _Tensor.from_address(address)
        cols, rows, heads, _ = node.ne
        if node.type != lib.GGML_TYPE_F32 or node.nb[:2] != [4, 4 * cols]:
            raise EngineFailed(f"{name.decode()} is not laid out in float32 rows.", "Capture on another device.")
        if name.startswith(b"l_out"):
            data = np.empty((rows, cols), dtype=np.float32)
            ggml.ggml_backend_tensor_get(address, data.ctypes.data, 0, data.nbytes)
            return data
        if self.shared:
            self._visible = self._mask(node.src[1], cols, rows - 1)
        first, end, _ = (self._keys or _ALL).indices(cols)
        width = max(0, end - first)
        data = np.empty((heads, rows, width), dtype=np.float32)
        if width:
            ggml.ggml_backend_tensor_get_2d(
                address, data.ctypes.data, 4 * first, 4 * width, heads * rows, 4 * cols, 4 * width
            )
        return data

    def _mask(self, address: int, cols: int, row: int) -> Flags:
        """Return which cells are visible in a row of the attention's mask: 0 there, -inf elsewhere."""
        mask = _Tensor.from_address(address)
        if mask.type != lib.GGML_TYPE_F32 or mask.ne[0] != cols or row >= mask.ne[1]:
            raise EngineFailed("The attention mask is not laid out in float32 rows.", "Open the context with n_seq=1.")
        data = np.empty(cols, dtype=np.float32)
        ggml.ggml_backend_tensor_get(address, data.ctypes.data, row * mask.nb[1], data.nbytes)
        visible: Flags = data == 0.0
        return visible
