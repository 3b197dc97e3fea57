"""Architectures that pass the self-test by what is on record, so that a model of theirs need not run it."""

from __future__ import annotations

from edgellm.engine.gguf.reader import GgufHeader
from edgellm.engine.hardware import DEFAULT_CACHE, Hardware, offload_devices
from edgellm.engine.native import commit

PROVEN_COMMITS = ("0c1e570", "86a2835")
"""The commits of llama.cpp for which the record holds: that of the compiled library, with which it was made, and that
of the prebuilt one, with which each of these architectures passes the self-test (`tests/engine/test_self_test.py`).
With another one a model is tested before its first reply."""
PROVEN = frozenset({
    "afmoe", "bloom", "cohere2", "command-r", "deepseek2", "deepseek32", "deepseek4", "ernie4_5-moe", "exaone4",
    "falcon", "falcon-h1", "gemma2", "gemma3", "gemma3n", "gemma4", "glm4", "glm4moe", "gpt-oss", "gpt2", "gptneox",
    "granite", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "llama", "mamba", "mamba2", "mimo2",
    "minimax-01", "mistral3", "mpt", "nemotron_h", "olmo2", "phi3", "qwen2", "qwen3", "qwen35", "qwen35moe",
    "qwen3moe", "qwen3next", "rwkv6", "rwkv7", "smollm3", "stablelm", "starcoder2", "step35",
})  # fmt: skip
"""Architectures of which 10,000 rollbacks and branches on a processor left no wrong state: `bench.models.architectures`
has recorded it."""


def is_proven(header: GgufHeader, hardware: Hardware) -> bool:
    """Return whether models of this architecture are on record as they are computed here: with this llama.cpp, on a
    processor, beside which there is no graphics card for long batches, and with a cache as by default."""
    known = commit() in PROVEN_COMMITS and header.architecture in PROVEN
    default = hardware.cache_type in (None, DEFAULT_CACHE) and hardware.flash_attn is None
    return known and default and not hardware.gpu_layers and not offload_devices()
