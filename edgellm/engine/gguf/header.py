"""A GGUF header's records: tensors by type and place, and arrays that are described but not read."""

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
_LAYER = re.compile(r"blk\.(\d{1,9})\.")


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata that is described but not read: `count` elements of GGUF value type `kind`."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place. `shape` is in GGUF's order (columns first), `offset` counts from the start of the file, `part`
    is the number of the file in a split model, from 0."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int
    part: int = 0

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)

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
