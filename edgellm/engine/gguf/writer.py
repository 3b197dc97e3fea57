"""Writing a GGUF from the parts of another GGUF, byte for byte or with its weights in other types; and its tokenizer,
which is read without loading the model, and written as a file of its own."""

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from edgellm.engine import native
from edgellm.engine.gguf.header import SCALARS, GgufArray, GgufHeader, TensorInfo, ValueType
from edgellm.engine.gguf.reader import ModelFile, strings_at, tokenizer_entries
from edgellm.engine.native import lib
from edgellm.errors import ModelCorrupt, ModelUnsupported

_STEP = 2**20


NewTensor: TypeAlias = tuple[TensorInfo, Callable[[], Iterable[bytes | memoryview]]]
"""A tensor to write, and what gives its bytes in any portions; its place is found as it is written."""


def entry(key: str, value: str | float | Sequence[int]) -> bytes:
    """Return a metadata entry: a string, an unsigned 32-bit number, a 32-bit floating-point number, or an array of
    booleans or signed 32-bit numbers."""
    if isinstance(value, str):
        return _key(key, ValueType.STRING) + _text(value)
    if isinstance(value, int):
        return _key(key, ValueType.UINT32) + struct.pack("<I", value)
    if isinstance(value, float):
        return _key(key, ValueType.FLOAT32) + struct.pack("<f", value)
    kind = ValueType.BOOL if all(isinstance(one, bool) for one in value) else ValueType.INT32
    return _key(key, ValueType.ARRAY) + struct.pack(f"<IQ{len(value)}{SCALARS[kind]}", kind, len(value), *value)


def picked(key: str, raw: bytes, at: Sequence[int]) -> bytes:
    """Return the entry `raw`, an array of numbers, with only its elements at these places, in this order."""
    begin = 12 + len(key.encode())
    (kind,) = struct.unpack_from("<I", raw, begin)
    size = struct.calcsize("<" + SCALARS[kind])
    starts = [begin + 12 + place * size for place in at]
    return _key(key, ValueType.ARRAY) + struct.pack("<IQ", kind, len(at)) + b"".join(raw[s : s + size] for s in starts)


def copied(source: BufferedReader, tensor: TensorInfo) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in portions, each valid until the next is asked for. Raise ModelCorrupt if the file
    has become shorter since its header was read."""
    source.seek(tensor.offset)
    buffer, left = memoryview(bytearray(min(_STEP, tensor.nbytes))), tensor.nbytes
    while left:
        n = source.readinto(buffer[:left])
        if not n:
            what = f"The file ends within tensor {tensor.name}."
            raise ModelCorrupt(what, "Do not change the file while it is copied.")
        left -= n
        yield buffer[:n]


def multiplied(source: BufferedReader, tensor: TensorInfo, factor: float) -> Iterator[bytes]:
    """Yield the bytes of a tensor in float32, with every number multiplied."""
    data = b"".join(map(bytes, copied(source, tensor)))
    yield (np.frombuffer(data, dtype="<f4") * np.float32(factor)).tobytes()


def zeros(nbytes: int) -> Iterator[bytes]:
    """Yield `nbytes` zero bytes in portions."""
    for at in range(0, nbytes, _STEP):
        yield bytes(min(_STEP, nbytes - at))


def portions(like: GgufHeader, entries: Iterable[bytes], tensors: Sequence[NewTensor]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file with the version and alignment of `like`; a portion is valid until the next."""
    values, infos, due = tuple(entries), [], 0
    for t, _ in tensors:
        shape = struct.pack(f"<I{len(t.shape)}Q", len(t.shape), *t.shape)
        infos.append(_text(t.name) + shape + struct.pack("<IQ", t.kind, due))
        due += t.nbytes + -t.nbytes % like.alignment
    head = b"".join((b"GGUF", struct.pack("<IQQ", like.version, len(tensors), len(values)), *values, *infos))
    yield head + bytes(-len(head) % like.alignment)
    for t, data in tensors:
        yield from data()
        yield bytes(-t.nbytes % like.alignment)


def write(dst: Path, data: Iterable[bytes | memoryview]) -> None:
    """Write a file that appears whole or not at all."""
    unfinished = dst.with_name(dst.name + ".partial")
    try:
        with unfinished.open("wb") as out:
            out.writelines(data)
        unfinished.replace(dst)
    finally:
        unfinished.unlink(missing_ok=True)


def _text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def _key(key: str, kind: int) -> bytes:
    return _text(key) + struct.pack("<I", kind)


FILE_TYPES = MappingProxyType({"Q4_0": 2, "Q5_0": 8, "Q8_0": 7, "IQ4_NL": 25})
"""llama.cpp's numbers of the types that a whole file may have."""


def requantise(source: Path, target: Path, kind: str, *, name: str) -> None:
    """Write the model in `source` to `target` with its matrices in the type `kind`, one of `FILE_TYPES`. The file calls
    itself `name`. Raise ModelUnsupported where llama.cpp cannot write it so."""
    native.start()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = FILE_TYPES[kind], True, native.available_threads()
    text = lib.llama_model_kv_override_value(val_str=name.encode())
    entry = lib.llama_model_kv_override(lib.LLAMA_KV_OVERRIDE_TYPE_STR, b"general.name", text)
    params.kv_overrides = (lib.llama_model_kv_override * 2)(entry)  # An empty element ends the array.
    if lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.pointer(params)):
        raise ModelUnsupported(f"llama.cpp cannot write {source.name} in {kind}.", "Use the file as it is.")


TOKENS = "tokenizer.ggml.tokens"
PADDING = 256
"""Greatest number of padding entries by which two vocabularies of one tokenizer may differ."""
MAX_TOKENIZER = 64 * 2**20
"""Most bytes of a tokenizer's file: Gemma 4, with 262,144 tokens, has 16 MB."""
_UNREAD = "tokenizer.huggingface.json"  # a copy that llama.cpp does not read


def token_count(header: GgufHeader) -> int:
    """Return how many tokens a file has; 0 where it has no vocabulary."""
    described = header.metadata.get(TOKENS)
    return described.count if isinstance(described, GgufArray) else 0


def token_texts(file: ModelFile) -> Sequence[bytes]:
    """Return the texts of all tokens; none where the file has no vocabulary."""
    count = token_count(file.parts[0])
    # They begin behind the key, the types and the count.
    return list(strings_at(tokenizer_entries(file)[TOKENS], 24 + len(TOKENS), count)) if count else ()


def tokenizer_file(file: ModelFile, name: str = "") -> bytes:
    """Return the bytes of a GGUF file with the tokenizer and the chat template of `file`, under its name or another.
    Raises ModelUnsupported: it has no tokenizer, or one of more than `MAX_TOKENIZER` bytes; OSError: it cannot be
    read."""
    header = file.parts[0]
    if not token_count(header):
        raise ModelUnsupported(f"{file.path} contains no tokenizer.", "Use a whole model file.")
    kept = [entry("general.architecture", header.architecture), entry("general.name", name or file.name)]
    kept += (raw for key, raw in tokenizer_entries(file).items() if key != _UNREAD)
    data = b"".join(portions(replace(header, alignment=32), kept, ()))  # GGUF's default
    if len(data) > MAX_TOKENIZER:
        what = f"The tokenizer of {file.path} has {len(data)} bytes; {MAX_TOKENIZER} are possible."
        raise ModelUnsupported(what, "Use another model.")
    return data
