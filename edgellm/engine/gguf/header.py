"""A GGUF header's records: tensors by type and place, arrays that are described but not read, and what a header tells
of a model's layers and caches."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

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
ValueType = IntEnum(
    "ValueType", "UINT8 INT8 UINT16 INT16 UINT32 INT32 FLOAT32 BOOL STRING ARRAY UINT64 INT64 FLOAT64", start=0
)
"""GGUF's types of values in the metadata."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of the `struct` module for value types."""
F32, F16 = 0, 1
SPLIT_KEYS = "split."  # prefix of the keys of a split model's parts
_TOKEN, _MERGE = 180, 112  # bytes of a token in llama.cpp's tables, and of a merge
_LAYER = re.compile(r"blk\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata that is described but not read: `count` elements of GGUF value type `kind`."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's type and place. `shape` is in GGUF's order (columns first), `offset` counts from the start of the
    file, `part` is the number of the file in a split model, from 0."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int = 0
    part: int = 0

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        _name, block, size = TENSOR_TYPES[self.kind]
        return self.n_elements // block * size

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
    def n_params(self) -> int:
        """The number of weights."""
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def weight_bytes(self) -> int:
        """The bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def is_f32(self) -> bool:
        """True if every weight is float32."""
        return all(tensor.kind == F32 for tensor in self.tensors)

    @property
    def mtp_layers(self) -> int:
        """The number of layers at the end that predict further tokens (MTP), and compute no text; mostly 0."""
        return self.number("nextn_predict_layers")

    @property
    def text_layers(self) -> int:
        """The number of layers that compute the text; 0 where the header does not say."""
        return max(0, self.number("block_count") - self.mtp_layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers that have attention, from 0: all of a transformer's, some of a hybrid model's, or none."""
        layers = range(self.text_layers)
        heads, kv_heads = (
            self.metadata.get(f"{self.architecture}.attention.{name}") for name in ("head_count", "head_count_kv")
        )
        if heads in (None, 0):
            return ()
        if isinstance(kv_heads, tuple) and 0 in kv_heads:
            return tuple(layer for layer, heads in zip(layers, kv_heads, strict=False) if heads)
        every = max(1, self.number("full_attention_interval", 1))
        return tuple(layer for layer in layers if (layer + 1) % every == 0)

    @property
    def cache_bytes_per_token(self) -> int:
        """At most how many bytes of keys and values a token takes, in 16 bits; 0 where the header does not say."""
        heads = self.number("attention.head_count")
        if not heads:
            return 0
        size = self.number("embedding_length") // heads
        width = self.number("attention.key_length", size) + self.number("attention.value_length", size)
        return 2 * len(self.attention_layers) * self.number("attention.head_count_kv", heads) * width

    @property
    def recurrent_state_bytes(self) -> int:
        """The bytes of the recurrent layers' states of one sequence, as llama.cpp keeps them in 32 bits; 0 where there
        are none, or the header does not say."""
        width, heads = self.number("embedding_length"), self.number("attention.head_count")
        read = max(0, self.number("ssm.conv_kernel") - 1)
        if head := self.number("wkv.head_size"):
            state = width * (head + (self.number("token_shift_count") or 2))
        elif kernel := self.number("shortconv.l_cache"):
            state = width * (kernel - 1)
        elif head := self.number("kda.head_dim"):
            state = heads * head * (head + 3 * (read or 3))
        elif self.architecture == "minimax-01":  # lightning attention: each head has a state
            state = heads * (self.number("attention.key_length") or width // max(1, heads)) ** 2
        else:
            inner, size = self.number("ssm.inner_size"), self.number("ssm.state_size")
            state = inner * size + read * (inner + 2 * self.number("ssm.group_count") * size)
        return 4 * self._recurrent_layers * state

    @property
    def _recurrent_layers(self) -> int:
        """The number of layers with a recurrent state: the layers without attention, or all layers where each has both;
        layers of a feed-forward part alone do not count."""
        count, with_attention = self.text_layers, self.attention_layers
        if len(with_attention) in (0, count):
            return count
        wide = self.metadata.get(f"{self.architecture}.feed_forward_length")
        alone = wide if isinstance(wide, tuple) and 0 in wide else ()
        return sum(layer not in with_attention and not any(alone[layer : layer + 1]) for layer in range(count))

    @property
    def vocabulary_bytes(self) -> int:
        """The bytes of a loaded model's vocabulary."""

        def count(what: str) -> int:
            entries = self.metadata.get(f"tokenizer.ggml.{what}", ())
            return (
                entries.count if isinstance(entries, GgufArray) else len(entries) if isinstance(entries, tuple) else 0
            )

        return _TOKEN * count("tokens") + _MERGE * count("merges")

    @property
    def main_type(self) -> tuple[str, float] | None:
        """The tensor type of most weights, and its share of all weights; None without tensors."""
        weights = Counter[str]()
        for tensor in self.tensors:
            weights[TENSOR_TYPES[tensor.kind][0]] += tensor.n_elements
        (name, most), *_ = weights.most_common(1) or [("", 0)]
        return (name, most / weights.total()) if most else None

    @property
    def quantisation(self) -> str | None:
        """The file's type, such as Q4_K_M, or else its main tensor type; None without tensors."""
        from gguf import LlamaFileType  # takes a while to import

        kinds = {int(kind): kind.name.partition("_")[2] for kind in LlamaFileType}  # MOSTLY_Q4_K_M, ALL_F32
        said = self.metadata.get("general.file_type")
        return (isinstance(said, int) and kinds.get(said)) or (self.main_type and self.main_type[0])

    def sizes(self, layers: int) -> tuple[list[int], int, int]:
        """Return the bytes of each of the first `layers` layers, of the tensors before the layers, and of those behind
        (the last norm and the head). Further layers do not count."""
        found, before, behind = [0] * (layers + 1), 0, 0
        for tensor in self.tensors:
            if (at := tensor.layer) is not None:
                found[min(at, layers)] += tensor.nbytes
            elif tensor.name.startswith("output"):
                behind += tensor.nbytes
            else:
                before += tensor.nbytes
        return found[:layers], before, behind

    def tensor(self, *names: str) -> TensorInfo | None:
        """Return the tensor with the first of these names that exists; None where none does."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        return next((by_name[name] for name in names if name in by_name), None)
