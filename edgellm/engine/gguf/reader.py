"""A check of a GGUF header in Python before llama.cpp's loader sees the file; files that end the process are refused.

The native loader trusts most claims of a file, and answers some lies by aborting the process. So every count, length
and offset is checked against the file's real length here. Format: GGUF versions 2 and 3, little-endian. Rules for
tensor types by role, and for hyperparameters, were read from llama.cpp in llama-cpp-python 0.3.36; they let pass what
is unknown, which `edgellm/engine/trial/probe.py` tries.
"""

import math
import re
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import DEFAULT_BUFFER_SIZE, FileIO
from pathlib import Path
from types import MappingProxyType

from edgellm import system
from edgellm.engine.gguf.header import (
    F32,
    SCALARS,
    SPLIT_KEYS,
    TENSOR_TYPES,
    GgufArray,
    GgufHeader,
    TensorInfo,
    ValueType,
)
from edgellm.errors import ModelCorrupt, ModelNotFound, ModelUnsupported

_PART_NAME = re.compile(r"-\d{5}-of-\d{5}$")

MAX_LAYERS = MAX_EXPERTS = 512
MAX_TOKENS = 2**20
_MAX_ENTRIES = 65_536  # metadata entries, tensors, and parts; llama.cpp compares each name with all before it
_MAX_NAME = 63  # bytes
_MAX_HEADER = 128 * 2**20  # bytes; Gemma's 262,144 tokens take 16 MB
_MAX_KEPT = 32 * 2**20  # bytes of texts and numbers that are kept in the header, all together
_SETTLED = 2.0  # seconds: a file written just now may be written again within one tick of the file system's clock


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model in GGUF, in one file or split into parts, with its headers, which were checked when it was opened.

    `paths` and `parts` are the files and their headers, the first part first. `header` describes the whole model: it
    has the metadata of the first part, in which a split model keeps all of them, the tensors of all parts, and the
    length of all files together.
    """

    paths: tuple[Path, ...]
    parts: tuple[GgufHeader, ...]
    header: GgufHeader
    known_as: str = ""
    """The name by which the user knows the model, if any."""

    @classmethod
    def open(cls, path: Path) -> "ModelFile":
        """Return the model at `path`; for a split model, `path` is its first part, and the other parts lie beside it,
        under the names by which llama.cpp looks for them. Raises ModelNotFound, ModelCorrupt, ModelUnsupported: as for
        `check_gguf`, for each file; ModelUnsupported: it is a later part of a split model; ModelCorrupt: the parts do
        not belong together."""
        if (count := _split_count(check_gguf(path))) == 1:
            return cls.of((path,))
        if count > _MAX_ENTRIES:
            raise _corrupt(path, f"claims to be one of {count} parts; {_MAX_ENTRIES} are possible")
        ending = f"-00001-of-{count:05d}.gguf"
        if not path.name.endswith(ending):
            raise ModelUnsupported(f"{path} is one of {count} parts.", f"Name the first one, which ends in {ending}.")
        stem = path.name.removesuffix(ending)
        return cls.of([path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)])

    @classmethod
    def of(cls, paths: Sequence[Path]) -> "ModelFile":
        """Return the model that consists of these files, whatever their names. Raises as `open` does."""
        parts = tuple(map(check_gguf, paths))
        first, count = parts[0], _split_count(parts[0])
        if count != len(parts):
            raise _corrupt(paths[0], f"belongs to a model of {count} files, not of {len(parts)}")
        if count == 1:
            return cls(tuple(paths), parts, first)
        for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
            if part.metadata.get("split.no") != number:
                raise _corrupt(path, f"is not part {number + 1} of {count}: its split.no is not {number}")
        tensors = tuple(replace(tensor, part=number) for number, part in enumerate(parts) for tensor in part.tensors)
        announced = first.metadata.get("split.tensors.count")
        if announced != len(tensors):
            raise _corrupt(paths[0], f"announces {announced} tensors in its {count} parts, which hold {len(tensors)}")
        if twice := [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]:
            raise _corrupt(paths[0], f"has the tensor {twice[0]!r} in several of its {count} parts")
        whole = replace(first, tensors=tensors, file_size=sum(part.file_size for part in parts))
        return cls(tuple(paths), parts, whole)

    @property
    def path(self) -> Path:
        """The file, or the first part."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """The model's name: the user's, its own, or else the file's."""
        return self.known_as or str(self.header.metadata.get("general.name") or _PART_NAME.sub("", self.path.stem))


