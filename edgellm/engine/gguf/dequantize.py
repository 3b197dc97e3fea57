"""A float32 copy of a quantised model, for tests whose outcome must not depend on rounding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgellm.engine.gguf.reader import TensorInfo, check_gguf
from edgellm.engine.gguf.tensor_types import TENSOR_TYPES
from edgellm.engine.gguf.writer import NewTensor, number, portions, raw_entries, write
from edgellm.engine.types import Floats
from edgellm.errors import ModelUnsupported

_F32 = 0
_ALL_F32 = 0  # general.file_type of a file in float32
_FILE_TYPE = "general.file_type"


def to_f32(src: Path, dst: Path) -> None:
    """Write `src` with every tensor dequantised to float32; the metadata stay byte for byte, except the file type.

    Memory holds one tensor at a time. `dst` appears whole or not at all.

    Raises:
        ModelNotFound, ModelCorrupt: as for `check_gguf`.
        ModelUnsupported: a tensor has a type that the gguf package does not dequantise.
    """
    header = check_gguf(src)
    with src.open("rb") as source:
        entries = raw_entries(source, header)
        if _FILE_TYPE in entries:
            entries[_FILE_TYPE] = number(_FILE_TYPE, _ALL_F32)
        tensors = [
            NewTensor(t.name, t.shape, _F32, 4 * t.n_elements, partial(_dequantised, source, t)) for t in header.tensors
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
