"""The machine's memory that llama.cpp takes beside the buffers that it logs, by the header of a model.

The figures were found by comparing processes, architecture by architecture.
"""

from __future__ import annotations

from collections.abc import Iterator

from edgellm.engine.gguf.reader import TENSOR_TYPES, GgufArray, GgufHeader

PREDICTED_ROWS = 32
"""Rows of logits in one batch, where a model's predictions of a text are wanted: 19 MB at 152,000 tokens."""
_CHECKED_ROWS = 9  # of logits in one batch for each sequence, where drafts are verified
_MODEL = 1_500_000  # bytes of a model's own records
_TOKEN, _MERGE = 180, 112  # bytes of a token with its text and its places in two tables, and of a merge in a table
_NODE = 870  # bytes of a node of a graph: two graphs of a context, and the scheduler's tables
_UNCHANGED = ("F32",)  # types of weights whose products take rows as they are
_HALF = ("F16", "BF16")


def output_rows(n_seq: int, n_batch: int) -> int:
    """Return how many rows of logits a batch of `n_batch` rows has at most, of `n_seq` sequences."""
    return min(n_batch, max(PREDICTED_ROWS, _CHECKED_ROWS * n_seq))


def model_bytes(header: GgufHeader) -> int:
    """Return the bytes of a loaded model's vocabulary, and of its records of tensors."""
    return _MODEL + _TOKEN * _count(header, "tokens") + _MERGE * _count(header, "merges")


def graph_bytes(nodes: int) -> int:
    """Return the bytes in which a context describes graphs of up to `nodes` nodes."""
    return _NODE * nodes


def converted_bytes(header: GgufHeader, n_batch: int) -> int:
    """Return the bytes of the `n_batch` rows that a processor converts before it multiplies them with weights of 16
    bits or fewer: those of the widest product."""
    return int(n_batch * max(_converted_widths(header), default=0))


def _converted_widths(header: GgufHeader) -> Iterator[float]:
    """Yield for each product of a layer the bytes of its input for one token."""
    used = header.metadata.get(f"{header.architecture}.expert_used_count")
    for tensor in header.tensors:
        name, values, _size = TENSOR_TYPES[tensor.kind]
        if name in _UNCHANGED or len(tensor.shape) < 2 or not tensor.name.startswith("blk."):
            continue
        rows = used if "_down_exps" in tensor.name and isinstance(used, int) else 1
        kind = 2.0 if name in _HALF else 292 / 256 if values == 256 else 34 / 32  # as F16, Q8_K or Q8_0
        yield rows * tensor.shape[0] * kind


def _count(header: GgufHeader, what: str) -> int:
    entries = header.metadata.get(f"tokenizer.ggml.{what}")
    if isinstance(entries, GgufArray):
        return entries.count
    return len(entries) if isinstance(entries, tuple) else 0
