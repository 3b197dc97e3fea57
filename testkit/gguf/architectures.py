"""Write a small model with random weights of any architecture that the pinned llama.cpp knows.

An architecture is described by its hyperparameters alone: llama.cpp creates the tensors that these ask for, and reports
their names and shapes. Vocabulary and chat template are those of the bundled pair, so that every file takes part in a
conversation, and any two files can be draft model and verifier. Files are narrow, but have the structure of their kind:
windows of 32 positions in llama.cpp's own pattern, several experts of which two are used, recurrent layers between
those with attention. All weights are float32. `noise` changes each weight at random by that share of itself, which
gives a draft model that is right some of the time. With `mtp` the file ends with a layer that predicts further tokens
(MTP, next-n), for the architectures in `WITH_MTP`; it is right some of the time, or useless.

What cannot be made this way:

- llama4, smallthinker: llama.cpp fixes their windows at 8,192 and 4,096 positions, longer than these models' context.
- jamba with experts in every second layer only, as real files have it: without a file llama.cpp creates experts in
  every layer or in none. Here every layer has them.
- deepseek4's layers that choose experts by token: their table holds integers, and the file would not be all float32.
- MTP layers of other architectures than those in `WITH_MTP`: mimo2's needs one tensor for query, key and value, where
  its other layers have three, and others have no model here.
- bert, t5 and other encoders, dream, llada and other diffusion models: edgellm does not generate with them.
- gptj, chameleon, clip, wavtokenizer: llama.cpp has no working graph for them, or they are not for text.

gemma3n's file has 67 MB, as llama.cpp fixes the width of its embeddings per layer. llama.cpp looks up GELU in a table
of 16-bit numbers: logits of models with GELU (the gemmas, gpt2, bloom and others) differ by up to 3e-4 of the largest
between decodes of one row and of many, and those of other models by 1e-6.
"""

import ctypes
import functools
import hashlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

from edgellm.engine import native
from edgellm.engine.native import lib
from testkit import ROOT
from testkit.gguf.reader import read_gguf

Mtp: TypeAlias = Literal["none", "useful", "useless"]
Kind: TypeAlias = Literal["dense", "moe", "window", "hybrid", "recurrent", "mla"]
Value: TypeAlias = bool | int | float | str | Sequence[int]
Floats: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, ...]

WINDOW = 32


@dataclass(frozen=True, slots=True)
class TokenizerEntry:
    """A key of a file's vocabulary, with its value and type; `of` is that of an array's elements."""

    name: str
    value: Any
    kind: gguf.GGUFValueType
    of: gguf.GGUFValueType | None = None


@dataclass(frozen=True, slots=True)
class Architecture:
    """The hyperparameters of a small model.

    The keys of `metadata` lack the architecture's name. Patterns select tensors by name among those that llama.cpp
    takes where they exist: `keep` those of `OPTIONAL` that real models of this architecture have, `drop` others that
    they lack. With `fused`, query, key and value are one tensor in the file. Where llama.cpp multiplies embeddings by
    `embedding_factor`, or does not scale attention scores, a smaller embedding and `query_factor` make up for it.
    Hyperparameters that do not fit each other make llama.cpp end the process. `name`: llama.cpp's, where it is another.
    `tokenizer`: the entries of a vocabulary other than the bundled pair's.
    """

    kind: Kind
    metadata: Mapping[str, Value]
    keep: str = "$^"
    drop: str = "$^"
    fused: bool = False
    embedding_factor: float = 1.0
    query_factor: float = 1.0
    name: str = ""
    tokenizer: Sequence[TokenizerEntry] = ()


OPTIONAL = (
    r"\.(input_)?scale$|attn_(q|k|v|output)\.bias$|ffn_(gate|up|down)\.bias$|^rope_f|^cls|^dense_|exp_probs_b_vl|"
    r"ffn_latent_|exp_probs_b\.bias$"
)
"""Tensors that llama.cpp takes where they exist, and that most real models lack."""

