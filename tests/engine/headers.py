"""Hand-made GGUF files, sound or not."""

import struct
from collections.abc import Sequence

Entry = tuple[bytes, int, bytes]  # key, value type, value
Info = tuple[bytes, tuple[int, ...], int, int]  # name, shape, type, offset

F32, Q8_0 = 0, 8


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def u32(key: bytes, value: int) -> Entry:
    return key, 4, struct.pack("<I", value)


def f32(key: bytes, value: float) -> Entry:
    return key, 6, struct.pack("<f", value)


def string(key: bytes, value: bytes) -> Entry:
    return key, 8, text(value)


def strings(key: bytes, values: Sequence[bytes]) -> Entry:
    return key, 9, struct.pack("<IQ", 8, len(values)) + b"".join(map(text, values))


def numbers(key: bytes, values: Sequence[int]) -> Entry:
    return key, 9, struct.pack("<IQ", 5, len(values)) + struct.pack(f"<{len(values)}i", *values)


LLAMA = (string(b"general.architecture", b"llama"), u32(b"llama.block_count", 2))


def file(
    entries: Sequence[Entry] = LLAMA,
    infos: Sequence[Info] = (),
    data: int = 0,
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """The bytes of a file with `data` bytes of tensor data; `counts` lies about tensors and entries."""
    n_tensors, n_entries = counts or (len(infos), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_entries)
    for key, kind, value in entries:
        head += text(key) + struct.pack("<I", kind) + value
    for name, shape, kind, offset in infos:
        head += text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape) + struct.pack("<IQ", kind, offset)
    return head.ljust(-(-len(head) // alignment) * alignment, b"\0") + bytes(data)
