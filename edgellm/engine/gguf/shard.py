"""A range of a model's layers as a model of its own, which stock llama.cpp loads.

A shard that begins at layer 0 takes token ids. Every other shard takes the output rows of the layer before it
(`Context.decode_embeddings`) and carries no vocabulary. A shard with a head ends in logits, whatever its last layer;
a shard without a head is read with `Capture(outputs=..., stop_after=...)`. A chain of all shards computes the same as
the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from edgellm.engine.gguf.reader import TENSOR_TYPES, GgufHeader, ModelFile, TensorInfo, raw_entries
from edgellm.engine.gguf.writer import NewTensor, copied, entry, multiplied, picked, portions, write, zeros
from edgellm.errors import InvalidOption, ModelCorrupt

EMBEDDING, HEAD, _HEAD_BIAS = "token_embd.weight", "output.weight", "output.bias"
BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
SLIVER = 32
"""Rows in the place of an embedding that is never read."""
_BLANK = -1  # offset of a tensor of zeros
_SMALL = (41, 42, 2)  # Q1_0, Q2_0, Q4_0: types of few bits in small blocks


def cut(src: Path, dst: Path, first: int, last: int, *, head: bool) -> None:
    """Write the layers `first` to `last` of `src`, both included and counted from 0, as a model of its own.

    With `head` the final norm and the head follow layer `last`, even if it is not the model's last layer (an early exit
    needs that). `dst` appears whole or not at all. A split model gives the same bytes as the file that it was split
    from.

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
    n_layer, starts = check_cuttable(header), cut_points(header)
    what = f"{src.path.name} cannot be cut from layer {first} to {last}"
    if not 0 <= first <= last < n_layer:
        raise InvalidOption(f"{what}.", f"Its layers run from 0 to {n_layer - 1}.")
    if first not in starts or last + 1 not in (*starts, n_layer):
        raise InvalidOption(
            f"{what}: its layers differ by their number.",
            f"Begin with one of the layers {', '.join(map(str, starts))}, and end before one of them.",
        )
    if not count_is_safe(header, last + 1 - first):
        why = f"llama.cpp takes {last + 1 - first} layers for another model"
        raise InvalidOption(f"{what}: {why}.", "Cut fewer layers.")
    with ExitStack() as opened:
        sources = [opened.enter_context(path.open("rb")) for path in src.paths]
        tensors = list(_tensors(sources, header, first, last, head))
        yield from portions(header, _entries(sources, header, first, last, tensors), tensors)


def _entries(
    sources: Sequence[BufferedReader], header: GgufHeader, first: int, last: int, tensors: Sequence[NewTensor]
) -> list[bytes]:
    arch, part, entries = header.architecture, part_metadata(header, first, last), raw_entries(sources, header)
    for key in (f"{arch}.{name}" for name in sorted(PER_LAYER)):
        if isinstance(header.metadata.get(key), tuple):
            entries[key] = picked(key, entries[key], part.layers)
    changed: dict[str, str | int | Sequence[int]] = {f"{arch}.{key}": value for key, value in part.numbers.items()}
    if part.windows is not None:
        changed[f"{arch}.{PATTERN}"] = part.windows
    if part.sections is not None:
        changed[f"{arch}.{SECTIONS}"] = part.sections
    if first > 0:
        entries = {key: raw for key, raw in entries.items() if not key.startswith("tokenizer.")}
        changed[f"{arch}.vocab_size"] = next(t.shape[1] for t in tensors if t.name == EMBEDDING)
        changed["tokenizer.ggml.model"] = "no_vocab"
    return list((entries | {key: entry(key, value) for key, value in changed.items()}).values())


def _tensors(
    sources: Sequence[BufferedReader], header: GgufHeader, first: int, last: int, head: bool
) -> Iterator[NewTensor]:
    """Yield each tensor of the shard under its new name, in the file's order.

    llama.cpp wants an embedding in every file, and mostly takes it as the head where there is no head. So a shard that
    is fed rows holds the head under the embedding's name, or, without a head, only a sliver of the embedding. Where
    llama.cpp wants both, the unused tensor is a sliver, too, or blank if it must have a row for each token.
    """
    found = {t.name: t for t in header.tensors}
    if EMBEDDING not in found or len(found[EMBEDDING].shape) != 2:
        raise ModelCorrupt(f"The file has no matrix {EMBEDDING}.", "Fetch it again.")
    windows, both = window_pattern(header), wants_head(header) and HEAD in found
    factor = query_factor(header, last + 1 - first)
    for t in header.tensors:
        new = t
        if block := BLOCK.fullmatch(t.name):
            new = replace(t, name=f"blk.{int(block[1]) - first}.{block[2]}")
        elif t.name in (HEAD, _HEAD_BIAS) and not head:
            new = _sliver(t) if first > 0 else _blank(t)
        elif t.name == EMBEDDING and first > 0 and head:
            new = _blank(t) if both else replace(found.get(HEAD, t), name=EMBEDDING)
        elif t.name == EMBEDDING and first > 0:
            new = _sliver(t)
        unread = t.name == "rope_freqs.weight" and windows is not None and all(windows[first : last + 1])
        absent = (t.name == HEAD and first > 0) or (t.name in (HEAD, _HEAD_BIAS) and not head)
        if (block and not first <= int(block[1]) <= last) or unread or (absent and not both):
            continue  # rope_freqs: only layers without a window use it, and llama.cpp refuses unused tensors
        scaled = block is not None and block[2] == "attn_q_norm.weight"
        yield _written(new, sources[new.part], factor if scaled else 1.0)


def _written(t: TensorInfo, source: BufferedReader, factor: float) -> NewTensor:
    data: Callable[[], Iterable[bytes | memoryview]] = partial(copied, source, t)
    if t.offset == _BLANK:
        data = partial(zeros, t.nbytes)
    elif factor != 1.0:
        data = partial(multiplied, source, t, factor)
    return NewTensor(t.name, t.shape, t.kind, t.nbytes, data)


def _sliver(t: TensorInfo) -> TensorInfo:
    """Return the first rows of a matrix, or numbers of a vector."""
    rows = t.shape[-1]
    kept = min(SLIVER, rows)
    return replace(t, shape=(*t.shape[:-1], kept), nbytes=t.nbytes // rows * kept)


def _blank(t: TensorInfo) -> TensorInfo:
    """Return zeros for an unused tensor, in the smallest fitting type; float32 stays, as a model counts as float32
    only if all its tensors are."""
    kind = t.kind
    if len(t.shape) > 1 and TENSOR_TYPES[kind][0] != "F32":
        fitting = [one for one in (kind, *_SMALL) if t.shape[0] % TENSOR_TYPES[one][1] == 0]
        kind = min(fitting, key=lambda one: TENSOR_TYPES[one][2] / TENSOR_TYPES[one][1])
    _name, block, size = TENSOR_TYPES[kind]
    return replace(t, kind=kind, nbytes=t.n_elements // block * size, offset=_BLANK)
