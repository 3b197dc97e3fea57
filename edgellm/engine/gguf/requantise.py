"""A model's file written again with its weights in other types, which this machine computes faster.

llama.cpp rearranges the weights of some types when it loads them, so that a pass over several rows costs little more
than over a single row; other types, Q4_1 among them, it leaves as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from edgellm.engine import native
from edgellm.engine.native import lib
from edgellm.errors import ModelUnsupported

FILE_TYPES = MappingProxyType({"Q4_0": 2, "Q5_0": 8, "Q8_0": 7, "IQ4_NL": 25})
"""llama.cpp's numbers of the types that a whole file may have."""
_TENSOR_TYPES = MappingProxyType({"Q4_0": 2, "Q4_K": 12, "Q8_0": 8})


def requantise(
    source: Path, target: Path, kind: str, others: Mapping[str, str] = MappingProxyType({}), *, name: str = ""
) -> None:
    """Write the model in `source` to `target` with its matrices in the type `kind`, one of `FILE_TYPES`; tensors whose
    names a regular expression of `others` finds have the type that it maps to. The file calls itself `name`, if given.

    Raise ModelUnsupported where llama.cpp cannot write it so.
    """
    native.start()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = FILE_TYPES[kind], True, native.available_threads()
    # Each array ends with an empty element.
    types = (lib.llama_model_tensor_override * (len(others) + 1))(
        *(lib.llama_model_tensor_override(pattern.encode(), _TENSOR_TYPES[other]) for pattern, other in others.items())
    )
    text = lib.llama_model_kv_override_value(val_str=name.encode())
    entry = lib.llama_model_kv_override(lib.LLAMA_KV_OVERRIDE_TYPE_STR, b"general.name", text)
    if others:
        params.tt_overrides = types
    if name:
        params.kv_overrides = (lib.llama_model_kv_override * 2)(entry)
    if lib.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.pointer(params)):
        raise ModelUnsupported(f"llama.cpp cannot write {source.name} in {kind}.", "Use the file as it is.")