STREAM = 1.5  # standard deviation of an embedding as it enters the first layer
LOGITS = 8.0  # standard deviation of a token's logits
BRANCH = (
    r"\.(attn_output(_b)?|ssm_out|shortconv\.out_proj|time_mix_output|ffn_down(_exps|_shexp)?|channel_mix_value|"
    r"laurel_r|proj|post_attention_norm|post_ffw_norm|(laurel_)?post_norm)(\.weight)?$"
)
"""Tensors that decide how much a layer adds to the residual stream."""


@dataclass(frozen=True, slots=True)
class Scale:
    """Standard deviations with which the text is lively, and a noisy copy of the model is right some of the time.

    Each layer adds little to the residual stream, so that the noise of all layers does not add up to chaos. Where the
    embedding is the LM head, too (`tied`), every token would repeat itself: there the last norm has random signs.
    """

    embedding: float
    branch: float
    query_norm: float
    last_norm: float
    tied: bool

    @classmethod
    def of(cls, architecture: Architecture, shapes: Mapping[str, Shape]) -> "Scale":
        tied = "output.weight" not in shapes
        width = shapes["token_embd.weight"][-1]
        layers = len({name.split(".")[1] for name in shapes if name.startswith("blk.")})
        layers -= sum(name.endswith(PROJECTION) for name in shapes)
        embedding = STREAM / architecture.embedding_factor
        last_norm = LOGITS / (embedding * width**0.5) if tied else 1.0
        return cls(embedding, 0.6 * (4 / layers) ** 0.5, architecture.query_factor, last_norm, tied)

    def weights(self, name: str, normal: Floats) -> Floats:
        """Return the values of a tensor, given as many of standard deviation 1."""
        width = normal.shape[-1]
        if name == "token_embd.weight":
            return normal * np.float32(self.embedding)
        if name == "output.weight":
            return normal * np.float32(LOGITS * width**-0.5)
        if self.tied and name in ("output_norm.weight", "token_embd_norm.weight"):  # LFM2 calls it the latter
            return np.sign(normal) * np.float32(self.last_norm)
        if "ssm_a" in name and not name.endswith(".weight"):  # a decay per step
            return -np.exp(normal)
        if "lerp" in name:  # between the token before and this one
            return np.float32(0.5) + np.float32(0.5) * np.tanh(normal)
        if name.endswith(USEFUL):  # of the token's embedding and the last state, mostly the former
            return np.float32(STREAM) * np.eye(*normal.shape, dtype=np.float32) + normal * np.float32(0.3 * width**-0.5)
        gain = self._gain(name)
        if re.search(r"norm|_ln\.|scale|rope_f|ssm_d$", name):
            return (np.float32(not name.endswith(".bias")) + normal * np.float32(0.1)) * np.float32(gain)
        if name.endswith(".bias"):
            return normal * np.float32(0.1)
        return normal * np.float32(gain * width**-0.5)

    def _gain(self, name: str) -> float:
        if re.search(BRANCH, name):
            return self.branch
        if name.startswith("token_embd_norm"):
            return STREAM
        if "attn_q_norm" in name:
            return self.query_norm
        if re.search(r"ssm_[bc]_norm", name):
            return 0.5
        return 1.5 if re.search(r"attn_[qk](_b)?\.", name) else 1.0  # a few positions matter to each


def transformer(
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
    heads_kv: int | Sequence[int] = 2,
    ff: int | Sequence[int] = 128,
    **more: Value,
) -> dict[str, Value]:
    """Return the hyperparameters that most architectures read, and `more`, whose "__" stands for a dot."""
    return {
        "context_length": 1024,
        "block_count": layers,
        "embedding_length": width,
        "feed_forward_length": ff,
        "attention.head_count": heads,
        "attention.head_count_kv": heads_kv,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        **{name.replace("__", "."): value for name, value in more.items()},
    }


