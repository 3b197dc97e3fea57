"""A range of a model's layers as a model of its own, which stock llama.cpp loads.

A shard that begins at layer 0 takes token ids. Every other shard takes the output rows of the layer before it
(`Context.decode_embeddings`) and carries no vocabulary. A shard with a head ends in logits, whichever its last layer
is; a shard without a head is read with `Capture(outputs=..., stop_after=...)`. A chain of all shards computes what the
whole model does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from io import BufferedReader
from pathlib import Path

from edgellm.engine.gguf.reader import SPLIT_KEYS, GgufArray, GgufHeader, ModelFile, TensorInfo
from edgellm.engine.gguf.writer import (
    NewTensor,
    copied,
    number,
    portions,
    raw_entries,
    sliced,
    text,
    write,
)
from edgellm.errors import InvalidOption, ModelCorrupt, ModelUnsupported

# Architectures whose blocks can be renumbered: all of one kind, nothing in llama.cpp's graph asks which number a block
# has, rows that are fed in place of tokens are not scaled, and a file without output.weight uses token_embd as head.
# Not among them for one of these reasons: gemma2, gemma3, gpt-oss, cohere2 (window patterns), llama4, smollm3 (layers
# without positions), granite, minicpm (scaled rows), deepseek2, glm4moe (dense layers first), all recurrent and hybrid.
SAFE = frozenset({"llama", "qwen2", "qwen3", "qwen3moe"})

PER_LAYER = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_BY_LAYER = (  # where one of these is set, a block's number matters all the same
    ("attention.sliding_window", "its attention slides over a window in some layers"),
    ("attention.sliding_window_pattern", "its attention slides over a window in some layers"),
    ("nextn_predict_layers", "its last layers predict further tokens"),
    ("leading_dense_block_count", "its first layers differ from the others"),
)
EMBEDDING, HEAD, _HEAD_BIAS = "token_embd.weight", "output.weight", "output.bias"
BLOCK = re.compile(r"blk\.(\d{1,9})\.(.+)")
_SLIVER = 32  # rows in the place of an embedding that is never read


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

    Raises as `cut`, at the first portion.
    """
    header = src.header
    n_layer = check_cuttable(header)
    if not 0 <= first <= last < n_layer:
        raise InvalidOption(
            f"{src.path.name} cannot be cut from layer {first} to {last}.", f"Its layers run from 0 to {n_layer - 1}."
        )
    with ExitStack() as opened:
        sources = [opened.enter_context(path.open("rb")) for path in src.paths]
        tensors = [
            NewTensor(name, t.shape, t.kind, t.nbytes, partial(copied, sources[t.part], t))
            for name, t in _tensors(header, first, last, head)
        ]
        entries = _entries(sources[0], header, first, last)
        if len(sources) > 1:
            entries = {key: raw for key, raw in entries.items() if not key.startswith(SPLIT_KEYS)}
        if first > 0:
            rows = next(t.shape[1] for t in tensors if t.name == EMBEDDING)
            entries |= _no_vocabulary(header, rows)
        yield from portions(header, entries.values(), tensors)


def check_cuttable(header: GgufHeader) -> int:
    """Check that `cut` can cut a model, and return its number of layers.

    Raises:
        ModelUnsupported: the architecture is not known to be safe to cut.
        ModelCorrupt: the number of layers is missing.
    """
    arch = header.architecture
    if arch not in SAFE:
        raise ModelUnsupported(
            f"Models of the architecture {arch!r} are not known to be safe to cut into layers.",
            f"Use a model of one of these: {', '.join(sorted(SAFE))}.",
        )
    for key, why in _BY_LAYER:
        if header.metadata.get(f"{arch}.{key}"):
            raise ModelUnsupported(f"This {arch} model cannot be cut into layers: {why}.", "Use it whole.")
    known = {f"{arch}.{key}" for key in PER_LAYER}
    for key, value in header.metadata.items():
        if key.startswith(f"{arch}.") and isinstance(value, (tuple, GgufArray)) and key not in known:
            raise ModelUnsupported(
                f"This {arch} model has the array {key}, which may be one value per layer.", "Use it whole."
            )
    layers = header.metadata.get(f"{arch}.block_count")
    if not isinstance(layers, int):
        raise ModelCorrupt("The file does not say how many layers it has.", "Fetch it again.")
    return layers


def _entries(source: BufferedReader, header: GgufHeader, first: int, last: int) -> dict[str, bytes]:
    entries, arch = raw_entries(source, header), header.architecture
    entries[f"{arch}.block_count"] = number(f"{arch}.block_count", last - first + 1)
    for key in (f"{arch}.{name}" for name in PER_LAYER):
        if isinstance(header.metadata.get(key), tuple):
            entries[key] = sliced(key, entries[key], first, last + 1)
    if first > 0:
        return {key: raw for key, raw in entries.items() if not key.startswith("tokenizer.")}
    return entries


def _no_vocabulary(header: GgufHeader, rows: int) -> dict[str, bytes]:
    size = f"{header.architecture}.vocab_size"
    return {size: number(size, rows), "tokenizer.ggml.model": text("tokenizer.ggml.model", "no_vocab")}


def _tensors(header: GgufHeader, first: int, last: int, head: bool) -> list[tuple[str, TensorInfo]]:
    """Return each tensor of the shard under its new name, in the file's order.

    llama.cpp wants an embedding in every file, and takes it as the head where there is no other. So a shard that is
    fed rows holds the head under the embedding's name, or only a sliver of the embedding where it has no head.
    """
    found = {t.name: t for t in header.tensors}
    if EMBEDDING not in found or len(found[EMBEDDING].shape) != 2:
        raise ModelCorrupt(f"The file has no matrix {EMBEDDING}.", "Fetch it again.")
    chosen = []
    for t in header.tensors:
        name = t.name
        if block := BLOCK.fullmatch(name):
            layer = int(block[1])
            if not first <= layer <= last:
                continue
            name = f"blk.{layer - first}.{block[2]}"
        elif name in (HEAD, _HEAD_BIAS):
            if not head or (name == HEAD and first > 0):
                continue
        elif name == EMBEDDING and first > 0:
            t = found.get(HEAD, t) if head else _sliver(t)  # noqa: PLW2901
        chosen.append((name, t))
    return chosen


def _sliver(embedding: TensorInfo) -> TensorInfo:
    columns, rows = embedding.shape
    kept = min(_SLIVER, rows)
    return replace(embedding, shape=(columns, kept), nbytes=embedding.nbytes // rows * kept)