def _split_count(header: GgufHeader) -> int:
    count = header.metadata.get("split.count", 1)
    return count if isinstance(count, int) and count > 1 else 1


def check_gguf(path: Path) -> GgufHeader:
    """Read and check the header of one GGUF file; an unchanged file is read only once per process. Raises
    ModelNotFound: there is no such file, or it may not be read; ModelCorrupt: it is no GGUF, or its header and its
    length disagree; ModelUnsupported: it has a version or tensor type that this llama.cpp does not read."""
    try:
        found = path.stat()
        settled = time.time() - max(found.st_mtime, found.st_ctime) >= _SETTLED
        read = _read if settled else _read.__wrapped__
        return read(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    except IsADirectoryError:
        raise ModelNotFound(f"{path} is a folder, not a model file.", "Name the .gguf file in it.") from None
    except FileNotFoundError:
        what = f"There is no model file at {path}."
        raise ModelNotFound(what, "Check the path, or fetch one with `edgellm pull`.") from None
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}.", "Check its permissions.") from None


@lru_cache(maxsize=64)
def _read(path: Path, *_as_it_is: int) -> GgufHeader:
    with path.open("rb", buffering=0) as file:
        system.read_at_random(file.fileno())
        return _Parser(path, file).header()


def _corrupt(path: Path, what: str) -> ModelCorrupt:
    return ModelCorrupt(f"{path} {what}.", "Fetch the file again; the download may have been cut short.")