EXPERTS: dict[str, Value] = {
    "expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 48, "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 48, "expert_gating_func": 2, "expert_weights_norm": True,
    "expert_weights_scale": 1.0,
}  # fmt: skip
SLIDING: dict[str, Value] = {"attention.sliding_window": WINDOW}
MAMBA: dict[str, Value] = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4, "ssm.group_count": 1,
}  # fmt: skip
DELTA_NET: dict[str, Value] = {
    "ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 32, "ssm.time_step_rank": 4, "ssm.group_count": 2,
    "full_attention_interval": 4, "attention.key_length": 32, "attention.value_length": 32,
    "rope.dimension_count": 8, "rope.dimension_sections": [2, 1, 1, 0],
}  # fmt: skip
LATENT: dict[str, Value] = {
    "attention.kv_lora_rank": 32, "attention.key_length": 48, "attention.value_length": 32,
    "attention.key_length_mla": 32, "attention.value_length_mla": 16, "rope.dimension_count": 16,
}  # fmt: skip

PROJECTION = "nextn.eh_proj.weight"
"""The tensor that makes one row of a token's embedding and the state before it, with which an MTP layer begins."""
USEFUL = "useful." + PROJECTION
WITH_MTP = ("qwen35", "qwen35moe", "qwen3next", "glm4moe", "step35", "deepseek2", "deepseek32")

