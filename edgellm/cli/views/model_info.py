"""Facts from the header of a model file, and its hash."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any


def model_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a GGUF file in the order of printing. Raises what `check_gguf` raises."""
    from edgellm.engine.gguf.reader import GgufArray, check_gguf
    from edgellm.storage.model_names import quant_of

    header = check_gguf(path)
    meta, family = header.metadata, header.architecture
    tokens = meta.get("tokenizer.ggml.tokens")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "path": str(path),
        "size": header.file_size,
        "sha256": digest,
        "name": meta.get("general.name"),
        "architecture": family,
        "parameters": sum(tensor.n_elements for tensor in header.tensors),
        "layers": meta.get(f"{family}.block_count"),
        "width": meta.get(f"{family}.embedding_length"),
        "trained_context": meta.get(f"{family}.context_length"),
        "vocabulary": tokens.count if isinstance(tokens, GgufArray) else None,
        "quantisation": _most_used(header) or quant_of(path.name),
        "chat_template": "tokenizer.chat_template" in meta,
        "license": meta.get("general.license"),
        "gguf_version": header.version,
    }


def _most_used(header: Any) -> str | None:
    """Return the tensor type with the most bytes."""
    from edgellm.engine.gguf.reader import TENSOR_TYPES

    totals: dict[str, int] = {}
    for tensor in header.tensors:
        name = TENSOR_TYPES[tensor.kind][0]
        totals[name] = totals.get(name, 0) + tensor.nbytes
    return max(totals, key=lambda name: totals[name]) if totals else None
