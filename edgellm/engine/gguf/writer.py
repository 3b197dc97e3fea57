"""Writing a GGUF from the parts of another GGUF: entries and tensors are copied byte for byte by default."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.engine.gguf.reader import SCALARS, SPLIT_KEYS, TENSOR_TYPES, GgufHeader, ModelFile, TensorInfo
from edgellm.engine.vocabulary import Floats
from edgellm.errors import ModelCorrupt, ModelUnsupported

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_FIRST_ENTRY = 24  # bytes of magic, version and the two counts
_STEP = 2**20


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor to write: `shape` in GGUF's order (columns first), `data` gives its `nbytes` bytes in any portions."""

    name: str
    shape: tuple[int, ...]
    kind: int
    nbytes: int
    data: Callable[[], Iterable[bytes | memoryview]]


def raw_entries(source: BufferedReader, header: GgufHeader) -> dict[str, bytes]:
    """Return every metadata entry as it stands in the file (key, type and value), in the file's order."""
    lengths = {key: len(key.encode()) for key in header.value_offsets}
    starts = [at - 12 - lengths[key] for key, at in header.value_offsets.items()]
    source.seek(_FIRST_ENTRY)
    ends = [*starts[1:], header.infos_offset]
    return {key: source.read(end - start) for key, start, end in zip(lengths, starts, ends, strict=True)}


def number(key: str, value: int) -> bytes:
    """Return an entry with an unsigned 32-bit number."""
    return _key(key, _UINT32) + struct.pack("<I", value)


def real(key: str, value: float) -> bytes:
    """Return an entry with a 32-bit floating-point number."""
    return _key(key, _FLOAT32) + struct.pack("<f", value)


def text(key: str, value: str) -> bytes:
    """Return an entry with a string."""
    return _key(key, _STRING) + _text(value)


def flags(key: str, values: Sequence[bool]) -> bytes:
    """Return an entry with an array of booleans."""
    return _key(key, _ARRAY) + struct.pack(f"<IQ{len(values)}?", _BOOL, len(values), *values)


def integers(key: str, values: Sequence[int]) -> bytes:
    """Return an entry with an array of signed 32-bit numbers."""
    return _key(key, _ARRAY) + struct.pack(f"<IQ{len(values)}i", _INT32, len(values), *values)


def picked(key: str, raw: bytes, at: Sequence[int]) -> bytes:
    """Return the entry `raw`, an array of numbers, with only its elements at these places, in this order."""
    begin = 12 + len(key.encode())
    (kind,) = struct.unpack_from("<I", raw, begin)
    size = struct.calcsize("<" + SCALARS[kind])
    starts = [begin + 12 + place * size for place in at]
    return _key(key, _ARRAY) + struct.pack("<IQ", kind, len(at)) + b"".join(raw[s : s + size] for s in starts)


def copied(source: BufferedReader, tensor: TensorInfo) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in portions, each valid until the next is asked for.

    Raises:
        ModelCorrupt: the file has become shorter since its header was read.
    """
    source.seek(tensor.offset)
    buffer, left = memoryview(bytearray(min(_STEP, tensor.nbytes))), tensor.nbytes
    while left:
        n = source.readinto(buffer[:left])
        if not n:
            raise ModelCorrupt(
                f"The file ends within tensor {tensor.name}.", "Do not change the file while it is copied."
            )
        left -= n
        yield buffer[:n]


def multiplied(source: BufferedReader, tensor: TensorInfo, factor: float) -> Iterator[bytes]:
    """Yield the bytes of a tensor in float32, with every number multiplied."""
    data = b"".join(bytes(portion) for portion in copied(source, tensor))
    yield (np.frombuffer(data, dtype="<f4") * np.float32(factor)).tobytes()


def zeros(nbytes: int) -> Iterator[bytes]:
    """Yield `nbytes` zero bytes in portions."""
    for at in range(0, nbytes, _STEP):
        yield bytes(min(_STEP, nbytes - at))


def portions(like: GgufHeader, entries: Iterable[bytes], tensors: Sequence[NewTensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file with the version and alignment of `like`; a portion is valid until the next."""
    values, infos, due = tuple(entries), [], 0
    for t in tensors:
        infos.append(_info(t, due))
        due += _padded(t.nbytes, like.alignment)
    counts = struct.pack("<IQQ", like.version, len(tensors), len(values))
    head = b"".join((b"GGUF", counts, *values, *infos))
    yield head.ljust(_padded(len(head), like.alignment), b"\0")
    for t in tensors:
        yield from t.data()
        yield bytes(_padded(t.nbytes, like.alignment) - t.nbytes)


def write(dst: Path, data: Iterable[bytes | memoryview]) -> None:
    """Write a file that appears whole or not at all."""
    partial = dst.with_name(dst.name + ".partial")
    try:
        with partial.open("wb") as out:
            for portion in data:
                out.write(portion)
        partial.replace(dst)
    finally:
        partial.unlink(missing_ok=True)


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _key(key: str, kind: int) -> bytes:
    return _text(key) + struct.pack("<I", kind)


def _info(tensor: NewTensor, offset: int) -> bytes:
    dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return _text(tensor.name) + dims + struct.pack("<IQ", tensor.kind, offset)


_F32 = 0
_ALL_F32 = 0  # general.file_type of a file in float32
_FILE_TYPE = "general.file_type"


def to_f32(src: Path, dst: Path) -> None:
    """Write `src` with every tensor dequantised to float32; the metadata stay byte for byte, except the file type.

    Memory holds one tensor at a time. `dst` appears whole or not at all, and as one file if `src` is split.

    Raises:
        ModelNotFound, ModelCorrupt: as for `ModelFile.open`.
        ModelUnsupported: a tensor has a type that the gguf package does not dequantise.
    """
    file = ModelFile.open(src)
    header = file.header
    with ExitStack() as opened:
        sources = [opened.enter_context(path.open("rb")) for path in file.paths]
        entries = raw_entries(sources[0], header)
        if len(sources) > 1:
            entries = {key: raw for key, raw in entries.items() if not key.startswith(SPLIT_KEYS)}
        if _FILE_TYPE in entries:
            entries[_FILE_TYPE] = number(_FILE_TYPE, _ALL_F32)
        tensors = [
            NewTensor(t.name, t.shape, _F32, 4 * t.n_elements, partial(_dequantised, sources[t.part], t))
            for t in header.tensors
        ]
        write(dst, portions(header, entries.values(), tensors))


def _dequantised(source: BufferedReader, tensor: TensorInfo) -> Iterator[bytes]:
    source.seek(tensor.offset)
    rows = np.frombuffer(source.read(tensor.nbytes), dtype=np.uint8)
    yield dequantised(tensor, rows.reshape(tensor.n_elements // tensor.shape[0], -1)).tobytes()


def dequantised(tensor: TensorInfo, rows: npt.NDArray[np.uint8]) -> Floats:
    """Return rows of a tensor as they are in the file, (n, bytes of a row), as float32 (n, columns).

    Raises:
        ModelUnsupported: the tensor has a type that the gguf package does not dequantise.
    """
    if tensor.kind == _F32:
        return np.ascontiguousarray(rows).view(np.float32)
    import gguf  # takes a while to import, and only this needs it

    try:
        return gguf.dequantize(rows, gguf.GGMLQuantizationType(tensor.kind)).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError) as error:
        raise ModelUnsupported(
            f"Tensor {tensor.name} of type {TENSOR_TYPES[tensor.kind][0]} cannot be dequantised: {error}.", "Use Q8_0."
        ) from None
