"""Write copies of models with other metadata, or with their tensors in float32."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path

import gguf
import numpy as np

from edgellm.engine import ModelFile
from edgellm.engine.gguf import writer
from edgellm.engine.gguf.header import F32, TensorInfo
from edgellm.engine.gguf.reader import raw_entries


def copy(source: BufferedReader, t: TensorInfo) -> writer.NewTensor:
    """Return a tensor of an open file as it is."""
    return t, partial(writer.copied, source, t)


def with_entries(source: Path, target: Path, entries: Mapping[str, bytes]) -> Path:
    """Write a copy of a model with `entries` of `writer`, new or in place of those there, and return `target`."""
    file = ModelFile.open(source)
    with source.open("rb") as opened:
        tensors = [copy(opened, t) for t in file.header.tensors]
        values = (raw_entries(file) | dict(entries)).values()
        writer.write(target, writer.portions(file.header, values, tensors))
    return target


def with_sampling(source: Path, target: Path, **wanted: float) -> Path:
    """Write a copy of a model that wants this sampling, by llama.cpp's names such as `temp`, and return
    `target`."""
    keys = {f"general.sampling.{name}": value for name, value in wanted.items()}
    return with_entries(source, target, {key: writer.entry(key, value) for key, value in keys.items()})


def to_f32(source: Path, target: Path) -> None:
    """Write a model, which may be split, as one file with all tensors dequantised to float32, and that file type."""
    file = ModelFile.open(source)
    with ExitStack() as opened:
        sources = [opened.enter_context(path.open("rb")) for path in file.paths]

        def floats(t: TensorInfo) -> Iterator[bytes]:
            data = np.frombuffer(b"".join(map(bytes, writer.copied(sources[t.part], t))), np.uint8)
            rows = data.reshape(t.n_elements // t.shape[0], -1)
            yield gguf.dequantize(rows, gguf.GGMLQuantizationType(t.kind)).astype(np.float32, copy=False).tobytes()

        entries = raw_entries(file)
        if "general.file_type" in entries:
            entries["general.file_type"] = writer.entry("general.file_type", F32)
        all_ = file.header.tensors
        tensors = [(replace(t, kind=F32), partial(floats, t)) for t in all_]
        writer.write(target, writer.portions(file.header, entries.values(), tensors))
