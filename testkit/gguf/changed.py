"""Write copies of models with other metadata, their tensors byte for byte."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edgellm.engine import check_gguf
from edgellm.engine.gguf import writer
from edgellm.engine.gguf.reader import raw_entries


def with_entries(source: Path, target: Path, entries: Mapping[str, bytes]) -> Path:
    """Write a copy of a model with `entries` of `writer`, new or in place of those there, and return `target`."""
    header = check_gguf(source)
    with source.open("rb") as opened:
        tensors = [writer.NewTensor.copy(opened, t) for t in header.tensors]
        values = (raw_entries([opened], header) | dict(entries)).values()
        writer.write(target, writer.portions(header, values, tensors))
    return target


def with_sampling(source: Path, target: Path, **wanted: float) -> Path:
    """Write a copy of a model that wants this sampling, by llama.cpp's names such as `temp`, and return
    `target`."""
    keys = {f"general.sampling.{name}": value for name, value in wanted.items()}
    return with_entries(source, target, {key: writer.entry(key, value) for key, value in keys.items()})
