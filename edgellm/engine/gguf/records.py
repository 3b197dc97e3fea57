"""The content of a GGUF's header, once it has been checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GgufArray:
    """An array in the metadata that is described but not read: `count` elements of GGUF value type `kind`."""

    kind: int
    count: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's place. `shape` is in GGUF's order (columns first), `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int

    @property
    def n_elements(self) -> int:
        n = 1
        for dim in self.shape:
            n *= dim
        return n


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

    def tensor(self, *names: str) -> TensorInfo | None:
        """Return the tensor with the first of these names that exists; None where none does."""
        by_name = {tensor.name: tensor for tensor in self.tensors}
        return next((by_name[name] for name in names if name in by_name), None)