class _Parser:
    """A cursor over the beginning of a file."""

    def __init__(self, path: Path, file: FileIO) -> None:
        self.path, self.file, self.size = path, file, file.seek(0, 2)
        self.data, self.at, self.kept = b"", 0, 0
        file.seek(0)

    def corrupt(self, what: str) -> ModelCorrupt:
        return _corrupt(self.path, what)

    def header(self) -> GgufHeader:
        if self.size < 24:
            raise self.corrupt(f"has {self.size} bytes, too few for a GGUF header")
        if (magic := self.take(4, "its first four bytes")) != b"GGUF":
            raise self.corrupt(f"is not a GGUF file: it begins with {magic!r}")
        version = self.number("I")
        if version not in (2, 3):
            endian = " of a big-endian machine" if version & 0xFFFF == 0 else ""
            what = f"{self.path} is GGUF version {version}{endian}."
            raise ModelUnsupported(what, "Convert it to GGUF version 3, little-endian.")
        n_tensors, n_entries = self.number("Q"), self.number("Q")
        for n, what, least in ((n_tensors, "tensors", 24), (n_entries, "metadata entries", 13)):
            if n > _MAX_ENTRIES or n * least > self.size:
                raise self.corrupt(f"claims to hold {n} {what}, which do not fit its {self.size} bytes")
        metadata: dict[str, object] = {}
        offsets: dict[str, int] = {}
        alignment = 32
        for _ in range(n_entries):
            key = self.text(_MAX_ENTRIES, "a metadata key")
            if not key or key in metadata:
                raise self.corrupt(f"names the metadata key {key!r} twice" if key else "has an empty key")
            kind = self.number("I")
            offsets[key] = self.at
            metadata[key] = value = self.value(key, kind)
            if key == "general.alignment":
                if kind != ValueType.UINT32 or not isinstance(value, int) or value <= 0 or value & (value - 1):
                    raise self.corrupt(f"has an alignment of {value!r}, which is no power of two in 32 bits")
                alignment = value
        for claim in _fatal_claims(metadata):
            raise self.corrupt(claim)
        tokens = metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, GgufArray) and tokens.kind == ValueType.STRING:
            self.check_tokens(tokens, str(metadata.get("tokenizer.ggml.model")))
        infos_offset = self.at
        infos = [self.tensor_info() for _ in range(n_tensors)]
        data_offset = -(-self.at // alignment) * alignment
        tensors = tuple(self.placed(infos, data_offset, alignment))
        fields, places = MappingProxyType(metadata), MappingProxyType(offsets)
        return GgufHeader(version, fields, tensors, alignment, places, infos_offset, data_offset, self.size)

    def read_to(self, end: int, what: str) -> None:
        """Have the file's bytes up to `end` in `data`."""
        if end > self.size:
            left = self.size - self.at
            raise self.corrupt(f"ends within {what}: {end - self.at} bytes are announced at {self.at}, {left} are left")
        if end > _MAX_HEADER:
            raise self.corrupt(f"has more than {_MAX_HEADER >> 20} MiB before its tensors")
        while len(self.data) < end:
            portion = self.file.read(max(DEFAULT_BUFFER_SIZE, len(self.data)))
            if not portion:
                raise self.corrupt(f"ends within {what}")
            self.data += portion

    def take(self, n: int, what: str) -> bytes:
        """Return the next `n` bytes, and move past them."""
        at, end = self.at, self.at + n
        self.read_to(end, what)
        self.at = end
        return self.data[at:end]

    def keep(self, n: int) -> None:
        self.kept += n
        if self.kept > _MAX_KEPT:
            raise self.corrupt(f"has more than {_MAX_KEPT >> 20} MiB of names and metadata")

    def number(self, code: str) -> int:
        form = "<" + code
        return int(struct.unpack(form, self.take(struct.calcsize(form), "a number"))[0])

    def text(self, limit: int, what: str, errors: str = "strict") -> str:
        n = self.number("Q")
        if n > limit:
            raise self.corrupt(f"has {what} of {n} bytes at {self.at}; {limit} are allowed")
        self.keep(n)
        try:
            return self.take(n, what).decode(errors=errors)
        except UnicodeDecodeError:
            raise self.corrupt(f"has {what} before {self.at} that is not UTF-8") from None

    def value(self, key: str, kind: int) -> object:
        if kind == ValueType.STRING:
            return self.text(_MAX_KEPT, f"the value of {key}", errors="replace")
        if kind in SCALARS:
            form = "<" + SCALARS[kind]
            value = struct.unpack(form, self.take(struct.calcsize(form), key))[0]
            if isinstance(value, float) and (not math.isfinite(value) or (value < 0 and key.endswith("epsilon"))):
                raise self.corrupt(f"gives {key} the impossible value {value}")
            return value
        if kind != ValueType.ARRAY:
            raise self.corrupt(f"has the unknown value type {kind} for {key}")
        kind, count = self.number("I"), self.number("Q")
        begin = self.at
        if kind == ValueType.STRING:
            self.skip_strings(key, count)
            return GgufArray(kind, count, begin)
        if kind not in SCALARS:
            raise self.corrupt(f"has the unknown element type {kind} in {key}")
        data = self.take(count * struct.calcsize("<" + SCALARS[kind]), key)
        if count > MAX_LAYERS:  # none of these has a value for each layer
            return GgufArray(kind, count, begin)
        self.keep(count * sys.getsizeof(0.0))
        return struct.unpack(f"<{count}{SCALARS[kind]}", data)

    def skip_strings(self, key: str, count: int) -> None:
        if count * 8 > self.size - self.at:
            raise self.corrupt(f"claims {count} strings for {key}, which do not fit its {self.size} bytes")
        at, what, read = self.at, f"the strings of {key}", struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at + 8 > len(self.data):
                self.read_to(at + 8, what)
            at += 8 + int(read(self.data, at)[0])
        self.read_to(at, what)
        self.at = at

    def check_tokens(self, tokens: GgufArray, model: str) -> None:
        if tokens.count > MAX_TOKENS:
            raise self.corrupt(f"lists {tokens.count} tokens; {MAX_TOKENS} are possible")
        texts = enumerate(strings_at(self.data, tokens.offset, tokens.count))
        # The native loader takes a token for a C string.
        seen = {text.partition(b"\0")[0] or b"[EMPTY_%d]" % number for number, text in texts}
        if len(seen) < tokens.count:
            raise self.corrupt(f"lists {tokens.count} tokens, of which {tokens.count - len(seen)} are repeated")
        if model == "llama" and not all(b"<0x%02X>" % byte in seen for byte in range(256)):
            raise self.corrupt("lacks byte tokens, without which its tokenizer cannot write every text")
        if model == "rwkv" and not {b"\n", b"\\n"} & seen:
            raise self.corrupt("has a tokenizer of the kind rwkv without a token for the end of a line")

    def tensor_info(self) -> TensorInfo:
        """Read a tensor's info; the offset still counts from the start of the tensor data."""
        name = self.text(_MAX_NAME, "a tensor name")
        n_dims = self.number("I")
        if n_dims > 4:
            raise self.corrupt(f"gives tensor {name!r} {n_dims} dimensions; 4 are allowed")
        shape = tuple(self.number("Q") for _ in range(n_dims))
        kind, offset, count = self.number("I"), self.number("Q"), math.prod(shape)
        if kind not in TENSOR_TYPES:
            what = f"{self.path} holds tensor {name!r} in the unknown type {kind}."
            raise ModelUnsupported(what, "Use another quantisation.")
        type_name, block, _size = TENSOR_TYPES[kind]
        if not 0 < count < 2**62 or (shape[0] if shape else 1) % block:
            raise self.corrupt(f"gives tensor {name!r} the shape {shape}, impossible for {type_name}")
        return TensorInfo(name, shape, kind, offset)

    def placed(self, infos: Sequence[TensorInfo], data_offset: int, alignment: int) -> Iterator[TensorInfo]:
        """Yield the tensors with file offsets; check that they lie one after the other, padded, within the file."""
        names, due = set[str](), 0
        for t in infos:
            if t.name in names:
                raise self.corrupt(f"names the tensor {t.name!r} twice")
            names.add(t.name)
            if t.offset != due:
                raise self.corrupt(f"puts tensor {t.name!r} at {t.offset}; {due} is where it belongs")
            if (end := data_offset + due + t.nbytes) > self.size:
                raise self.corrupt(f"has {self.size} bytes, but tensor {t.name!r} needs {end}")
            if flaw := tensor_flaw(t):
                raise ModelUnsupported(f"{self.path} {flaw}.", "Use another file of this model.")
            yield replace(t, offset=data_offset + due)
            due += -(-t.nbytes // alignment) * alignment


def _fatal_claims(metadata: Mapping[str, object]) -> Iterator[str]:
    """Yield a predicate for each hyperparameter that would end the process, such as "claims 10000 experts"."""
    arch = metadata.get("general.architecture")

    def number(key: str) -> int:
        """Return an integer, or the largest value of an array with one integer per layer; -1 for anything else."""
        value = metadata.get(f"{arch}.{key}", 0)
        value = max(value, default=0) if isinstance(value, tuple) else value
        return value if isinstance(value, int) else -1

    layers = metadata.get(f"{arch}.block_count", 1)
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        yield f"claims {layers!r} layers; 1 to {MAX_LAYERS} are possible"
    elif not 0 <= number("nextn_predict_layers") <= layers:
        yield f"claims {number('nextn_predict_layers')} layers that predict further tokens, of {layers}"
    experts, used = number("expert_count"), number("expert_used_count")
    groups, groups_used = number("expert_group_count"), number("expert_group_used_count")
    if not 0 <= experts <= MAX_EXPERTS:
        yield f"claims {experts} experts; {MAX_EXPERTS} are possible"
    dense = str(arch).startswith("hunyuan") and experts <= 1  # one expert means none in Hunyuan
    if not dense and not (0 <= used <= experts and (used > 0) == (experts > 0)):
        yield f"claims to use {used} of {experts} experts"
    if groups and not 0 <= groups < max(1, experts):
        yield f"claims {groups} groups of {experts} experts"
    elif groups > 1 and (experts % groups or not 0 < groups_used < groups):
        yield f"claims to use {groups_used} of {groups} groups of {experts} experts"
    scaling, known = metadata.get(f"{arch}.rope.scaling.type", "none"), ("none", "linear", "yarn", "longrope")
    if scaling not in known:
        yield f"names the unknown rope.scaling.type {scaling!r}; there are {', '.join(known)}"
    if not -1 <= number("pooling_type") < 5:
        yield f"names the unknown pooling_type {number('pooling_type')}"
    if not 0 <= number("vocab_size") <= MAX_TOKENS:
        yield f"claims a vocabulary of {number('vocab_size')} tokens; {MAX_TOKENS} are possible"
    yield from _fatal_arrays(metadata)


def _fatal_arrays(metadata: Mapping[str, object]) -> Iterator[str]:
    numbers = (ValueType.UINT32, ValueType.INT32, ValueType.FLOAT32)
    for name, kinds in (("scores", numbers), ("token_type", numbers), ("merges", (ValueType.STRING,))):
        key = f"tokenizer.ggml.{name}"
        value = metadata.get(key, ())
        if not isinstance(value, (tuple, GgufArray)):
            yield f"gives {key} the value {str(value)[:40]!r}, which is no array"
        if isinstance(value, GgufArray) and value.kind not in kinds:
            yield f"gives {key} elements of the GGUF type {value.kind}"


# For these types ggml has no product with a row of activations: the pointer that it would call is null.
_NO_PRODUCT = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})
# Indices, looked up or cast, never multiplied.
_INDICES = re.compile(r"d2t|masked_embd_ordering(\.weight)?|blk\.\d+\.ffn_gate_tid2eid\.weight")
# Operands of ggml_add, ggml_mul, ggml_rope, ggml_ssm_conv and ggml_ssm_scan beside float32 activations.
_ELEMENTWISE = re.compile(
    r".*\.(bias|scale|input_scale)|(.*[._])?(e|h)?norm(_?\d|_exps|_key|_query|_conv)?\.weight"
    r"|(.*\.)?rope_(freqs|factors_long|factors_short)(\.weight)?"
    r"|(.*\.)?(attn_sinks|ssm_conv1d(_[qkv])?|shortconv\.conv|ssm_a|ssm_d|layer_output_scale)(\.weight)?"
)


