"""A range of a model's layers as a model of its own, which stock llama.cpp loads.

A shard that begins at layer 0 takes token ids. Every other shard takes the output rows of the layer before it
(`Context.decode_embeddings`) and carries no vocabulary. A shard with a head ends in logits, whatever its last layer;
a shard without a head is read with `Capture(outputs=..., stop_after=...)`. A chain of all shards computes the same as
the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from io import BufferedReader
from pathlib import Path

from edgellm.engine.gguf.cuttable import (
    PATTERN,
    PER_LAYER,
    SECTIONS,
    check_cuttable,
    count_is_safe,
    cut_points,
    part_metadata,
    query_factor,
    wants_head,
    window_pattern,
)
from edgellm.engine.gguf.reader import SPLIT_KEYS, TENSOR_TYPES, GgufHeader, ModelFile, TensorInfo
from edgellm.engine.gguf.writer import (
    NewTensor,
    copied,
    flags,
    integers,
    multiplied,
    number,
    picked,
    portions,
    raw_entries,
    text,
    write,
    zeros,
)
from edgellm.errors import InvalidOption, ModelCorrupt

EMBEDDING, HEAD, _HEAD_BIAS = "token_embd.weight", "output.weight", "output.bias"
BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
_FREQUENCIES, _QUERY_NORM = "rope_freqs.weight", "attn_q_norm.weight"
_SLIVER = 32  # rows in the place of an embedding that is never read
_SMALL = (41, 42, 2)  # Q1_0, Q2_0, Q4_0: types of few bits in small blocks


def cut(src: Path, dst: Path, first: int, last: int, *, head: bool) -> None:
    """Write the layers `first` to `last` of `src`, both included and counted from 0, as a model of its own.

    With `head` the final norm and the head follow layer `last`, even if it is not the model's last layer (an early exit
    needs that). Tensors are copied byte for byte, a mebibyte at a time. `dst` appears whole or not at all.
    A split model gives the same bytes as the file that it was split from.

    Raises:
        InvalidOption: the model has no such layers.
        ModelNotFound, ModelCorrupt: as for `ModelFile.open`.
        ModelUnsupported: the architecture is not known to be safe to cut.
    """
    write(dst, cut_bytes(ModelFile.open(src), first, last, head=head))


def cut_bytes(src: ModelFile, first: int, last: int, *, head: bool) -> Iterator[bytes | memoryview]:
    """Yield the bytes that `cut` writes, in portions of a mebibyte at most, each valid until the next is asked for.

    Errors are raised at the first portion.
    """
    header = src.header
    n_layer = check_cuttable(header)
    if not 0 <= first <= last < n_layer:
        raise InvalidOption(
            f"{src.path.name} cannot be cut from layer {first} to {last}.", f"Its layers run from 0 to {n_layer - 1}."
        )
    starts = cut_points(header)
    if first not in starts or last + 1 not in (*starts, n_layer):
        raise InvalidOption(
            f"{src.path.name} cannot be cut from layer {first} to {last}: its layers differ by their number.",
            f"Begin with one of the layers {', '.join(map(str, starts))}, and end before one of them.",
        )
    if not count_is_safe(header, last + 1 - first):
        raise InvalidOption(
            f"{src.path.name} cannot be cut from layer {first} to {last}: llama.cpp takes {last + 1 - first} layers for"
            " another model.", "Cut fewer layers.",
        )  # fmt: skip
    with ExitStack() as opened:
        sources = [opened.enter_context(path.open("rb")) for path in src.paths]
        tensors = [part.written(sources) for part in _tensors(header, first, last, head)]
        entries = _entries(sources[0], header, first, last)
        if len(sources) > 1:
            entries = {key: raw for key, raw in entries.items() if not key.startswith(SPLIT_KEYS)}
        if first > 0:
            rows = next(t.shape[1] for t in tensors if t.name == EMBEDDING)
            entries |= _no_vocabulary(header, rows)
        yield from portions(header, entries.values(), tensors)


def _entries(source: BufferedReader, header: GgufHeader, first: int, last: int) -> dict[str, bytes]:
    entries, arch, part = raw_entries(source, header), header.architecture, part_metadata(header, first, last)
    entries |= {key: number(key, value) for key, value in ((f"{arch}.{k}", v) for k, v in part.numbers.items())}
    for key in (f"{arch}.{name}" for name in sorted(PER_LAYER)):
        if isinstance(header.metadata.get(key), tuple):
            entries[key] = picked(key, entries[key], part.layers)
    if part.windows is not None:
        entries[f"{arch}.{PATTERN}"] = flags(f"{arch}.{PATTERN}", part.windows)
    if part.sections is not None:
        entries[f"{arch}.{SECTIONS}"] = integers(f"{arch}.{SECTIONS}", part.sections)
    if first > 0:
        return {key: raw for key, raw in entries.items() if not key.startswith("tokenizer.")}
    return entries


def _no_vocabulary(header: GgufHeader, rows: int) -> dict[str, bytes]:
    size = f"{header.architecture}.vocab_size"
    return {size: number(size, rows), "tokenizer.ggml.model": text("tokenizer.ggml.model", "no_vocab")}


def _tensors(header: GgufHeader, first: int, last: int, head: bool) -> list[_PartTensor]:
    """Return each tensor of the shard under its new name, in the file's order.

    llama.cpp wants an embedding in every file, and mostly takes it as the head where there is no head. So a shard that
    is fed rows holds the head under the embedding's name, or, without a head, only a sliver of the embedding. Where
    llama.cpp wants both, the unused tensor is a sliver, too, or blank if it must have a row for each token.
    """
    found = {t.name: t for t in header.tensors}
    if EMBEDDING not in found or len(found[EMBEDDING].shape) != 2:
        raise ModelCorrupt(f"The file has no matrix {EMBEDDING}.", "Fetch it again.")
    windows, both = window_pattern(header), wants_head(header) and HEAD in found
    unused_head, factor = _sliver if first > 0 else _blank, query_factor(header, last + 1 - first)
    chosen = []
    for t in header.tensors:
        part = _PartTensor(t.name, t)
        if block := BLOCK.fullmatch(t.name):
            layer = int(block[1])
            if not first <= layer <= last:
                continue
            part = _PartTensor(f"blk.{layer - first}.{block[2]}", t, factor=factor if block[2] == _QUERY_NORM else 1.0)
        elif t.name in (HEAD, _HEAD_BIAS) and not head:
            if not both:
                continue
            part = unused_head(t)
        elif t.name == HEAD and first > 0 and not both:
            continue
        elif t.name == _FREQUENCIES and windows is not None and all(windows[first : last + 1]):
            continue  # only layers without a window use it, and llama.cpp refuses unused tensors
        elif t.name == EMBEDDING and first > 0 and not head:
            part = _sliver(t)
        elif t.name == EMBEDDING and first > 0:
            part = _blank(t) if both else _PartTensor(EMBEDDING, found.get(HEAD, t))
        chosen.append(part)
    return chosen


@dataclass(frozen=True, slots=True)
class _PartTensor:
    """A tensor of a shard: the beginning of `source` under a new name, in float32 multiplied by `factor`; zeros if
    `blank`."""

    name: str
    source: TensorInfo
    blank: bool = False
    factor: float = 1.0

    def written(self, files: Sequence[BufferedReader]) -> NewTensor:
        t = self.source
        data = partial(zeros, t.nbytes) if self.blank else partial(copied, files[t.part], t)
        if self.factor != 1.0:
            data = partial(multiplied, files[t.part], t, self.factor)
        return NewTensor(self.name, t.shape, t.kind, t.nbytes, data)


def _sliver(t: TensorInfo) -> _PartTensor:
    """Return the first rows of a matrix, or numbers of a vector."""
    rows = t.shape[-1]
    kept = min(_SLIVER, rows)
    return _PartTensor(t.name, replace(t, shape=(*t.shape[:-1], kept), nbytes=t.nbytes // rows * kept))


def _blank(t: TensorInfo) -> _PartTensor:
    """Return zeros for an unused tensor, in the smallest fitting type; float32 stays, as a model counts as float32
    only if all its tensors are."""
    columns, kind = t.shape[0], t.kind
    if len(t.shape) > 1 and TENSOR_TYPES[kind][0] != "F32":
        fitting = [one for one in (kind, *_SMALL) if columns % TENSOR_TYPES[one][1] == 0]
        kind = min(fitting, key=lambda one: TENSOR_TYPES[one][2] / TENSOR_TYPES[one][1])
    _name, block, size = TENSOR_TYPES[kind]
    return _PartTensor(t.name, replace(t, kind=kind, nbytes=t.n_elements // block * size), blank=True)
