"""A check of a GGUF header in Python before llama.cpp's loader sees the file; files that end the process are refused.

The native loader trusts most claims of a file, and answers some lies by aborting the process. So every
count, length and offset is checked against the real length of the file here, and reading stays within small limits.
Format: the GGUF specification in the ggml repository, versions 2 and 3, little-endian.

The rules cover tensor types by role, and hyperparameters by the assertions of `llama_model::load_hparams`. They refuse
what is known to be fatal and let pass what is unknown, which `edgellm/engine/trial/probe.py` tries. Read from
the source of llama.cpp in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from io import FileIO
from pathlib import Path
from types import MappingProxyType

from edgellm import system
from edgellm.errors import ModelCorrupt, ModelNotFound, ModelUnsupported

# ggml type: name, elements in a block, bytes in a block
TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292),
        16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
        20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136),
        24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
        29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
        39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36), 41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata that is described but not read: `count` elements of GGUF value type `kind`."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place. `shape` is in GGUF's order (columns first), `offset` counts from the start of the file.

    `part` is the number of the file in a split model, counted from 0.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int
    part: int = 0

    @property
    def n_elements(self) -> int:
        n = 1
        for dim in self.shape:
            n *= dim
        return n

    @property
    def layer(self) -> int | None:
        """The layer that it is part of, counted from 0; None beside the layers."""
        found = _LAYER.match(self.name)
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """A header whose every count and offset lies within the file.

    Scalars and short numeric arrays stand in `metadata` as Python values, other arrays as `GgufArray`. `value_offsets`
    says where in the file each value begins; the metadata end, and the tensor infos begin, at `infos_offset`.
    """

    version: int
    metadata: Mapping[str, object]
    tensors: tuple[TensorInfo, ...]
    alignment: int
    value_offsets: Mapping[str, int]
    infos_offset: int
    data_offset: int
    file_size: int

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def number(self, key: str, default: int = 0) -> int:
        """Return a hyperparameter of the architecture, the largest value if layers differ; `default` without one."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        value = max(value, default=0) if isinstance(value, tuple) else value
        return value if isinstance(value, int) else default

    @property
    def main_type(self) -> tuple[str, float] | None:
        """Return the tensor type of most weights, and its share of all weights; None without tensors."""
        weights = Counter[str]()
        for tensor in self.tensors:
            weights[TENSOR_TYPES[tensor.kind][0]] += tensor.n_elements
        (name, most), *_ = weights.most_common(1) or [("", 0)]
        return (name, most / weights.total()) if most else None

    @property
    def quantisation(self) -> str | None:
        """Return the file's type, such as Q4_K_M, or else its main tensor type; None without tensors."""
        from gguf import LlamaFileType  # takes a while to import

        kinds = {int(kind): kind.name.partition("_")[2] for kind in LlamaFileType}  # MOSTLY_Q4_K_M, ALL_F32
        said = self.metadata.get("general.file_type")
        return (isinstance(said, int) and kinds.get(said)) or (self.main_type and self.main_type[0])

    def tensor(self, *names: str) -> TensorInfo | None:
        """Return the tensor with the first of these names that exists; None where none does."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        return next((by_name[name] for name in names if name in by_name), None)


SPLIT_KEYS = "split."  # prefix of the keys of a split model's parts
_MAX_PARTS = 1_000
_PART_NAME = re.compile(r"-\d{5}-of-\d{5}$")
_LAYER = re.compile(r"blk\.(\d{1,9})\.")


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

    @classmethod
    def open(cls, path: Path) -> ModelFile:
        """Return the model at `path`; for a split model, `path` is its first part, and the other parts lie beside it.

        Raises:
            ModelNotFound, ModelCorrupt, ModelUnsupported: as for `check_gguf`, for each file.
            ModelUnsupported: it is a later part of a split model.
            ModelCorrupt: the parts do not belong together.
        """
        first = check_gguf(path)
        paths = _part_paths(path, _split_count(first))
        return cls._joined(paths, (first, *map(check_gguf, paths[1:])))

    @classmethod
    def of(cls, paths: Sequence[Path]) -> ModelFile:
        """Return the model that consists of these files, whatever their names."""
        return cls._joined(tuple(paths), tuple(map(check_gguf, paths)))

    @classmethod
    def _joined(cls, paths: tuple[Path, ...], parts: tuple[GgufHeader, ...]) -> ModelFile:
        first, count = parts[0], _split_count(parts[0])
        if count != len(parts):
            raise _corrupt(paths[0], f"belongs to a model of {count} files, not of {len(parts)}")
        if count == 1:
            return cls(paths, parts, first)
        for number, (path, part) in enumerate(zip(paths, parts, strict=True)):
            if part.metadata.get("split.no") != number:
                raise _corrupt(path, f"is not part {number + 1} of {count}: its split.no is not {number}")
        tensors = tuple(replace(tensor, part=number) for number, part in enumerate(parts) for tensor in part.tensors)
        announced = first.metadata.get("split.tensors.count")
        if announced != len(tensors):
            raise _corrupt(paths[0], f"announces {announced} tensors in its {count} parts, which hold {len(tensors)}")
        if twice := [name for name, times in Counter(tensor.name for tensor in tensors).items() if times > 1]:
            raise _corrupt(paths[0], f"has the tensor {twice[0]!r} in several of its {count} parts")
        return cls(paths, parts, replace(first, tensors=tensors, file_size=sum(part.file_size for part in parts)))

    @property
    def path(self) -> Path:
        """The file, or the first part."""
        return self.paths[0]

    @property
    def name(self) -> str:
        """The model's name, or else the file's."""
        return str(self.header.metadata.get("general.name") or _PART_NAME.sub("", self.path.stem))


def _split_count(header: GgufHeader) -> int:
    count = header.metadata.get("split.count", 1)
    return count if isinstance(count, int) and count > 1 else 1


def _part_paths(path: Path, count: int) -> tuple[Path, ...]:
    """Return the files of a model of `count` parts, by the names under which llama.cpp looks for them."""
    if count == 1:
        return (path,)
    if count > _MAX_PARTS:
        raise _corrupt(path, f"claims to be one of {count} parts; {_MAX_PARTS} are possible")
    ending = f"-00001-of-{count:05d}.gguf"
    if not path.name.endswith(ending):
        raise ModelUnsupported(f"{path} is one of {count} parts.", f"Name the first one, which ends in {ending}.")
    stem = path.name.removesuffix(ending)
    return tuple(path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1))


@dataclass(frozen=True, slots=True)
class Dimensions:
    """The dimensions of a model's layers; where they differ from layer to layer, the largest. `layers`: without those
    that predict further tokens.

    `d_ff`: the width of the feed-forward part, summed over the experts that a token goes through. `keys`, `values`:
    elements that each head of keys and values keeps for a position.
    """

    layers: int
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    keys: int
    values: int


def dimensions(header: GgufHeader) -> Dimensions:
    """Return the dimensions of a model, or of some of its layers.

    Raises:
        ModelUnsupported: the header does not say what its layers look like.
    """
    arch = header.architecture

    def number(key: str, default: int | None = None) -> int:
        value = header.metadata.get(f"{arch}.{key}", default)
        value = max(value) if isinstance(value, tuple) and value else value
        if not isinstance(value, int) or value < 1:
            what = f"The model does not say its {arch or 'architecture'}.{key}: it is {value!r}."
            raise ModelUnsupported(what, "Use a transformer language model in GGUF.")
        return value

    d_model, heads = number("embedding_length"), number("attention.head_count")
    expert = header.metadata.get(f"{arch}.expert_feed_forward_length") is not None
    width = number("expert_feed_forward_length" if expert else "feed_forward_length")
    return Dimensions(
        layers=number("block_count") - mtp_layers(header), d_model=d_model,
        d_ff=width * number("expert_used_count", 1), heads=heads,
        kv_heads=number("attention.head_count_kv", heads), keys=number("attention.key_length", d_model // heads),
        values=number("attention.value_length", d_model // heads),
    )  # fmt: skip


def mtp_layers(header: GgufHeader) -> int:
    """Return how many layers at the end of a model predict further tokens (MTP), and compute no text; mostly 0."""
    return header.number("nextn_predict_layers")


def text_layers(header: GgufHeader) -> int:
    """Return how many layers compute the text; 0 where the header does not say."""
    return max(0, header.number("block_count") - mtp_layers(header))


def attention_layers(header: GgufHeader) -> tuple[int, ...]:
    """Return the layers that have attention, from 0: all of a transformer's, some of a hybrid model's, or none."""
    metadata, arch = header.metadata, header.architecture
    layers = range(text_layers(header))
    heads, kv_heads = (metadata.get(f"{arch}.attention.{name}") for name in ("head_count", "head_count_kv"))
    every = metadata.get(f"{arch}.full_attention_interval")
    if heads in (None, 0):
        return ()
    if isinstance(kv_heads, tuple) and 0 in kv_heads:
        return tuple(layer for layer, heads in zip(layers, kv_heads, strict=False) if heads)
    if isinstance(every, int) and every > 0:
        return tuple(layer for layer in layers if (layer + 1) % every == 0)
    return tuple(layers)


MAX_LAYERS = 512
MAX_EXPERTS = 512
MAX_TOKENS = 2**20
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")
_POOLING = range(-1, 5)
_32_BITS = (4, 5, 6)  # GGUF value types: UINT32, INT32, FLOAT32
_STRING = 8
_F32 = 0

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


def fatal_claims(metadata: Mapping[str, object]) -> Iterator[str]:
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
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in _ROPE_SCALING:
        yield f"names the unknown rope.scaling.type {scaling!r}; there are {', '.join(_ROPE_SCALING)}"
    if number("pooling_type") not in _POOLING:
        yield f"names the unknown pooling_type {number('pooling_type')}"
    if not 0 <= number("vocab_size") <= MAX_TOKENS:
        yield f"claims a vocabulary of {number('vocab_size')} tokens; {MAX_TOKENS} are possible"
    for key, kinds in (("scores", _32_BITS), ("token_type", _32_BITS), ("merges", (_STRING,))):
        yield from _fatal_array(metadata, f"tokenizer.ggml.{key}", kinds)


def _fatal_array(metadata: Mapping[str, object], key: str, kinds: Sequence[int]) -> Iterator[str]:
    value = metadata.get(key)
    if value is not None and not isinstance(value, (tuple, GgufArray)):
        yield f"gives {key} the value {str(value)[:40]!r}, which is no array"
    if isinstance(value, GgufArray) and value.kind not in kinds:
        yield f"gives {key} elements of the GGUF type {value.kind}"


def fatal_tensors(tensors: Sequence[TensorInfo]) -> Iterator[str]:
    """Yield a predicate for each tensor whose type ggml's operations on a processor do not accept in its role."""
    for tensor in tensors:
        kind = TENSOR_TYPES[tensor.kind][0]
        if is_index(tensor.name):
            continue
        if tensor.kind != _F32 and _ELEMENTWISE.fullmatch(tensor.name):
            yield f"holds {tensor.name} in {kind}; llama.cpp computes with it in F32 alone"
        elif kind in _NO_PRODUCT:
            yield f"holds {tensor.name} in {kind}, with which llama.cpp cannot multiply"


