"""Split a GGUF at tensor boundaries, as `llama-gguf-split` does: all metadata go into the first part."""

import struct
from itertools import pairwise
from pathlib import Path

from edgellm.engine.gguf.reader import ModelFile, raw_entries
from edgellm.engine.gguf.writer import portions, write
from testkit.gguf.changed import copy

_UINT16, _INT32 = 2, 5  # GGUF value types of the keys that llama.cpp reads


def split(src: Path, folder: Path, parts: int, *, empty_first: bool = False) -> Path:
    """Write `src` in `parts` files into `folder` and return the first one.

    Each part has the same number of tensors; with `empty_first` the first one has none, and only the metadata.
    """
    file = ModelFile.open(src)
    header = file.header
    full = parts - empty_first
    bounds = [0] * empty_first + [len(header.tensors) * number // full for number in range(full + 1)]
    paths = [folder / f"{src.stem}-{number:05d}-of-{parts:05d}.gguf" for number in range(1, parts + 1)]
    with src.open("rb") as source:
        metadata = list(raw_entries(file).values())
        for number, (path, (start, stop)) in enumerate(zip(paths, pairwise(bounds), strict=True)):
            entries = [
                *(metadata if number == 0 else ()), entry("split.no", number), entry("split.count", parts),
                entry("split.tensors.count", len(header.tensors), _INT32),
            ]  # fmt: skip
            tensors = [copy(source, t) for t in header.tensors[start:stop]]
            write(path, portions(header, entries, tensors))
    return paths[0]


def entry(key: str, value: int, kind: int = _UINT16) -> bytes:
    """Return a metadata entry with a number of 16 bits, or of the GGUF value type `kind`."""
    name = key.encode()
    return struct.pack("<Q", len(name)) + name + struct.pack("<IH" if kind == _UINT16 else "<Ii", kind, value)