TIED = r"^output\.weight"

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("dense", transformer()),
    "mistral3": Architecture(
        "dense", transformer(attention__temperature_scale=0.1, rope__scaling__original_context_length=16)
    ),
    "qwen2": Architecture("dense", transformer(), keep=r"attn_[qkv]\.bias"),
    "qwen3": Architecture("dense", transformer(attention__key_length=32, attention__value_length=32)),
    "phi3": Architecture("dense", transformer(), fused=True),
    "olmo2": Architecture("dense", transformer(heads_kv=4)),
    "smollm3": Architecture("dense", transformer()),
    "glm4": Architecture("dense", transformer(rope__dimension_count=8)),
    "granite": Architecture(
        "dense", transformer(logit_scale=1.5, residual_scale=0.5, embedding_scale=4.0, attention__scale=0.2)
    ),
    "command-r": Architecture("dense", transformer(logit_scale=1.0)),
    "stablelm": Architecture(
        "dense", transformer(heads_kv=4, rope__dimension_count=4), keep=r"attn_[qkv]\.bias", drop=r"attn_[qk]_norm"
    ),
    "gptneox": Architecture(
        "dense",
        transformer(heads_kv=4, rope__dimension_count=4, use_parallel_residual=True),
        keep=r"(attn_output|ffn_up|ffn_down)\.bias",
    ),
    "falcon": Architecture("dense", transformer(heads_kv=1), drop="attn_norm_2"),
    "gpt2": Architecture("dense", transformer(heads_kv=4), keep=r"(attn_output|ffn_up|ffn_down)\.bias"),
    "bloom": Architecture("dense", transformer(heads_kv=4), keep=r"(attn_output|ffn_up|ffn_down)\.bias", drop=TIED),
    "mpt": Architecture(
        "dense",
        transformer(heads_kv=4, attention__max_alibi_bias=8.0),
        drop=r"^(output\.|position_embd)|_norm\.bias|attn_qkv\.bias|attn_k_norm|ffn_act",
    ),
    "starcoder2": Architecture(
        "dense", transformer(), keep=r"attn_(q|k|v|output)\.bias|ffn_(up|down)\.bias", drop=TIED
    ),
    "qwen3moe": Architecture("moe", transformer(attention__key_length=32, attention__value_length=32) | EXPERTS),
    "glm4moe": Architecture(
        "moe",
        transformer(leading_dense_block_count=1, rope__dimension_count=8) | EXPERTS,
        keep=r"attn_[qkv]\.bias|exp_probs_b\.bias",
    ),
    "ernie4_5-moe": Architecture(
        "moe",
        transformer(leading_dense_block_count=1, interleave_moe_layer_step=1) | EXPERTS,
        keep=r"exp_probs_b\.bias",
    ),
    "gpt-oss": Architecture("window", transformer() | EXPERTS | SLIDING, keep=r"attn_(q|k|v|output)\.bias"),
    "deepseek2": Architecture(
        "mla",
        transformer(heads_kv=1, leading_dense_block_count=1, attention__q_lora_rank=32) | LATENT | EXPERTS,
        keep=r"exp_probs_b\.bias",
    ),
    "deepseek32": Architecture(
        "mla",
        transformer(
            heads_kv=1, leading_dense_block_count=1, attention__q_lora_rank=32, attention__indexer__head_count=16,
            attention__indexer__key_length=64, attention__indexer__top_k=24,
        ) | LATENT | EXPERTS,
        keep=r"exp_probs_b\.bias",
    ),
    "gemma2": Architecture(
        "window", transformer(attn_logit_softcapping=50.0, final_logit_softcapping=30.0) | SLIDING, embedding_factor=8.0
    ),
    "gemma3": Architecture(
        "window",
        transformer(layers=6, attention__key_length=32, attention__value_length=32) | SLIDING,
        drop=TIED,
        embedding_factor=8.0,
    ),
    "gemma4": Architecture(
        "window",
        transformer(
            layers=10, attention__key_length=64, attention__value_length=64, attention__key_length_swa=32,
            attention__value_length_swa=32, rope__dimension_count=64, rope__dimension_count_swa=32,
            embedding_length_per_layer_input=16, attention__shared_kv_layers=5, final_logit_softcapping=30.0,
            attention__sliding_window_pattern=[True, True, True, True, False] * 2,
        ) | SLIDING, drop=TIED, embedding_factor=8.0, query_factor=0.2,
        keep=r"^rope_freqs",
    ),
    "gemma3n": Architecture(  # llama.cpp lets the layers from the 21st on share keys and values of earlier ones
        "window", transformer(layers=22) | SLIDING, drop=TIED, embedding_factor=8.0, query_factor=0.2
    ),
    "cohere2": Architecture("window", transformer(logit_scale=1.0) | SLIDING),
    "mimo2": Architecture(
        "window",
        transformer(
            attention__key_length=24, attention__value_length=16, rope__dimension_count=8,
            attention__sliding_window_pattern=[False, True, True, False],
        ) | SLIDING | EXPERTS,
        keep=r"exp_probs_b\.bias",
        drop=r"blk\.0\.(ffn_.*exp|ffn_gate_inp)|blk\.[1-9]\.ffn_(gate|up|down)\.weight|blk\.[03]\.attn_sinks",
    ),
    "afmoe": Architecture(
        "window", transformer(leading_dense_block_count=1) | SLIDING | EXPERTS, keep=r"exp_probs_b\.bias"
    ),
    "step35": Architecture(
        "window",
        transformer(
            attention__key_length=32, attention__value_length=32,
            attention__sliding_window_pattern=[False, True, True, True],
        ) | SLIDING | EXPERTS,
        keep=r"exp_probs_b\.bias",
        drop=r"blk\.0\.(ffn_.*exp|ffn_gate_inp)|blk\.[1-9]\.ffn_(gate|up|down)\.weight",
    ),
    # llama.cpp gives only the one of 64 layers a window
    "exaone4": Architecture("window", transformer(layers=64, width=32, heads=2, heads_kv=1, ff=64) | SLIDING),
    "qwen35": Architecture("hybrid", transformer() | DELTA_NET),
    "qwen35moe": Architecture("hybrid", transformer() | DELTA_NET | EXPERTS),
    "qwen3next": Architecture("hybrid", transformer() | DELTA_NET | EXPERTS, drop="ssm_in"),
    "lfm2": Architecture("hybrid", transformer(heads_kv=[0, 0, 2, 0], shortconv__l_cache=3), drop=TIED),
    "lfm2moe": Architecture(
        "hybrid",
        transformer(heads_kv=[0, 0, 2, 0], shortconv__l_cache=3, leading_dense_block_count=1) | EXPERTS,
        keep=r"exp_probs_b\.bias", drop=TIED,
    ),
    "granitehybrid": Architecture(
        "hybrid",
        transformer(
            heads_kv=[0, 2, 0, 2], logit_scale=1.5, residual_scale=0.5, embedding_scale=4.0, attention__scale=0.2
        ) | MAMBA,
    ),
    "nemotron_h": Architecture(
        "hybrid", transformer(layers=6, heads_kv=[0, 0, 0, 2, 0, 0], ff=[0, 128, 0, 0, 0, 128]) | MAMBA
    ),
    "falcon-h1": Architecture("hybrid", transformer() | MAMBA),
    "jamba": Architecture("hybrid", transformer(heads_kv=[0, 2, 0, 0]) | MAMBA | EXPERTS),
    "plamo2": Architecture("hybrid", transformer(heads_kv=[0, 2, 0, 2]) | MAMBA | {"ssm.group_count": 0}),
    "kimi-linear": Architecture(
        "hybrid",
        transformer(heads_kv=[0, 0, 0, 1], leading_dense_block_count=1, kda__head_dim=16, ssm__conv_kernel=4)
        | LATENT | EXPERTS,
        keep=r"exp_probs_b\.bias",
    ),
    "minimax-01": Architecture(
        "hybrid", transformer(full_attention_interval=4, residual_scale=1.0) | EXPERTS
    ),
    "mamba": Architecture("recurrent", transformer(heads=0, heads_kv=0, ff=0) | MAMBA),
    "mamba2": Architecture("recurrent", transformer(heads=0, heads_kv=0, ff=0) | MAMBA),
    "rwkv6": Architecture(
        "recurrent",
        transformer(
            width=128, heads=0, heads_kv=0, ff=256, wkv__head_size=64, time_mix_extra_dim=16, time_decay_extra_dim=16,
            rescale_every_n_layers=6,
        ),
        drop="time_mix_lerp_[wkvrg]",
    ),
    # with AVX-512 llama.cpp computes heads of rwkv7 that are smaller than the real 64 wrongly
    "rwkv7": Architecture(
        "recurrent",
        transformer(
            width=128, heads=0, heads_kv=0, ff=256, wkv__head_size=64, attention__decay_lora_rank=16,
            attention__iclr_lora_rank=16, attention__value_residual_mix_lora_rank=16, attention__gate_lora_rank=16,
        ),
    ),
    "deepseek4": Architecture(
        "hybrid",
        transformer(
            heads=2, heads_kv=1, attention__key_length=64, attention__value_length=64, rope__dimension_count=32,
            attention__q_lora_rank=32, attention__output_group_count=2, attention__output_lora_rank=16,
            attention__compress_ratios=[0, 0, 4, 128], attention__compress_rope_freq_base=160000.0,
            attention__indexer__head_count=16, attention__indexer__top_k=4,
            # as in the real model not `key_length`: llama.cpp 0.6 takes a cache without layers for that of its indexer
            attention__indexer__key_length=128,
            hyper_connection__count=4, hyper_connection__sinkhorn_iterations=20, hyper_connection__epsilon=1e-6,
            hash_layer_count=0, swiglu_clamp_exp=10.0,
        ) | SLIDING | EXPERTS | {"expert_gating_func": 4},
        keep=r"exp_probs_b\.bias",
    ),
}  # fmt: skip