__all__ = ["MAX_LAYERS", "MAX_TOKENS", "GgufArray", "GgufHeader", "TensorInfo", "check_gguf"]

MAX_ENTRIES = 65_536  # metadata entries, and tensors; llama.cpp compares each name with all before it
MAX_NAME = 63
MAX_KEY = 65_535
MAX_STRING = 16 * 2**20
MAX_STRINGS = 4_000_000
MAX_KEPT = 32 * 2**20  # bytes of texts and numbers that are kept in the header, all together
KEPT_ELEMENTS = 1_024  # length of the longest numeric arrays kept in the header; longer arrays are only described

_SETTLED = 2.0  # seconds: a file written just now may be written again within one tick of the file system's clock

_UINT32, _ARRAY = 4, 9
_NUMBER = 40  # bytes of a number in Python
_PORTION = 256 * 2**10  # bytes that are read at a time
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def check_gguf(path: Path) -> GgufHeader:
    """Read and check the header of one GGUF file.

    As every token of a vocabulary is looked at, an unchanged file is read only once per process.

    Raises:
        ModelNotFound: there is no such file, or it may not be read.
        ModelCorrupt: it is no GGUF, or its header and its length disagree.
        ModelUnsupported: it has a version or tensor type that this llama.cpp does not read.
    """
    try:
        found = path.stat()
    except OSError:
        return _read(path)  # raises the error that says what is wrong
    if time.time() - max(found.st_mtime, found.st_ctime) < _SETTLED:
        return _read(path)
    return _known(path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(maxsize=64)
def _known(path: Path, *_as_it_is: int) -> GgufHeader:
    return _read(path)


def _read(path: Path) -> GgufHeader:
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, 2)
            if size < 24:
                raise _corrupt(path, f"has {size} bytes, too few for a GGUF header")
            system.read_at_random(file.fileno())
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Parser(path, file, view, size).header()
    except IsADirectoryError:
        raise ModelNotFound(f"{path} is a folder, not a model file.", "Name the .gguf file in it.") from None
    except FileNotFoundError:
        what = f"There is no model file at {path}."
        raise ModelNotFound(what, "Check the path, or fetch one with `edgellm pull`.") from None
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror}.", "Check its permissions.") from None


