"""Joins consecutive shards to one: the result is what `cut` would make of all their layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from io import BufferedReader
from pathlib import Path

from edgellm.engine.gguf.reader import GgufHeader, TensorInfo, check_gguf
from edgellm.engine.gguf.shard import BLOCK, EMBEDDING, HEAD, PER_LAYER, check_cuttable
from edgellm.engine.gguf.writer import NewTensor, concatenated, copied, number, portions, raw_entries, write
from edgellm.errors import ModelUnsupported


def join(parts: Sequence[Path], dst: Path, *, start: bool, head: bool) -> None:
    """Write the shards in `parts`, each made by `cut`, as one, in their order.

    `start`: the first shard begins with the model's first layer; `head`: the last shard ends with its head. `dst`
    appears whole or not at all.

    Raises:
        ModelNotFound, ModelCorrupt: as for `check_gguf`.
        ModelUnsupported: the shards are not of one model, or of a model that cannot be cut.
    """
    write(dst, _joined(parts, start, head))


def _joined(parts: Sequence[Path], start: bool, head: bool) -> Iterator[bytes | memoryview]:
    headers = [check_gguf(path) for path in parts]
    first = headers[0]
    if any((one.architecture, one.alignment, one.version) != (first.architecture, first.alignment, first.version)
           for one in headers):  # fmt: skip
        raise ModelUnsupported("These layers are not of one model.", "Bring them here again: edgellm mesh deploy")
    with ExitStack() as closing:
        sources = [closing.enter_context(path.open("rb")) for path in parts]
        chosen = _tensors(list(zip(sources, headers, strict=True)), start, head)
        tensors = [NewTensor(name, t.shape, t.kind, t.nbytes, partial(copied, file, t)) for name, file, t in chosen]
        embedding = next(t for t in tensors if t.name == EMBEDDING)
        yield from portions(first, _entries(sources, headers, start, embedding.shape[1]).values(), tensors)


def _entries(
    sources: Sequence[BufferedReader], headers: Sequence[GgufHeader], start: bool, rows: int
) -> dict[str, bytes]:  # fmt: skip
    """Return the metadata of the first shard, with the number of layers and the arrays per layer of all shards."""
    first, arch = headers[0], headers[0].architecture
    every = [raw_entries(source, header) for source, header in zip(sources, headers, strict=True)]
    entries = every[0]
    layers = sum(map(check_cuttable, headers))
    entries[f"{arch}.block_count"] = number(f"{arch}.block_count", layers)
    for key in (f"{arch}.{name}" for name in PER_LAYER):
        if isinstance(first.metadata.get(key), tuple):
            entries[key] = concatenated(key, [one[key] for one in every])
    if not start:
        entries[f"{arch}.vocab_size"] = number(f"{arch}.vocab_size", rows)
    return entries


def _tensors(
    files: Sequence[tuple[BufferedReader, GgufHeader]], start: bool, head: bool
) -> list[tuple[str, BufferedReader, TensorInfo]]:
    """Return each tensor under its new name, and the file that it is in.

    A shard that is fed rows has its head under the embedding's name (`engine.gguf.shard`): joined to the model's first
    layer, the head gets its own name back, unless it equals the embedding.
    """
    found: list[tuple[str, BufferedReader, TensorInfo]] = []
    there: set[str] = set()
    offset = 0
    for file, header in files:
        for t in header.tensors:
            if block := BLOCK.fullmatch(t.name):
                found.append((f"blk.{int(block[1]) + offset}.{block[2]}", file, t))
            elif t.name != EMBEDDING and t.name not in there:
                there.add(t.name)
                found.append((t.name, file, t))
        offset += check_cuttable(header)
    ends = [(file, next(t for t in header.tensors if t.name == EMBEDDING)) for file, header in (files[0], files[-1])]
    found.append((EMBEDDING, *ends[-1 if head and not start else 0]))
    if head and start and not _equal(*ends[0], *ends[-1]):
        found.append((HEAD, *ends[-1]))
    return found


def _equal(file: BufferedReader, one: TensorInfo, other_file: BufferedReader, other: TensorInfo) -> bool:
    if (one.shape, one.kind) != (other.shape, other.kind):
        return False
    return all(a == b for a, b in zip(copied(file, one), copied(other_file, other), strict=True))