SHAPES_TO_CUT: dict[str, Architecture] = {
    "llama of experts": Architecture("moe", transformer() | EXPERTS, name="llama"),
    "llama with a window": Architecture("dense", transformer() | SLIDING, name="llama"),
    "smollm3 of 8 layers": Architecture("dense", transformer(layers=8), name="smollm3"),
    "afmoe of 8 layers": Architecture(
        "window", transformer(layers=8, leading_dense_block_count=2) | SLIDING | EXPERTS, keep=r"exp_probs_b\.bias",
        name="afmoe", embedding_factor=8.0,
    ),
    "gemma4 dense": Architecture(
        "window",
        transformer(
            layers=6, heads_kv=[2, 2, 1, 2, 2, 1], ff=[128, 96, 128, 96, 128, 96], attention__key_length=64,
            attention__value_length=64, attention__key_length_swa=32, attention__value_length_swa=32,
            rope__dimension_count=64, rope__dimension_count_swa=32, embedding_length_per_layer_input=0,
            final_logit_softcapping=30.0, attention__sliding_window_pattern=[True, True, False] * 2,
        ) | SLIDING, drop=TIED, embedding_factor=8.0, query_factor=0.2, keep=r"^rope_freqs", name="gemma4",
    ),
    "gemma3 without a window": Architecture("dense", transformer(), drop=TIED, embedding_factor=8.0, name="gemma3"),
    "gemma3 of 62 layers": Architecture(
        "window",
        transformer(
            layers=62, width=64, heads=2, heads_kv=1, ff=32, attention__key_length=16, attention__value_length=16
        ) | SLIDING, drop=TIED, embedding_factor=8.0, name="gemma3",
    ),
    "gpt-oss, full layers first": Architecture(
        "window", transformer(attention__sliding_window_pattern=[False, True, True, False]) | EXPERTS | SLIDING,
        keep=r"attn_(q|k|v|output)\.bias", name="gpt-oss",
    ),
    "cohere2 of 8 layers": Architecture("window", transformer(layers=8, logit_scale=1.0) | SLIDING, name="cohere2"),
    "glm4moe of 5 layers": Architecture(
        "moe", transformer(layers=5, leading_dense_block_count=2, rope__dimension_count=8) | EXPERTS,
        keep=r"attn_[qkv]\.bias|exp_probs_b\.bias", name="glm4moe",
    ),
    "arcee": Architecture("dense", transformer()),
    "bailingmoe": Architecture("moe", transformer() | EXPERTS),
    "bailingmoe2": Architecture("moe", transformer(leading_dense_block_count=1) | EXPERTS, keep=r"exp_probs_b\.bias"),
    "deepseek": Architecture("moe", transformer(leading_dense_block_count=1) | EXPERTS),
    "dots1": Architecture(
        "moe", transformer(heads_kv=4, leading_dense_block_count=1) | EXPERTS, keep=r"exp_probs_b\.bias"
    ),
    "ernie4_5": Architecture("dense", transformer()),
    "exaone": Architecture("dense", transformer()),
    "exaone4 of 6 layers": Architecture("dense", transformer(layers=6), name="exaone4"),
    "exaone-moe": Architecture(
        "window", transformer(layers=8, leading_dense_block_count=1) | EXPERTS | SLIDING, keep=r"exp_probs_b\.bias"
    ),
    "gemma": Architecture("dense", transformer(width=96), embedding_factor=96**0.5),
    "granitemoe": Architecture(
        "moe", transformer(logit_scale=1.5, residual_scale=0.5, embedding_scale=12.0, attention__scale=0.2) | EXPERTS
    ),
    "hunyuan-dense": Architecture("dense", transformer()),
    "hunyuan-moe": Architecture("moe", transformer() | EXPERTS),
    "internlm2": Architecture("dense", transformer()),
    "minicpm": Architecture("dense", transformer(residual_scale=0.5, embedding_scale=4.0)),
    "minimax-m2": Architecture("moe", transformer() | EXPERTS, keep=r"exp_probs_b\.bias"),
    "nemotron": Architecture("dense", transformer(rope__dimension_count=8)),
    "olmo": Architecture("dense", transformer(attention__clamp_kqv=8.0)),
    "olmo2 with a window": Architecture("window", transformer(heads_kv=4) | SLIDING, name="olmo2"),
    "olmoe": Architecture("moe", transformer(heads_kv=4) | EXPERTS),
    "phi2": Architecture(
        "dense", transformer(heads_kv=4, rope__dimension_count=8), keep=r"(attn_output|ffn_up|ffn_down)\.bias"
    ),
    "phimoe": Architecture("moe", transformer() | EXPERTS, keep=r"attn_output\.bias"),
    "qwen2moe": Architecture("moe", transformer() | EXPERTS, keep=r"attn_[qkv]\.bias"),
    "qwen2vl": Architecture("dense", transformer(rope__dimension_sections=[4, 2, 2, 0]), keep=r"attn_[qkv]\.bias"),
    "qwen3vl": Architecture("dense", transformer(rope__dimension_sections=[4, 2, 2, 0], n_deepstack_layers=2)),
    "qwen3vlmoe": Architecture(
        "moe", transformer(rope__dimension_sections=[4, 2, 2, 0], n_deepstack_layers=2) | EXPERTS
    ),
    "seed_oss": Architecture("dense", transformer(), keep=r"attn_[qkv]\.bias"),
}  # fmt: skip
"""Further models, for layers that are cut apart. Those of `ARCHITECTURES` chat, too."""


