"""A float32 copy of a quantised model, for tests in which rounding must not decide."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from edgellm.engine.gguf import TENSOR_TYPES, TensorInfo, check_gguf
from edgellm.errors import ModelUnsupported

_F32, _UINT32 = 0, 4
_ALL_F32 = 0  # what general.file_type says of a file in float32
_FILE_TYPE = "general.file_type"


def to_f32(src: Path, dst: Path) -> None:
    """Writes `src` with every tensor dequantised to float32; the metadata stay as they are, byte for byte.

    Memory holds one tensor at a time. `dst` appears whole or not at all.

    Raises:
        ModelNotFound, ModelCorrupt: as for `check_gguf`.
        ModelUnsupported: a tensor type that the gguf package does not dequantise.
    """
    header = check_gguf(src)
    infos, due = [], 0
    for t in header.tensors:
        infos.append(_info(t, due))
        due += _padded(4 * t.n_elements, header.alignment)
    partial = dst.with_name(dst.name + ".partial")
    try:
        with src.open("rb") as source, partial.open("wb") as out:
            metadata = bytearray(source.read(header.infos_offset))
            at = header.value_offsets.get(_FILE_TYPE)
            if at is not None and metadata[at - 4 : at] == struct.pack("<I", _UINT32):
                metadata[at : at + 4] = struct.pack("<I", _ALL_F32)
            head = bytes(metadata) + b"".join(infos)
            out.write(head.ljust(_padded(len(head), header.alignment), b"\0"))
            for t in header.tensors:
                source.seek(t.offset)
                data = _floats(t, source.read(t.nbytes)).tobytes()
                out.write(data.ljust(_padded(len(data), header.alignment), b"\0"))
        partial.replace(dst)
    finally:
        partial.unlink(missing_ok=True)


def _padded(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


def _info(tensor: TensorInfo, offset: int) -> bytes:
    name = tensor.name.encode()
    dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
    return struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", _F32, offset)


def _floats(tensor: TensorInfo, data: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    import gguf  # takes a while to import, and only this needs it

    rows = np.frombuffer(data, dtype=np.uint8)
    if tensor.kind != _F32:
        rows = rows.reshape(tensor.n_elements // tensor.shape[0], -1)
    try:
        return gguf.dequantize(rows, gguf.GGMLQuantizationType(tensor.kind)).astype(np.float32, copy=False)
    except (NotImplementedError, ValueError) as error:
        raise ModelUnsupported(
            f"Tensor {tensor.name} of type {TENSOR_TYPES[tensor.kind][0]} cannot be dequantised: {error}.", "Use Q8_0."
        ) from None
