"""Files over which llama.cpp ends the process, as far as a GGUF header shows it.

The rules cover tensor types by role, and hyperparameters by the assertions of `llama_model::load_hparams`. They refuse
what is known to be fatal and let pass what is unknown, which `engine.trial.probe` tries. Read from the source of the
llama.cpp in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from edgellm.engine.gguf.records import GgufArray, TensorInfo
from edgellm.engine.gguf.tensor_types import TENSOR_TYPES

MAX_LAYERS = 512
MAX_EXPERTS = 512
MAX_TOKENS = 2**20
_ROPE_SCALING = ("none", "linear", "yarn", "longrope")
_POOLING = range(-1, 5)
_32_BITS = (4, 5, 6)  # GGUF value types: UINT32, INT32, FLOAT32
_STRING = 8
_F32 = 0

# For these types ggml has no product with a row of activations: the pointer that it would call is null.
_NO_PRODUCT = frozenset({"Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64"})
# Indices, looked up or cast, never multiplied.
_INDICES = re.compile(r"d2t|masked_embd_ordering(\.weight)?|blk\.\d+\.ffn_gate_tid2eid\.weight")
# Operands of ggml_add, ggml_mul, ggml_rope, ggml_ssm_conv and ggml_ssm_scan beside float32 activations.
_ELEMENTWISE = re.compile(
    r".*\.(bias|scale|input_scale)|(.*[._])?(e|h)?norm(_?\d|_exps|_key|_query|_conv)?\.weight"
    r"|(.*\.)?rope_(freqs|factors_long|factors_short)(\.weight)?"
    r"|(.*\.)?(attn_sinks|ssm_conv1d(_[qkv])?|shortconv\.conv|ssm_a|ssm_d|layer_output_scale)(\.weight)?"
)


def is_index(name: str) -> bool:
    """Return whether a tensor holds indices into others, which decide which memory is read."""
    return bool(_INDICES.fullmatch(name))


def fatal_claims(metadata: Mapping[str, object]) -> Iterator[str]:
    """Yield a predicate for each hyperparameter that would end the process, such as "claims 10000 experts"."""
    arch = metadata.get("general.architecture")

    def number(key: str) -> int:
        """Return an integer, or the largest value of an array with one integer per layer; -1 for anything else."""
        value = metadata.get(f"{arch}.{key}", 0)
        value = max(value, default=0) if isinstance(value, tuple) else value
        return value if isinstance(value, int) else -1

    layers = metadata.get(f"{arch}.block_count", 1)
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        yield f"claims {layers!r} layers; 1 to {MAX_LAYERS} are possible"
    elif not 0 <= number("nextn_predict_layers") <= layers:
        yield f"claims {number('nextn_predict_layers')} layers that predict further tokens, of {layers}"
    experts, used = number("expert_count"), number("expert_used_count")
    groups, groups_used = number("expert_group_count"), number("expert_group_used_count")
    if not 0 <= experts <= MAX_EXPERTS:
        yield f"claims {experts} experts; {MAX_EXPERTS} are possible"
    dense = str(arch).startswith("hunyuan") and experts <= 1  # there one expert means none
    if not dense and not (0 <= used <= experts and (used > 0) == (experts > 0)):
        yield f"claims to use {used} of {experts} experts"
    if groups and not 0 <= groups < max(1, experts):
        yield f"claims {groups} groups of {experts} experts"
    elif groups > 1 and (experts % groups or not 0 < groups_used < groups):
        yield f"claims to use {groups_used} of {groups} groups of {experts} experts"
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in _ROPE_SCALING:
        yield f"names the unknown rope.scaling.type {scaling!r}; there are {', '.join(_ROPE_SCALING)}"
    if number("pooling_type") not in _POOLING:
        yield f"names the unknown pooling_type {number('pooling_type')}"
    if not 0 <= number("vocab_size") <= MAX_TOKENS:
        yield f"claims a vocabulary of {number('vocab_size')} tokens; {MAX_TOKENS} are possible"
    for key, kinds in (("scores", _32_BITS), ("token_type", _32_BITS), ("merges", (_STRING,))):
        yield from _fatal_array(metadata, f"tokenizer.ggml.{key}", kinds)


def _fatal_array(metadata: Mapping[str, object], key: str, kinds: Sequence[int]) -> Iterator[str]:
    value = metadata.get(key)
    if value is not None and not isinstance(value, (tuple, GgufArray)):
        yield f"gives {key} the value {str(value)[:40]!r}, which is no array"
    if isinstance(value, GgufArray) and value.kind not in kinds:
        yield f"gives {key} elements of the GGUF type {value.kind}"


def fatal_tensors(tensors: Sequence[TensorInfo]) -> Iterator[str]:
    """Yield a predicate for each tensor whose type ggml's operations on a processor do not accept in its role."""
    for tensor in tensors:
        kind = TENSOR_TYPES[tensor.kind][0]
        if is_index(tensor.name):
            continue
        if tensor.kind != _F32 and _ELEMENTWISE.fullmatch(tensor.name):
            yield f"holds {tensor.name} in {kind}; llama.cpp computes with it in F32 alone"
        elif kind in _NO_PRODUCT:
            yield f"holds {tensor.name} in {kind}, with which llama.cpp cannot multiply"