EMBEDDING = {
    "bert": Architecture(
        "dense", transformer(heads_kv=4, attention__causal=False, pooling_type=1, context_length=64)
    ),
}  # fmt: skip
"""Models that only embed. Others embed with a `pooling_type` among their `sizes`."""


def write(
    name: str, path: Path, *, seed: int = 0, noise: float = 0.0, mtp: Mtp = "none",
    sizes: Mapping[str, Value] = MappingProxyType({}), branch: float = 1.0,
    tokenizer: Sequence[TokenizerEntry] = (),
) -> None:  # fmt: skip
    """Write a model of the architecture `name`. The same arguments give the same bytes.

    With `noise` every weight is multiplied by 1 plus a random number of that standard deviation. With `mtp` it has a
    layer more that predicts further tokens; the other weights are the same. `sizes` are hyperparameters that differ,
    and `branch` is a factor of what each layer adds to the residual stream: the less that is, the more often a useful
    MTP layer is right. `tokenizer` are all entries of a vocabulary and chat template other than the bundled pair's.
    """
    architecture = (ARCHITECTURES | SHAPES_TO_CUT | EMBEDDING)[name]
    name = architecture.name or name
    architecture = replace(architecture, metadata={**architecture.metadata, **sizes}, tokenizer=tokenizer)
    architecture = architecture if mtp == "none" else _with_mtp(architecture)
    writer = _described(name, architecture, path)
    shapes = _tensors(name, architecture)
    scale = Scale.of(architecture, shapes)
    scale = replace(scale, branch=branch * scale.branch)
    for tensor, shape in shapes.items():
        kind = USEFUL if mtp == "useful" and tensor.endswith(PROJECTION) else tensor
        writer.add_tensor(tensor, _weights(kind, shape, scale, seed, noise))
    finish(writer)