def _corrupt(path: Path, what: str) -> ModelCorrupt:
    return ModelCorrupt(f"{path} {what}.", "Fetch the file again; the download may have been cut short.")


class _Parser:
    """A cursor over the mapped file that never leaves it."""

    def __init__(self, path: Path, file: FileIO, view: mmap.mmap, size: int) -> None:
        self.path, self.file, self.view, self.size, self.at, self.kept = path, file, view, size, 0, 0
        self.fetched, self.buffer = 0, bytearray(_PORTION)

    def fetch(self, begin: int, end: int) -> None:
        """Read these bytes into memory before they are looked at through the map: while a look waits for a slow disk,
        every other thread of this process waits too."""
        self.fetched = max(self.fetched, begin)
        while self.fetched < end:
            self.file.seek(self.fetched)
            self.fetched += self.file.readinto(self.buffer) or self.size

    def header(self) -> GgufHeader:
        self.take(4, "its first four bytes")
        magic = bytes(self.view[:4])
        if magic != b"GGUF":
            raise _corrupt(self.path, f"is not a GGUF file: it begins with {magic!r}")
        version = self.number("I")
        if version not in (2, 3):
            endian = " of a big-endian machine" if version & 0xFFFF == 0 else ""
            what = f"{self.path} is GGUF version {version}{endian}."
            raise ModelUnsupported(what, "Convert it to GGUF version 3, little-endian.")
        n_tensors, n_entries = self.number("Q"), self.number("Q")
        for n, what, least in ((n_tensors, "tensors", 24), (n_entries, "metadata entries", 13)):
            if n > MAX_ENTRIES or n * least > self.size:
                raise _corrupt(self.path, f"claims to hold {n} {what}, which do not fit its {self.size} bytes")
        metadata: dict[str, object] = {}
        offsets: dict[str, int] = {}
        for _ in range(n_entries):
            key = self.text(MAX_KEY, "a metadata key")
            if not key or key in metadata:
                raise _corrupt(self.path, f"names the metadata key {key!r} twice" if key else "has an empty key")
            kind = self.number("I")
            offsets[key] = self.at
            metadata[key] = self.value(key, kind)
        self.check_claims(metadata)
        alignment = self.alignment(metadata, offsets)
        infos_offset = self.at
        infos = [self.tensor_info() for _ in range(n_tensors)]
        data_offset = -(-self.at // alignment) * alignment
        placed = self.placed(infos, data_offset, alignment)
        for flaw in fatal_tensors(placed):
            raise ModelUnsupported(f"{self.path} {flaw}.", "Use another file of this model.")
        fields, places = MappingProxyType(metadata), MappingProxyType(offsets)
        return GgufHeader(version, fields, placed, alignment, places, infos_offset, data_offset, self.size)

    def take(self, n: int, what: str) -> int:
        """Move past `n` bytes; return where they began."""
        at = self.at
        if n > self.size - at:
            raise _corrupt(self.path, f"ends within {what}: {n} bytes are announced at {at}, {self.size - at} are left")
        self.at = at + n
        if n <= MAX_STRING:  # longer values are skipped
            self.fetch(at, self.at)
        return at

    def keep(self, n: int) -> None:
        self.kept += n
        if self.kept > MAX_KEPT:
            raise _corrupt(self.path, f"has more than {MAX_KEPT >> 20} MiB of names and metadata")

    def number(self, code: str) -> int:
        form = "<" + code
        return int(struct.unpack_from(form, self.view, self.take(struct.calcsize(form), "a number"))[0])

    def text(self, limit: int, what: str, errors: str = "strict") -> str:
        n = self.number("Q")
        if n > limit:
            raise _corrupt(self.path, f"has {what} of {n} bytes at {self.at}; {limit} are allowed")
        at = self.take(n, what)
        self.keep(n)
        try:
            return self.view[at : at + n].decode(errors=errors)
        except UnicodeDecodeError:
            raise _corrupt(self.path, f"has {what} at {at} that is not UTF-8") from None

    def value(self, key: str, kind: int) -> object:
        if kind in SCALARS:
            form = "<" + SCALARS[kind]
            at = self.take(struct.calcsize(form), key)
            return struct.unpack_from(form, self.view, at)[0]
        if kind == _STRING:
            return self.text(MAX_STRING, f"the value of {key}", errors="replace")
        if kind == _ARRAY:
            return self.array(key)
        raise _corrupt(self.path, f"has the unknown value type {kind} for {key}")

    def array(self, key: str) -> object:
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING:
            return self.strings(key, count)
        if kind not in SCALARS:
            raise _corrupt(self.path, f"has the unknown element type {kind} in {key}")
        code = SCALARS[kind]
        at = self.take(count * struct.calcsize("<" + code), key)
        if count > KEPT_ELEMENTS:
            return GgufArray(kind, count, at)
        self.keep(count * _NUMBER)
        return struct.unpack_from(f"<{count}{code}", self.view, at)

    def strings(self, key: str, count: int) -> GgufArray:
        if count > MAX_STRINGS or count * 8 > self.size - self.at:
            raise _corrupt(self.path, f"claims {count} strings for {key}, which do not fit its {self.size} bytes")
        start = at = self.at
        view, last, read = self.view, self.size - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                break
            if at + 8 > self.fetched:
                self.fetch(at - _PORTION, at + 8)
            at += 8 + int(read(view, at)[0])
        else:
            if at <= self.size:
                self.at = at
                return GgufArray(_STRING, count, start)
        raise _corrupt(self.path, f"ends within the strings of {key}")

    def check_claims(self, metadata: Mapping[str, object]) -> None:
        """Raise ModelCorrupt for values that llama.cpp answers with an abort of the process."""
        for claim in fatal_claims(metadata):
            raise _corrupt(self.path, claim)
        for key, value in metadata.items():
            if isinstance(value, float) and (not math.isfinite(value) or (value < 0 and key.endswith("epsilon"))):
                raise _corrupt(self.path, f"gives {key} the impossible value {value}")
        tokens = metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, GgufArray) and tokens.kind == _STRING:
            self.check_tokens(tokens, str(metadata.get("tokenizer.ggml.model")))

    def check_tokens(self, tokens: GgufArray, model: str) -> None:
        if tokens.count > MAX_TOKENS:
            raise _corrupt(self.path, f"lists {tokens.count} tokens; {MAX_TOKENS} are possible")
        seen, at, view, read = set(), tokens.offset, self.view, struct.Struct("<Q").unpack_from
        for i in range(tokens.count):
            begin = at + 8
            at = begin + int(read(view, at)[0])
            token = view[begin:at]
            if 0 in token:  # the native loader takes a token for a C string
                token = token[: token.index(0)]
            seen.add(token or b"[EMPTY_%d]" % i)
        if len(seen) < tokens.count:
            raise _corrupt(self.path, f"lists {tokens.count} tokens, of which {tokens.count - len(seen)} are repeated")
        if model == "llama" and not all(b"<0x%02X>" % byte in seen for byte in range(256)):
            raise _corrupt(self.path, "lacks byte tokens, without which its tokenizer cannot write every text")
        if model == "rwkv" and not {b"\n", b"\\n"} & seen:
            raise _corrupt(self.path, "has a tokenizer of the kind rwkv without a token for the end of a line")

    def alignment(self, metadata: Mapping[str, object], offsets: Mapping[str, int]) -> int:
        key = "general.alignment"
        if key not in metadata:
            return 32
        (kind,) = struct.unpack_from("<I", self.view, offsets[key] - 4)
        value = metadata[key]
        if kind != _UINT32 or not isinstance(value, int) or value <= 0 or value & (value - 1):
            raise _corrupt(self.path, f"has an alignment of {value!r}, which is no power of two in 32 bits")
        return value

    def tensor_info(self) -> TensorInfo:
        """Read a tensor's info; the offset still counts from the start of the tensor data."""
        name = self.text(MAX_NAME, "a tensor name")
        n_dims = self.number("I")
        if n_dims > 4:
            raise _corrupt(self.path, f"gives tensor {name!r} {n_dims} dimensions; 4 are allowed")
        shape = tuple(self.number("Q") for _ in range(n_dims))
        kind = self.number("I")
        if kind not in TENSOR_TYPES:
            raise ModelUnsupported(
                f"{self.path} holds tensor {name!r} in the unknown type {kind}.", "Use another quantisation."
            )
        type_name, block, block_bytes = TENSOR_TYPES[kind]
        info = TensorInfo(name, shape, kind, self.number("Q"), 0)
        if info.n_elements == 0 or info.n_elements >= 2**62 or (shape[0] if shape else 1) % block:
            raise _corrupt(self.path, f"gives tensor {name!r} the shape {shape}, impossible for {type_name}")
        return TensorInfo(name, shape, kind, info.offset, info.n_elements // block * block_bytes)

    def placed(self, infos: list[TensorInfo], data_offset: int, alignment: int) -> tuple[TensorInfo, ...]:
        """Return the tensors with file offsets; check that they lie one after the other, padded, within the file."""
        placed, names, due = [], set(), 0
        for t in infos:
            if t.name in names:
                raise _corrupt(self.path, f"names the tensor {t.name!r} twice")
            names.add(t.name)
            if t.offset != due:
                raise _corrupt(self.path, f"puts tensor {t.name!r} at {t.offset}; {due} is where it belongs")
            if data_offset + due + t.nbytes > self.size:
                raise _corrupt(
                    self.path,
                    f"has {self.size} bytes, but tensor {t.name!r} needs {data_offset + due + t.nbytes}",
                )
            placed.append(TensorInfo(t.name, t.shape, t.kind, data_offset + due, t.nbytes))
            due += -(-t.nbytes // alignment) * alignment
        return tuple(placed)