def is_index(name: str) -> bool:
    """Return whether a tensor holds indices into other tensors, which decide which memory is read."""
    return bool(_INDICES.fullmatch(name))


def tensor_flaw(tensor: TensorInfo) -> str:
    """Return a predicate for a tensor whose type ggml's operations on a processor do not accept in its role, or ""."""
    kind = TENSOR_TYPES[tensor.kind][0]
    if is_index(tensor.name):
        return ""
    if tensor.kind != F32 and _ELEMENTWISE.fullmatch(tensor.name):
        return f"holds {tensor.name} in {kind}; llama.cpp computes with it in F32 alone"
    return f"holds {tensor.name} in {kind}, with which llama.cpp cannot multiply" if kind in _NO_PRODUCT else ""


def strings_at(data: bytes, at: int, count: int) -> Iterator[bytes]:
    """Yield the strings of an array, which begin at a place in `data`."""
    read = struct.Struct("<Q").unpack_from
    for _ in range(count):
        begin = at + 8
        at = begin + int(read(data, at)[0])
        yield data[begin:at]


def raw_entries(file: ModelFile) -> dict[str, bytes]:
    """Return every metadata entry as it stands in a model's first file (key, type and value), in its order; where there
    are more files, without those that tell of the parts."""
    header, single = file.header, len(file.paths) == 1
    lengths = {key: len(key.encode()) for key in header.value_offsets}
    starts = [at - 12 - lengths[key] for key, at in header.value_offsets.items()]
    ends = [*starts, header.infos_offset][1:]
    with file.path.open("rb") as source:
        source.seek(min(starts, default=0))
        found = {key: source.read(end - start) for key, start, end in zip(lengths, starts, ends, strict=True)}
    return {key: raw for key, raw in found.items() if single or not key.startswith(SPLIT_KEYS)}


def tokenizer_entries(file: ModelFile) -> dict[str, bytes]:
    """Return all that a model's file says about its tokenizer, its chat template included, as it stands there."""
    return {key: raw for key, raw in raw_entries(file).items() if key.startswith("tokenizer.")}