def write_bert(path: Path) -> None:
    """Write a model of BERT's architecture, which embeds texts, with the bundled pair's vocabulary."""
    more = (
        TokenizerEntry("tokenizer.ggml.token_type_count", 2, gguf.GGUFValueType.UINT32),
        TokenizerEntry("tokenizer.ggml.add_eos_token", True, gguf.GGUFValueType.BOOL),
    )
    write("bert", path, tokenizer=[*_bundled_tokenizer(), *more])


def _with_mtp(architecture: Architecture) -> Architecture:
    """Return the architecture with a layer that predicts further tokens, the last of the file."""
    layers = architecture.metadata["block_count"]
    if not isinstance(layers, int):
        raise TypeError(f"block_count is {layers!r}")
    metadata = {
        key: [*value, value[-1]] if isinstance(value, Sequence) and "sections" not in key else value
        for key, value in architecture.metadata.items()
        if not isinstance(value, str)
    }
    more: dict[str, Value] = {"block_count": layers + 1, "nextn_predict_layers": 1}
    drop = rf"{architecture.drop}|nextn\.(embed_tokens|shared_head_head)"
    return replace(architecture, metadata=metadata | more, drop=drop)


class _Tensor(ctypes.Structure):
    """The beginning of llama.cpp's record of a tensor."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


class _Init(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _tensors(name: str, architecture: Architecture) -> dict[str, Shape]:
    """Return the shapes of the file's tensors, rows first."""
    found: dict[str, Shape] = {}
    for tensor, shape in _created(name, architecture).items():
        if re.search(architecture.drop, tensor):
            continue
        if re.search(OPTIONAL, tensor) and not re.search(architecture.keep, tensor):
            continue
        if "ffn_gate_up_exps" in tensor:  # llama.cpp's preference; real files have two tensors
            for part in ("gate", "up"):
                found[tensor.replace("gate_up", part)] = (shape[0], shape[1] // 2, shape[2])
        elif architecture.fused and re.search("attn_[qkv]\\.", tensor):
            whole = re.sub("attn_[qkv]", "attn_qkv", tensor)
            found[whole] = (found.get(whole, (0,))[0] + shape[0], *shape[1:])
        else:
            found[tensor] = shape
    return found


def _created(name: str, architecture: Architecture) -> dict[str, Shape]:
    """Return the shapes of all tensors that llama.cpp creates for these hyperparameters, rows first."""
    native.start()
    base = native.LIBRARY.opened["ggml-base"]
    read = native.bind(base.gguf_init_from_file, ctypes.c_void_p, ctypes.c_char_p, _Init)
    free = native.bind(base.gguf_free, None, ctypes.c_void_p)
    shapes: dict[str, Shape] = {}

    def note(address: int, _user: int | None) -> None:
        ne = _Tensor.from_address(address).ne
        shape = tuple(ne[i] for i in reversed(range(4)))
        while len(shape) > 1 and shape[0] == 1:
            shape = shape[1:]
        shapes[native.ggml.ggml_get_name(address).decode()] = shape

    params = lib.llama_model_default_params()
    params.load_mtp = True
    mark = native.log.count
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metadata.gguf"
        finish(_described(name, architecture, path))
        metadata = read(str(path).encode(), _Init(True, None))
    model = lib.llama_model_init_from_user(metadata, lib.llama_model_set_tensor_data_t(note), None, params)
    free(metadata)
    if not model:
        raise ValueError(f"llama.cpp refuses {name}: {native.log.since(mark)}")
    lib.llama_model_free(model)
    return shapes


def _described(name: str, architecture: Architecture, path: Path) -> gguf.GGUFWriter:
    """Return a writer that has the metadata."""
    writer = gguf.GGUFWriter(path, name)
    writer.add_file_type(0)
    writer.add_float32("general.sampling.temp", 0.0)  # the same text every time
    for key, value in architecture.metadata.items():
        _add(writer, f"{name}.{key}", value)
    for entry in architecture.tokenizer or _bundled_tokenizer():
        writer.add_key_value(entry.name, entry.value, entry.kind, entry.of)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    """Write what was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, key: str, value: Value) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


@functools.cache
def _bundled_tokenizer() -> list[TokenizerEntry]:
    return tokenizer_of(ROOT / "models" / "draft.gguf")


def tokenizer_of(path: Path) -> list[TokenizerEntry]:
    """Return the entries of a file's vocabulary and chat template."""
    return [
        TokenizerEntry(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for name, field in read_gguf(path).fields.items()
        if name.startswith("tokenizer.")
    ]


def _weights(name: str, shape: Shape, scale: Scale, seed: int, noise: float) -> Floats:
    """Return the tensor's values, the same in every process."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(digest, "little"))
    weights = scale.weights(name, rng.standard_normal(shape, dtype=np.float32))
    if noise:
        weights *= 1 + np.float32(noise) * rng.standard_normal(shape, dtype=np.float32)
    return weights
