"""The keys and values of a sequence, layer by layer, taken from one context's cache and put into another's.

llama.cpp saves a sequence as one state for all layers of a context. A context on another device may have other layers,
and its values transposed or not. So a state is taken apart into layers, each with a row of keys and a row of values for
every position; and a new state is put together, in which only the keys and values themselves came from elsewhere.

llama.cpp turns rows of a quantised cache, in blocks of numbers, before it rounds them. Since 0.6 a state says the size
of the blocks, for keys and for values; 0 for rows as computed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_ELEMENT = {0: 4, 1: 2, 30: 2}  # bytes of ggml's F32, F16 and BF16, the only types of transposed values
_KEYS, _VALUES, _TRANSPOSED = struct.Struct("<iQ"), struct.Struct("<iQ"), struct.Struct("<iII")
_WORD, _HEAD, _LAYERS, _TURNED = struct.Struct("<I"), struct.Struct("<Ii"), struct.Struct("<II"), struct.Struct("<II")
_MAGIC = 0xAF143CD8  # llama.cpp's first word of a state, before the number of its sequence


@dataclass(frozen=True, slots=True, eq=False)
class LayerRows:
    """Keys and values of a layer, a row of bytes for every position from 0 on, (n, bytes), in ggml's types."""

    key_type: int
    value_type: int
    keys: Bytes
    values: Bytes

    @property
    def positions(self) -> int:
        return len(self.keys)

    @property
    def size(self) -> int:
        """Return the bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes


class _Reader:
    """A reader of a state from its beginning. Raises ValueError beyond its end."""

    def __init__(self, state: Bytes) -> None:
        self._state, self._at = state, 0

    def take(self, size: int) -> Bytes:
        found = self._state[self._at : self._at + size]
        if size < 0 or len(found) != size:
            raise ValueError
        self._at += size
        return found

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size).tobytes())

    @property
    def ended(self) -> bool:
        return self._at == len(self._state)


def take_apart(state: Bytes, positions: int, *, says_turned: bool) -> list[LayerRows] | None:
    """Return the layers of a sequence's state, each for the first `positions` positions; None if a position is missing,
    or the cache is not plain: with a window or a recurrent state, or with other marks of its cells. `says_turned`: the
    state has the blocks in which rows are turned.
    """
    try:
        return _taken_apart(_Reader(state), positions, says_turned)
    except ValueError:
        return None


def _taken_apart(reader: _Reader, positions: int, says_turned: bool) -> list[LayerRows]:
    if reader.unpack(_HEAD)[0] != _MAGIC:
        raise ValueError
    (streams,) = reader.unpack(_WORD)
    found: list[LayerRows] = []
    for _ in range(streams):
        (cells,) = reader.unpack(_WORD)
        if not cells:
            continue
        if found:
            raise ValueError
        marks = reader.take(cells * _CELL.itemsize).view(_CELL)
        if (marks["sequences"] != 1).any():
            raise ValueError
        order = np.argsort(marks["position"], kind="stable")[:positions]
        if not np.array_equal(marks["position"][order], np.arange(positions)):
            raise ValueError
        transposed, layers = reader.unpack(_LAYERS)
        if says_turned:
            reader.unpack(_TURNED)
        keys = [_rows(reader, cells, order) for _ in range(layers)]
        values = [_columns(reader, cells, order) if transposed else _rows(reader, cells, order) for _ in range(layers)]
        found = [LayerRows(k, v, some, others) for (k, some), (v, others) in zip(keys, values, strict=True)]
    if not found or not reader.ended:
        raise ValueError
    return found


def _rows(reader: _Reader, cells: int, order: npt.NDArray[np.int64]) -> tuple[int, Bytes]:
    kind, size = reader.unpack(_KEYS)
    return kind, reader.take(cells * size).reshape(cells, size)[order]


def _columns(reader: _Reader, cells: int, order: npt.NDArray[np.int64]) -> tuple[int, Bytes]:
    kind, element, width = reader.unpack(_TRANSPOSED)
    columns = reader.take(cells * element * width).reshape(width, cells, element)[:, order]
    return kind, columns.transpose(1, 0, 2).reshape(len(order), width * element)


def put_together(layers: Sequence[LayerRows], *, streams: int, transposed: bool, turned: int | None) -> Bytes | None:
    """Return the state of a sequence with these layers, which have equally many positions, for a context with that many
    `streams`; None if their values cannot be `transposed`. `turned`: the size of the blocks in which the context turns
    rows; None if its states do not say."""
    positions = layers[0].positions
    marks = np.zeros(positions, dtype=_CELL)
    marks["position"], marks["sequences"] = np.arange(positions), 1
    parts: list[bytes] = [_HEAD.pack(_MAGIC, 0), _WORD.pack(streams), _WORD.pack(positions), marks.tobytes()]
    parts.append(_LAYERS.pack(int(transposed), len(layers)))
    parts += [_TURNED.pack(turned, turned)] if turned is not None else []
    for layer in layers:
        parts += [_KEYS.pack(layer.key_type, layer.keys.shape[1]), layer.keys.tobytes()]
    for layer in layers:
        if not transposed:
            parts += [_VALUES.pack(layer.value_type, layer.values.shape[1]), layer.values.tobytes()]
            continue
        element = _ELEMENT.get(layer.value_type, 0)
        if not element or layer.values.shape[1] % element:
            return None
        width = layer.values.shape[1] // element
        columns = layer.values.reshape(positions, width, element).transpose(1, 0, 2)
        parts += [_TRANSPOSED.pack(layer.value_type, element, width), np.ascontiguousarray(columns).tobytes()]
    parts += [_WORD.pack(0)] * (streams - 1)
    return np.frombuffer(bytearray().join(parts), dtype=np.uint8)
